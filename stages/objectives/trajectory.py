"""Replay of stochastic steps: for losses on log-probs. A unit is a micro-batch as it was sampled, at ONE step."""

from collections import defaultdict

import numpy as np
from pydantic import TypeAdapter
from torch import Tensor

from schemas.contracts import UpdateConfig
from schemas.errors import InputError
from schemas.losses import GrpoLoss
from schemas.sampling import SamplerConfig
from schemas.seeds import seed_of
from stages.context import StageContext
from stages.engine.policy import Engine
from stages.losses import LOSSES
from stages.losses.kl import kl_mean, kl_mean_over_g, kl_velocity
from stages.losses.terms import LossTerms
from stages.objectives import Others, Unit, even_parts
from stages.objectives.rows import Rows
from stages.sde import Transition, transition
from stages.sde.moments import Point


class Trajectory:
    """States, sigmas and timesteps are the stored ones; nothing about the schedule is computed again."""

    def __init__(self, config: UpdateConfig, rows: Rows, ctx: StageContext, engine: Engine) -> None:
        self.config, self.rows, self.ctx = config, rows, ctx
        if rows.ref.num_steps == 0:
            raise InputError(f"{ctx.place}: loss {config.loss.kind!r} needs stored steps; sample with `flow_sde`")
        self.sampler: SamplerConfig = TypeAdapter(SamplerConfig).validate_python(rows.ref.sampler)
        self.states = rows.tensor("states")
        names = ("sigma", "sigma_next", "sigma_max", "timestep", "log_prob")
        self.columns = {name: rows.column(name) for name in names}
        self.bound = config.loss.clip / 2 if isinstance(config.loss, GrpoLoss) else None
        batches: dict[int, list[int]] = defaultdict(list)
        for row, number in enumerate(rows.table.column("micro_batch").to_pylist()):
            batches[number].append(row)
        self.batches = [tuple(batch) for _, batch in sorted(batches.items())]

    def parts(self, epoch: int, steps: int) -> list[list[Unit]]:
        """Whole micro-batches in a drawn order, evenly over the optimizer steps, each at all its steps."""
        if steps > len(self.batches):
            raise InputError(
                f"{self.ctx.place}: steps is {steps}, but there are only {len(self.batches)} micro-batches; lower it, "
                "or sample with a smaller micro_batch"
            )
        generator = np.random.default_rng(seed_of(self.ctx.seed, self.ctx.iteration or 0, epoch, "order"))
        order = generator.permutation(len(self.batches))
        return [
            [Unit(self.batches[order[i]], step, epoch) for i in part for step in range(self.rows.ref.num_steps)]
            for part in even_parts(len(order), steps)
        ]

    def idle(self, unit: Unit) -> bool:
        """All advantages are 0 and nothing else pulls."""
        return self.config.kl is None and not self.rows.advantages[list(unit.rows)].any()

    def velocity(self, engine: Engine, unit: Unit) -> Tensor:
        """At the stored state before the unit's step."""
        given = self.rows.embeddings.of([self.rows.prompt_ids[row] for row in unit.rows], self.sampler.guided)
        return engine.velocity(self._state(unit, 0), self._at("timestep", unit), given, self.rows.guidance_scale)

    def terms(self, unit: Unit, velocity: Tensor, others: Others) -> LossTerms:
        """The policy-gradient loss of the step, plus the KL to the base."""
        taken = self._replay(unit, velocity)
        terms = LOSSES[self.config.loss.kind](
            self.config.loss, taken.log_prob, self._at("log_prob", unit), self.rows.advantage(unit.rows)
        )
        noise = (taken.log_prob - self._at("log_prob", unit)).detach().abs()
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
        return self.states[list(unit.rows), unit.step + offset].to(self.rows.device)

    def _at(self, name: str, unit: Unit) -> Tensor:
        return self.columns[name][list(unit.rows), unit.step].to(self.rows.device)
