"""One stage run, from the wanted payload to the committed record."""

from dataclasses import dataclass
from typing import Any, Literal

from pipelines import overlap
from pipelines.decide import OnChange, decide, defaults_of, payload
from pipelines.digests import AssetDigests
from pipelines.facts import volatile
from pipelines.launch import Launcher
from pipelines.plan import FromNode, PlanNode
from pipelines.progress import Clock, Lines
from pipelines.prune import lost_input
from pipelines.rundir import Address, StageDirectory, outputs_of, write_request
from pipelines.unroll import Resolved, Unrolled, identity_of
from schemas.contracts import ScoreConfig
from schemas.errors import InputError
from schemas.fingerprint import fingerprint
from schemas.record import Answer, StageRecord, StageRequest

State = Literal["done", "reused", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """How a stage run ended, and its metrics."""

    state: State
    address: Address
    metrics: dict[str, float]
    note: str = ""


@dataclass(frozen=True)
class Executor:
    """Runs stages of one plan into one run directory."""

    world: Unrolled
    launcher: Launcher
    digests: AssetDigests
    lines: Lines
    on_change: OnChange
    rehearsal: bool = False

    def run(self, node: PlanNode, iteration: int | None) -> Outcome:
        """Reuses, skips or computes a stage whose inputs are committed."""
        address = Address(node.section, node.name, iteration)
        if address.path in self.world.run.adopted:
            return self._adopted(address)
        directory = self.world.run.stage(address)
        why = self.world.unwanted(node, iteration)
        resolved = Resolved(missing=why) if why else self.world.resolve(node, iteration)
        if resolved.missing:
            return self._skip(node, address, directory, resolved.missing)
        seed = self.world.plan.seed
        wanted = payload(node, resolved.identity, seed, iteration, self.digests)
        record = directory.record()
        if record is not None and record.status == "done" and self._stands(node, address, record, wanted, resolved):
            self.lines.reused(address)
            return Outcome("reused", address, record.outputs.get("metrics", {}))
        lost = lost_input(dict(node.contract.inputs.model_validate(resolved.request)), resolved.sources)
        if lost:
            raise InputError(f"{address.label}: {lost}; begin at an earlier stage, or make that stage again")
        if record is not None:
            directory.move_aside()
        return self._compute(node, address, directory, wanted, resolved)

    def _adopted(self, address: Address) -> Outcome:
        """A stage run of another run; it is never compared with the plan, and never touched."""
        self.world.run.verify(address)
        record = self.world.record(address)
        self.lines.reused(address)
        return Outcome("reused", address, record.outputs.get("metrics", {}), "adopted")

    def _stands(
        self, node: PlanNode, address: Address, record: StageRecord, wanted: dict[str, Any], resolved: Resolved
    ) -> bool:
        decision = decide(
            record,
            wanted,
            defaults_of(node),
            self.on_change,
            address.label,
            lambda name: self._follows(node, name, record, resolved),
        )
        if decision.note:
            self.lines.note(f"{address.label}: {decision.note}")
        return decision.action == "reuse"

    def _follows(self, node: PlanNode, name: str, record: StageRecord, resolved: Resolved) -> bool:
        """A longer loop gives `after` other inputs, and readers of an `every` stage that ran only as the last one.

        What stands on a stage that was made again, with consent or for this reason, follows it.
        """
        if node.section == "after" or self._made_again(name, record, resolved):
            return True
        edge = node.inputs.get(name)
        if not isinstance(edge, FromNode) or self.world.plan.nodes[edge.node].every is None:
            return False
        old, new = str(record.sources.get(name, "")), str(resolved.sources.get(name, ""))
        return old != new and old.partition("/")[2] == new.partition("/")[2]

    def _made_again(self, name: str, record: StageRecord, resolved: Resolved) -> bool:
        """Whether an input comes from the same stage run as before, whose old result was moved aside."""
        source = resolved.sources.get(name)
        if not isinstance(source, str) or source != record.sources.get(name):
            return False
        path, _, output = source.rpartition(".")
        place = self.world.run.path / path
        contract = self.world.plan.nodes[place.name].contract if place.name in self.world.plan.nodes else None
        old = (StageDirectory(folder).record() for folder in place.parent.glob(f"{place.name}.stale-*"))
        return contract is not None and any(
            identity_of(dict(outputs_of(stale, contract, place)).get(output)) == record.payload["inputs"].get(name)
            for stale in old
            if stale is not None and stale.status == "done"
        )

    def _skip(self, node: PlanNode, address: Address, directory: StageDirectory, why: str) -> Outcome:
        wanted = {"stage": node.stage, "version": node.contract.version, "skipped": True}
        record = directory.record()
        if record is not None and record.status == "skipped":
            self.lines.reused(address)
            return Outcome("reused", address, {}, record.why)
        if record is not None:
            # Made when it was still wanted: like any other result of another recipe.
            decision = decide(record, wanted, {}, self.on_change, address.label, lambda _: node.section == "after")
            if decision.action == "reuse":
                return Outcome("reused", address, {})
            directory.move_aside()
        directory.open_partial({"skipped": True})
        skipped = self._record(node, address, wanted, Resolved(older=why), Answer({}, {}), Clock())
        directory.commit(skipped.model_copy(update={"status": "skipped"}), node.contract)
        self.lines.skipped(address, why)
        return Outcome("skipped", address, {}, why)

    def _compute(
        self,
        node: PlanNode,
        address: Address,
        directory: StageDirectory,
        wanted: dict[str, Any],
        resolved: Resolved,
    ) -> Outcome:
        resources = self.world.plan.resources
        micro_batch = resources.micro_batch_of(node.name, node.stage)
        # Shards of a stopped run are good only when the same rows would be cut in the same way.
        cut = {
            "fingerprint": fingerprint(wanted),
            "micro_batch": micro_batch,
            "shard_micro_batches": resources.shard_micro_batches,
        }
        partial = directory.open_partial(cut)
        request = StageRequest(
            stage=node.stage,
            node=node.name,
            config=node.config.model_dump(mode="json"),
            inputs=resolved.request,
            directory=str(partial.resolve()),
            seed=self.world.plan.seed,
            iteration=address.iteration,
            resources=resources,
            python_path=self.world.plan.python_path,
            rehearsal=self.rehearsal,
        )
        write_request(partial, request)
        early = 0
        if isinstance(node.config, ScoreConfig):
            early = overlap.take(self.world, node, address.iteration, partial, resolved.request["samples"])
        clock = Clock()
        with overlap.beside(self.world, self.launcher, node, address.iteration, partial):
            answer = self.launcher.run(request, self.lines.ticker(address, clock), clock.restart)
        if early:
            answer.measured["shards_scored_early"] = float(early)
        record = self._record(node, address, wanted, resolved, answer, clock)
        directory.commit(record, node.contract)
        metrics = answer.outputs.get("metrics", {})
        self.lines.done(address, record.volatile.seconds, metrics)
        return Outcome("done", address, metrics)

    def _record(
        self,
        node: PlanNode,
        address: Address,
        wanted: dict[str, Any],
        resolved: Resolved,
        answer: Answer,
        clock: Clock,
    ) -> StageRecord:
        resources = self.world.plan.resources
        ranks = resources.processes if node.contract.distributed else 1
        return StageRecord(
            node=node.name,
            stage=node.stage,
            iteration=address.iteration,
            status="done",
            why="; ".join(filter(None, [resolved.older, _off_policy(resolved)])),
            payload=wanted,
            fingerprint=fingerprint(wanted),
            sources=resolved.sources,
            outputs=answer.outputs,
            volatile=volatile(clock.started, clock.seconds(), resources, ranks, answer.measured),
        )


def _off_policy(resolved: Resolved) -> str:
    """What is said of an update whose samples came from another policy than the one it starts from."""
    trajectory = resolved.request.get("trajectory")
    if not isinstance(trajectory, dict) or "policy" not in resolved.request or trajectory["weights"] == "none":
        return ""
    policy = resolved.request["policy"]
    if trajectory["policy"] == (policy["digest"] if policy else ""):
        return ""
    return "off policy: its samples came from another policy than the one it starts from"
