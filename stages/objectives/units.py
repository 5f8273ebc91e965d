"""Units of work: one model call each, cut by identity and dealt to ranks."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from schemas.contracts import UpdateConfig
from schemas.seeds import seed_of
from stages.context import StageContext
from stages.engine.policy import Engine
from stages.losses.terms import LossTerms
from stages.objectives.rows import Rows

T = TypeVar("T")


class Unit(NamedTuple):
    """One model call: rows of the trajectory table at one step (trajectory) or one draw (terminal) of an epoch."""

    rows: tuple[int, ...]
    step: int
    epoch: int


class Others(NamedTuple):
    """Velocities (batch, ...) of other weights at the same inputs, where the loss or the KL needs them."""

    old: Tensor | None
    reference: Tensor | None


class Objective(Protocol):
    """Cuts samples into units and turns a unit's velocity into losses."""

    config: UpdateConfig
    rows: Rows

    @property
    def bound(self) -> float | None:
        """Half the clip range, if there is one: a recomputed log-prob must be closer than this."""
        ...

    def parts(self, epoch: int) -> list[list[Unit]]:
        """The units of each optimizer step of an epoch."""
        ...

    def velocity(self, engine: Engine, unit: Unit) -> Tensor:
        """Velocity (batch, ...) at the unit's inputs under the weights in use."""
        ...

    def terms(self, unit: Unit, velocity: Tensor, others: Others) -> LossTerms:
        """Loss per sample (batch,), regulariser included."""
        ...

    def idle(self, unit: Unit) -> bool:
        """Whether the unit's gradient is exactly zero, so that it may be left out while the divisor counts it."""
        ...


def drawn_order(things: Sequence[T], identity: Callable[[T], str], ctx: StageContext, epoch: int) -> list[T]:
    """The epoch's order, by a hash of what each thing is; things of one identity keep their order."""
    parts = (ctx.seed, ctx.iteration or 0, epoch, "order")
    return sorted(things, key=lambda thing: (seed_of(*parts, identity(thing)), identity(thing)))


def even_parts(things: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Runs whose lengths differ by at most one."""
    cuts = [len(things) * i // parts for i in range(parts + 1)]
    return [things[a:b] for a, b in pairwise(cuts)]


def deal(units: Sequence[Unit], lane: int, lanes: int) -> list[tuple[Unit, bool]]:
    """This lane's units, and whether each counts: every rank makes equally many calls, padded by one of weight 0."""
    calls = -(-len(units) // lanes)
    mine = [(unit, True) for unit in units[lane::lanes]]
    return mine if len(mine) == calls else [*mine, (units[0], False)]
