"""The folded loop, unrolled one iteration at a time: what is due, and where an edge leads, read from the records."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from pipelines.plan import Edge, FromBest, FromCarry, FromHistory, FromLast, FromModel, FromNode, Plan, PlanNode, due
from pipelines.rundir import Address, RunDirectory, located, outputs_of
from schemas.artifacts import HistoryRef, Ref, TableRef
from schemas.doors import StageOutputs
from schemas.errors import RunError, closest
from schemas.record import StageRecord


@dataclass(frozen=True)
class Missing:
    """An edge that leads to a skipped stage."""

    why: str


@dataclass(frozen=True)
class Found:
    """What an edge leads to: JSON for the request, JSON for the identity, and the address it came from."""

    request: Any
    identity: Any
    source: str


@dataclass(frozen=True)
class Resolved:
    """All inputs of a stage run. `missing` says why it cannot run; then the rest is empty."""

    request: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    missing: str = ""
    older: str = ""


@dataclass(frozen=True)
class Unrolled:
    """A plan and its run directory. `ended` is the number of iterations that count once the loop has ended."""

    plan: Plan
    run: RunDirectory
    ended: int | None = None

    def after(self, iterations: int) -> "Unrolled":
        """The same with the loop ended after so many iterations."""
        return replace(self, ended=iterations)

    def due(self, node: PlanNode, iteration: int) -> bool:
        """Whether a node of the body runs in an iteration: every N-th, and the last."""
        return due(node.every, iteration, self.plan.times)

    def body(self, iteration: int) -> list[PlanNode]:
        """The nodes of the body that run in an iteration, in order."""
        return [node for node in self.plan.section("body") if self.due(node, iteration)]

    def address(self, name: str, iteration: int | None) -> Address:
        """Where a node's newest run is, seen from an iteration."""
        node = self.plan.nodes[name]
        if node.section != "body":
            return Address(node.section, name)
        if iteration is None:
            raise RunError(f"{name!r} is in the loop's body and was asked for outside of it")
        while not self.due(node, iteration):
            iteration -= 1
        return Address("body", name, iteration)

    def unwanted(self, node: PlanNode, iteration: int | None) -> str:
        """Why `when` skips the node; empty when it does not."""
        if node.when is None:
            return ""
        source = self.address(node.when.node, iteration)
        value = self.metric(source, node.when.output)
        if value is None:
            return f"{source.label} was skipped"
        return f"{node.when.output} of {source.label} is 0" if value == 0 else ""

    def resolve(self, node: PlanNode, iteration: int | None) -> Resolved:
        """The inputs of a stage run, each from a committed record."""
        out = Resolved()
        for name, edge in node.inputs.items():
            if isinstance(edge, Mapping):
                items = {key: self.follow(item, iteration) for key, item in edge.items()}
                lost = next((item for item in items.values() if isinstance(item, Missing)), None)
                found = {key: item for key, item in items.items() if isinstance(item, Found)}
                if lost is not None:
                    return Resolved(missing=lost.why)
                out.request[name] = {key: item.request for key, item in found.items()}
                out.identity[name] = {key: item.identity for key, item in found.items()}
                out.sources[name] = {key: item.source for key, item in found.items()}
                continue
            item = self.follow(edge, iteration)
            if isinstance(item, Missing):  # in an optional input too: no policy would mean the base model
                return Resolved(missing=item.why)
            out.request[name], out.identity[name], out.sources[name] = item.request, item.identity, item.source
        return replace(out, older=self._older(node, iteration))

    def _older(self, node: PlanNode, iteration: int | None) -> str:
        """On which older records of `every` stages a run stands."""
        if iteration is None or node.section != "body":
            return ""
        near = [self.address(e.node, iteration) for e in node.edges() if isinstance(e, FromNode)]
        old = sorted({a.path for a in near if a.iteration is not None and a.iteration < iteration})
        return f"reads the newest record of stages that do not run in every iteration: {', '.join(old)}" if old else ""

    def follow(self, edge: Edge, iteration: int | None) -> Found | Missing:
        """What an edge of a node in this iteration leads to."""
        match edge:
            case FromModel():
                return Found(None, None, "model")
            case FromNode(node, output):
                return self._output(self.address(node, iteration), output)
            case FromCarry(name):
                return self._carried(name, iteration)
            case FromLast(node, output):
                return self._last(node, output)
            case FromBest(node, metric, policy):
                return self._best(node, metric, policy)
            case FromHistory(node, metric):
                points = HistoryRef(points=tuple(self.points(node, metric)))
                value = points.model_dump(mode="json")
                return Found(value, value, f"loop.history({node}.{metric})")

    def _carried(self, name: str, iteration: int | None) -> Found | Missing:
        """`next` of the newest earlier iteration that made one, else `start`."""
        carry = self.plan.carry[name]
        maker = self.plan.nodes[carry.next.node]
        for earlier in range((iteration or 0) - 1, -1, -1):
            if self.due(maker, earlier):
                found = self._output(Address("body", maker.name, earlier), carry.next.output)
                if isinstance(found, Found):
                    return found
        return self.follow(carry.start, None)

    def _last(self, node: str, output: str) -> Found | Missing:
        for iteration in self._backwards(node):
            found = self._output(Address("body", node, iteration), output)
            if isinstance(found, Found):
                return found
        return Missing(f"{node!r} was skipped in every iteration")

    def _best(self, node: str, metric: str, policy: FromNode | FromCarry) -> Found | Missing:
        points = list(self.points(node, metric))
        if not points:
            return Missing(f"{node}.{metric} was never measured")
        iteration, _ = max(points, key=lambda point: (point[1], -point[0]))
        return self.follow(policy, iteration)

    def points(self, node: str, metric: str) -> Iterator[tuple[int, float]]:
        """Iteration and value of a metric, oldest first, over the iterations that measured it."""
        for iteration in reversed(list(self._backwards(node))):
            value = self.metric(Address("body", node, iteration), metric)
            if value is not None:
                yield iteration, value

    def _backwards(self, node: str) -> Iterator[int]:
        ran = self.plan.times if self.ended is None else self.ended
        return (i for i in range(ran - 1, -1, -1) if self.due(self.plan.nodes[node], i))

    def metric(self, address: Address, metric: str) -> float | None:
        """A metric of a committed stage; none when it was skipped."""
        record = self.record(address)
        if record.status == "skipped":
            return None
        metrics = self.outputs(address, record).metrics
        if metric not in metrics:
            raise RunError(f"{address.label} gave no metric {metric!r}. {closest(metric, metrics)}")
        return metrics[metric]

    def record(self, address: Address) -> StageRecord:
        """The record of a stage that has run."""
        record = self.run.stage(address).record()
        if record is None:
            raise RunError(f"{address.label} has no record in {self.run.place(address)}; it should have run by now")
        return record

    def outputs(self, address: Address, record: StageRecord) -> StageOutputs:
        """The outputs in a record."""
        return outputs_of(record, self.plan.nodes[address.node].contract, self.run.place(address))

    def _output(self, address: Address, output: str) -> Found | Missing:
        record = self.record(address)
        if record.status == "skipped":
            return Missing(f"{address.label} was skipped")
        value = dict(self.outputs(address, record))[output]
        if value is None:
            return Missing(f"{address.label} made no {output!r}")
        directory = self.run.place(address).resolve()
        return Found(located(value, directory), identity_of(value), f"{address.path}.{output}")


def identity_of(value: Any) -> Any:
    """What of a pointer is identity: not where it lies, and not how its rows were cut into files."""
    if isinstance(value, TableRef):
        return value.model_dump(mode="json", exclude={"path", "shards"})
    if isinstance(value, Ref):
        return value.model_dump(mode="json", exclude={"path"})
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
