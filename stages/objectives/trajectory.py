"""Replay of stochastic steps: for losses on log-probs. A unit is a micro-batch as it was sampled, at ONE step."""

from collections import defaultdict

from pydantic import TypeAdapter
from torch import Tensor

from schemas.contracts import UpdateConfig
from schemas.errors import InputError
from schemas.losses import GrpoLoss
from schemas.sampling import SamplerConfig
from stages.context import StageContext
from stages.engine.policy import Engine
from stages.losses import LOSSES
from stages.losses.kl import kl_mean, kl_mean_over_g, kl_velocity
from stages.losses.terms import LossTerms
from stages.objectives.rows import Rows
from stages.objectives.units import Others, Unit, drawn_order, even_parts
from stages.sde import Transition, transition
from stages.sde.moments import Point


class Trajectory:
    """States, sigmas and timesteps are the stored ones; nothing about the schedule is computed again."""

    def __init__(self, config: UpdateConfig, rows: Rows, ctx: StageContext, engine: Engine) -> None:
        self.config, self.rows, self.ctx = config, rows, ctx
        if rows.ref.num_steps == 0:
            raise InputError(
                f"{ctx.place}: loss {config.loss.kind!r} needs stored steps; sample with a stochastic stepper"
            )
        self.sampler: SamplerConfig = TypeAdapter(SamplerConfig).validate_python(rows.ref.sampler)
        self.bound = _bound(config.loss) if isinstance(config.loss, GrpoLoss) else None
        batches: dict[int, list[int]] = defaultdict(list)
        for number, _, row in sorted(zip(*_drawn_as(rows), strict=True)):
            batches[number].append(row)
        # Samples that left stay in their micro-batch, with weight 0, so that it is replayed as it was drawn.
        self.batches = [tuple(batch) for batch in batches.values() if rows.weights[batch].any()]

    def parts(self, epoch: int) -> list[list[Unit]]:
        """Whole micro-batches, each at all its steps, evenly over the optimizer steps; the order of prompts is drawn.

        The micro-batches of a prompt stay together, so that their size does not change what a step learns from.
        """
        steps = self.config.steps
        if steps > len(self.batches):
            raise InputError(
                f"{self.ctx.place}: steps is {steps}, but there are only {len(self.batches)} micro-batches; lower it, "
                "or sample with a smaller micro_batch"
            )
        order = drawn_order(self.batches, lambda batch: self.rows.prompt_ids[batch[0]], self.ctx, epoch)
        return [
            [Unit(batch, step, epoch) for batch in part for step in range(self.rows.ref.num_steps)]
            for part in even_parts(order, steps)
        ]

    def idle(self, unit: Unit) -> bool:
        """All advantages are 0 and nothing else pulls."""
        return self.config.kl is None and not self.rows.advantages[list(unit.rows)].any()

    def velocity(self, engine: Engine, unit: Unit) -> Tensor:
        """At the stored state before the unit's step."""
        given = self.rows.given([self.rows.prompt_ids[row] for row in unit.rows], self.sampler.guided)
        return engine.velocity(self._state(unit, 0), self._at("timestep", unit), given, self.sampler.guidance_scale)

    def terms(self, unit: Unit, velocity: Tensor, others: Others) -> LossTerms:
        """The policy-gradient loss of the step, plus the KL to the base."""
        taken, sampled = self._replay(unit, velocity), self._at("log_prob", unit)
        terms = LOSSES[self.config.loss.kind](self.config.loss, taken.log_prob, sampled, self.rows.advantage(unit.rows))
        noise = (taken.log_prob - sampled).detach().abs()
        stats = {**terms.stats, "log_prob_noise": noise}
        if self.config.kl is None or others.reference is None:
            return LossTerms(terms.loss, stats)
        kl = self._kl(unit, velocity, others.reference, taken)
        return LossTerms(terms.loss + self.config.kl.weight * kl, {**stats, "kl": kl.detach()})

    def _kl(self, unit: Unit, velocity: Tensor, reference: Tensor, taken: Transition) -> Tensor:
        kind = self.config.kl.kind if self.config.kl else "velocity"
        if kind == "velocity":
            return kl_velocity(velocity, reference)
        other = self._replay(unit, reference)
        if kind == "mean":
            return kl_mean(taken.mean, other.mean, taken.std)
        return kl_mean_over_g(taken.mean, other.mean, taken.std, self._point(unit).like(taken.mean))

    def _replay(self, unit: Unit, velocity: Tensor) -> Transition:
        state, after = self._state(unit, 0), self._state(unit, 1)
        return transition(self.sampler, state, velocity, self._point(unit), next_latents=after)

    def _point(self, unit: Unit) -> Point:
        return Point(self._at("sigma", unit), self._at("sigma_next", unit), self._at("sigma_max", unit))

    def _state(self, unit: Unit, offset: int) -> Tensor:
        return self.rows.tensor("states", unit.rows, unit.step + offset)

    def _at(self, name: str, unit: Unit) -> Tensor:
        return self.rows.tensor(name, unit.rows, unit.step)


def _drawn_as(rows: Rows) -> tuple[list[int], list[int], range]:
    """Micro-batch, place in it, and row of every sample."""
    return (*(rows.table.column(name).to_pylist() for name in ("micro_batch", "index")), range(len(rows.table)))


def _bound(loss: GrpoLoss) -> float:
    low, high = loss.clip_range
    return min(1 - low, high - 1) / 2
