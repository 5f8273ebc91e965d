"""The compiled plan: a folded DAG of typed nodes and edges. The loop stays one body; the runner unrolls it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from schemas.contracts import CONTRACTS
from schemas.doors import Contract, StageConfig
from schemas.engine import Resources
from schemas.flow import Guard, Keep, Schedule
from schemas.trackers import TrackerConfig

Section = Literal["before", "body", "after"]


@dataclass(frozen=True)
class FromNode:
    """`node.output`: an output of another node, in the body of the same iteration (or its newest, with `every`)."""

    node: str
    output: str


@dataclass(frozen=True)
class FromCarry:
    """`carry.name`: the value that came from the iteration before, or the start."""

    name: str


@dataclass(frozen=True)
class FromModel:
    """`model`: the base model, which is no policy at all."""


@dataclass(frozen=True)
class FromLast:
    """`loop.last(node.output)`: from the last iteration that ran."""

    node: str
    output: str


@dataclass(frozen=True)
class FromBest:
    """`loop.best(node.metric)`: the policy that the best value of a metric was measured on.

    `policy` is the edge, in the body, by which that policy reached the measurement.
    """

    node: str
    metric: str
    policy: FromNode | FromCarry


@dataclass(frozen=True)
class FromHistory:
    """`loop.history(node.metric)`: the metric over all iterations that measured it."""

    node: str
    metric: str


Edge = FromNode | FromCarry | FromModel | FromLast | FromBest | FromHistory


@dataclass(frozen=True)
class PlanNode:
    """One node: a stage with its checked config and its edges. An input may be a mapping of edges."""

    name: str
    stage: str
    section: Section
    config: StageConfig
    inputs: Mapping[str, Edge | Mapping[str, Edge]]
    every: int | None = None
    when: FromNode | None = None  # here `output` is the name of a metric

    @property
    def contract(self) -> Contract:
        """The doors of the node's stage."""
        return CONTRACTS[self.stage]

    def edges(self) -> list[Edge]:
        """All edges into this node, without `when`."""
        nested = [list(e.values()) if isinstance(e, Mapping) else [e] for e in self.inputs.values()]
        return [edge for group in nested for edge in group]

    def reads(self) -> list[Edge]:
        """All edges into this node, `when` among them."""
        return [*self.edges(), *([self.when] if self.when else [])]

    def near(self) -> set[str]:
        """Nodes that this one reads directly."""
        return {edge.node for edge in self.reads() if isinstance(edge, FromNode)}


def due(every: int | None, iteration: int, times: int) -> bool:
    """Whether a node of the body runs in an iteration: every N-th, and the last."""
    return every is None or iteration % every == 0 or iteration == times - 1


@dataclass(frozen=True)
class CarryPlan:
    """Where a carried value starts, and which edge of the body it comes from next."""

    start: FromNode | FromModel
    next: FromNode


@dataclass(frozen=True)
class GuardPlan:
    """A guard and the node and metric it watches."""

    guard: Guard
    node: str
    metric: str


@dataclass(frozen=True)
class Plan:
    """A checked flow. `nodes` are in an order in which each section could run one by one."""

    flow: str
    description: str
    seed: int
    times: int  # 0 without a loop
    nodes: Mapping[str, PlanNode]
    carry: Mapping[str, CarryPlan]
    guards: Mapping[str, GuardPlan]
    resources: Resources
    python_path: tuple[str, ...]  # absolute
    base: Path  # folder of flows.yaml; relative asset paths count from it (already resolved in configs)
    keep: Keep | None = None
    trackers: Mapping[str, TrackerConfig] = field(default_factory=dict)
    schedule: Schedule | None = None
    tags: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()  # PATH=VALUE, as given with --set
    warnings: tuple[str, ...] = ()  # lawful, but seldom meant

    def section(self, section: Section) -> list[PlanNode]:
        """The nodes of one section, in order."""
        return [node for node in self.nodes.values() if node.section == section]
