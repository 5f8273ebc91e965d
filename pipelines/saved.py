"""A run as it lies on disk, for looking into. Nothing is computed or changed; a damaged record stops nothing."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.plan import Plan, due
from pipelines.progress import main_metrics
from pipelines.rundir import RECORD, Address, RunDirectory, bytes_in, outputs_of
from pipelines.terminal import flat
from schemas.contracts import CONTRACTS
from schemas.doors import StageOutputs
from schemas.errors import InputError, UserError, closest
from schemas.record import StageRecord

State = Literal["complete", "at work", "stopped", "not begun"]
_METRICS_OF_A_NODE = 2


@dataclass(frozen=True)
class Saved:
    """One run. `damaged` fills as records are read: what is wrong with them, by address."""

    run: RunDirectory
    damaged: dict[str, str] = field(default_factory=dict)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """run.json."""
        return self.run.read()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan that last ran, as JSON; empty when none did."""
        return self.facts.get("plan", {})

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """The plan's nodes by name, in order."""
        return self.plan.get("nodes", {})

    @property
    def sets(self) -> list[str]:
        """The --set it last ran with."""
        return list(self.plan.get("sets", []))

    @property
    def times(self) -> int:
        """Iterations that were wanted."""
        return int(self.plan.get("times", 0))

    @cached_property
    def records(self) -> dict[Address, StageRecord]:
        """Every record of the plan's nodes, its own and adopted ones, in the order of the plan."""
        place = {name: number for number, name in enumerate(self.nodes)}
        found = [a for a in map(_address, self._paths()) if a is not None and (a.node in place or not place)]
        order = {"before": 0, "body": 1, "after": 2}
        found.sort(key=lambda a: (order[a.section], a.iteration or 0, place.get(a.node, 0)))
        return {address: record for address in found if (record := self._record(address)) is not None}

    @cached_property
    def ended(self) -> int:
        """Iterations that count: up to the one in which a guard left the loop, else those that are wanted."""
        decisions = (i for i in range(self.times) if (self.run.iteration(i) / "decision.json").is_file())
        return next(decisions, self.times - 1) + 1

    def due(self, node: str, iteration: int) -> bool:
        """Whether a node of the body runs in an iteration."""
        return due(self.nodes[node].get("every"), iteration, self.times)

    def iterations(self) -> int:
        """How many iterations are there in whole."""
        body = [name for name, node in self.nodes.items() if node["section"] == "body"]
        whole = (
            all(Address("body", name, i) in self.records for name in body if self.due(name, i))
            for i in range(self.ended)
        )
        return sum(whole)

    def state(self) -> State:
        """Whether it is complete, held by a process, or stopped on the way."""
        if _held(self.run.path / "lock"):
            return "at work"
        if not self.plan:
            return "not begun"
        outer = [Address(n["section"], name) for name, n in self.nodes.items() if n["section"] != "body"]
        only = bool(self.facts.get("base", {}).get("only"))
        if self.iterations() == self.ended and (only or all(address in self.records for address in outer)):
            return "complete"
        return "stopped"

    @cached_property
    def _reading(self) -> dict[str, list[Address]]:
        out: dict[str, list[Address]] = {}
        for address, record in self.records.items():
            for path in dict.fromkeys(str(source).rpartition(".")[0] for _, source in flat(record.sources)):
                out.setdefault(path, []).append(address)
        return out

    def readers(self, address: Address) -> list[Address]:
        """Stage runs that read an output of this one, in the order of the plan."""
        return self._reading.get(address.path, [])

    def outputs(self, address: Address) -> StageOutputs:
        """The typed outputs of a stage run."""
        record = self.records[address]
        return outputs_of(record, CONTRACTS[record.stage], self.run.place(address))

    def folder(self, word: str) -> str:
        """The folder that a user means by `3`, `last`, `before` or `after`."""
        if word == "last":
            return f"{max((address.iteration or 0 for address in self.records), default=0):04d}"
        return f"{int(word):04d}" if word.isdigit() else word

    def series(self) -> dict[str, dict[int, float]]:
        """The main metrics of the body's nodes over the iterations: ``eval_score.strict`` to ``{0: 0.44, ...}``."""
        out: dict[str, dict[int, float]] = {}
        for address, record in self.records.items():
            if address.iteration is None or record.status == "skipped":
                continue
            metrics = main_metrics(record.outputs.get("metrics", {}))
            if self.nodes.get(address.node, {}).get("stage") in ("prompts", "sample", "encode"):
                continue  # counts, not results
            for name in list(metrics)[:_METRICS_OF_A_NODE]:
                out.setdefault(f"{address.node}.{name}", {})[address.iteration] = metrics[name]
        return out

    def results(self) -> dict[str, float]:
        """The main metrics of the stages outside the loop."""
        return {
            f"{address.node}.{name}": value
            for address, record in self.records.items()
            if address.iteration is None and self.nodes.get(address.node, {}).get("stage") in ("score", "summarise")
            for name, value in main_metrics(record.outputs.get("metrics", {})).items()
        }

    def seconds(self) -> float:
        """What its own stages took, added up."""
        return sum(r.volatile.seconds for a, r in self.records.items() if a.path not in self.run.adopted)

    def size(self) -> int:
        """Bytes on disk."""
        return bytes_in(self.run.path)

    def planned(self, file: Path, sets: Sequence[str] = ()) -> Plan:
        """The plan of its flow in today's file, with its own --set and these."""
        flow = str(self.facts.get("flow", ""))
        return compile_flow(load(file, flow, [*self.sets, *sets]), flow)

    def _paths(self) -> Iterator[str]:
        for file in self.run.path.glob(f"*/*/{RECORD}"):
            yield f"{file.parent.parent.name}/{file.parent.name}"
        yield from self.run.adopted

    def _record(self, address: Address) -> StageRecord | None:
        try:
            if address.path in self.run.adopted:
                self.run.verify(address)
            return self.run.stage(address).record()
        except InputError as error:
            self.damaged[address.path] = str(error)
            return None


def saved(runs: Path, name: str) -> Saved:
    """A run by its name, or by the path of its directory; UserError names the closest."""
    path = Path(name) if os.sep in name and (Path(name) / "run.json").is_file() else runs / name
    if not (path / "run.json").is_file():
        known = [file.parent.name for file in runs.glob("*/run.json")]
        raise UserError(f"no run {name!r} in {runs}. {closest(name, known)}")
    return Saved(RunDirectory.open(path))


def _address(path: str) -> Address | None:
    folder, _, node = path.partition("/")
    if "." in node:  # NODE.stale-1, NODE.partial
        return None
    if folder.isdigit():
        return Address("body", node, int(folder))
    if folder == "before":
        return Address("before", node)
    return Address("after", node) if folder == "after" else None


def _held(lock: Path) -> bool:
    if not lock.is_file():
        return False
    handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
