"""Objectives: what one model call of an update trains on. `trajectory` replays stochastic steps; `terminal` draws
times and noise on final latents. Both hand velocities to a loss of `stages/losses`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from torch import Tensor

from schemas.contracts import UpdateConfig, UpdateInputs
from stages.context import StageContext
from stages.engine.policy import Engine
from stages.losses.terms import LossTerms
from stages.objectives.rows import Rows


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

    def parts(self, epoch: int, steps: int) -> list[list[Unit]]:
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


def objective(config: UpdateConfig, inputs: UpdateInputs, ctx: StageContext, engine: Engine) -> Objective:
    """The objective that the loss needs."""
    from stages.objectives.terminal import Terminal
    from stages.objectives.trajectory import Trajectory

    rows = Rows(inputs, ctx, engine.device)
    return (Trajectory if config.loss.needs.states else Terminal)(config, rows, ctx, engine)


def even_parts(count: int, parts: int) -> list[range]:
    """`count` things in `parts` runs whose lengths differ by at most one."""
    cuts = [count * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


def deal(units: Sequence[Unit], rank: int, world_size: int) -> list[tuple[Unit, bool]]:
    """This rank's units, and whether each counts: every rank makes equally many calls, padded by one of weight 0."""
    calls = -(-len(units) // world_size)
    mine = [(unit, True) for unit in units[rank::world_size]]
    return mine + [(units[0], False)] * (calls - len(mine))
