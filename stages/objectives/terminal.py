"""Drawn times and noise on final latents: for losses that need no log-prob. Trains the conditional branch."""

import numpy as np
import torch
from torch import Tensor

from schemas.contracts import UpdateConfig
from schemas.errors import InputError
from schemas.losses import NftLoss, ScheduleTimes, SftLoss
from schemas.seeds import seed_of
from stages.context import StageContext
from stages.engine.policy import Engine
from stages.losses import LOSSES
from stages.losses.kl import kl_velocity
from stages.losses.terms import LossTerms
from stages.losses.times import draw
from stages.objectives import Others, Unit, even_parts
from stages.objectives.rows import Rows


class Terminal:
    """Each (sample, epoch, draw) has its own time and noise, from its identity."""

    bound = None

    def __init__(self, config: UpdateConfig, rows: Rows, ctx: StageContext, engine: Engine) -> None:
        assert isinstance(config.loss, NftLoss | SftLoss)
        self.config, self.loss, self.rows, self.ctx = config, config.loss, rows, ctx
        self.latents = rows.tensor("latents")
        self.adapter = engine.adapter
        times = self.loss.times
        self.sigmas = engine.adapter.schedule(times.steps).sigmas if isinstance(times, ScheduleTimes) else torch.ones(1)

    def parts(self, epoch: int, steps: int) -> list[list[Unit]]:
        """The samples in a drawn order, evenly over the optimizer steps, in micro-batches of equal text shapes."""
        kept = np.flatnonzero(self.rows.weights)
        if steps > len(kept):
            raise InputError(f"{self.ctx.place}: steps is {steps}, but there are only {len(kept)} samples; lower it")
        generator = np.random.default_rng(seed_of(self.ctx.seed, self.ctx.iteration or 0, epoch, "order"))
        order = [int(row) for row in kept[generator.permutation(len(kept))]]
        draws = range(self.loss.times.draws)
        return [
            [Unit(rows, drawn, epoch) for rows in self._batches([order[i] for i in part]) for drawn in draws]
            for part in even_parts(len(order), steps)
        ]

    def idle(self, unit: Unit) -> bool:
        """Never: these losses pull at advantage 0 too."""
        return False

    def velocity(self, engine: Engine, unit: Unit) -> Tensor:
        """At (1 - t) x0 + t noise."""
        x0, times, noise = self._drawn(unit)
        ids = [self.rows.prompt_ids[row] for row in unit.rows]
        given = self.rows.embeddings.of(ids, guided=False, dropped=self._dropped(unit))
        return engine.velocity(_mix(x0, times, noise), self.adapter.timesteps(times), given, 1.0)

    def terms(self, unit: Unit, velocity: Tensor, others: Others) -> LossTerms:
        """The loss at the unit's times, plus the KL to the base."""
        x0, times, noise = self._drawn(unit)
        if isinstance(self.loss, NftLoss):
            assert others.old is not None
            noised, advantages = _mix(x0, times, noise), self.rows.advantage(unit.rows)
            terms = LOSSES["nft"](self.loss, velocity, others.old, noised, times, x0, advantages)
        else:
            terms = LOSSES["sft"](self.loss, velocity, noise, x0)
        if self.config.kl is None or others.reference is None:
            return terms
        kl = kl_velocity(velocity, others.reference)
        return LossTerms(terms.loss + self.config.kl.weight * kl, {**terms.stats, "kl": kl.detach()})

    def _batches(self, rows: list[int]) -> list[tuple[int, ...]]:
        by_shape: dict[object, list[int]] = {}
        for row in rows:
            by_shape.setdefault(self.rows.embeddings.shape(self.rows.prompt_ids[row]), []).append(row)
        size = self.ctx.micro_batch
        return [tuple(same[i : i + size]) for same in by_shape.values() for i in range(0, len(same), size)]

    def _drawn(self, unit: Unit) -> tuple[Tensor, Tensor, Tensor]:
        seeds = [self._seed(row, unit) for row in unit.rows]
        x0 = self.latents[list(unit.rows)]
        times, noise = draw(self.loss.times, tuple(x0.shape[1:]), seeds, self.sigmas)
        return x0.to(self.rows.device), times.to(self.rows.device), noise.to(self.rows.device)

    def _seed(self, row: int, unit: Unit, purpose: str = "draw") -> int:
        identity = (self.ctx.seed, self.ctx.iteration or 0, unit.epoch, self.rows.sample_ids[row], unit.step)
        return seed_of(*identity, purpose)

    def _dropped(self, unit: Unit) -> list[bool]:
        if not isinstance(self.loss, SftLoss) or self.loss.text_dropout == 0:
            return []
        share = self.loss.text_dropout
        return [self._seed(row, unit, "drop") / 2**63 < share for row in unit.rows]


def _mix(x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    t = times.reshape((-1,) + (1,) * (x0.dim() - 1))
    return (1 - t) * x0 + t * noise
