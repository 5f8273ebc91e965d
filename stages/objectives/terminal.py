"""Drawn times and noise on final latents: for losses that need no log-prob. Trains the conditional branch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.contracts import UpdateConfig
from schemas.errors import InputError
from schemas.losses import NftLoss, ScheduleTimes, SftLoss
from schemas.seeds import seed_of
from stages.context import StageContext
from stages.engine.embeddings import NEGATIVE
from stages.engine.policy import Engine
from stages.losses import LOSSES
from stages.losses.kl import kl_velocity
from stages.losses.terms import LossTerms
from stages.losses.times import draw
from stages.objectives.rows import Rows
from stages.objectives.units import Others, Unit, drawn_order, even_parts


class Terminal:
    """Each (sample, epoch, draw) has its own time and noise, from its identity."""

    bound = None

    def __init__(self, config: UpdateConfig, rows: Rows, ctx: StageContext, engine: Engine) -> None:
        assert isinstance(config.loss, NftLoss | SftLoss)
        self.config, self.loss, self.rows, self.ctx = config, config.loss, rows, ctx
        self.adapter = engine.adapter
        self._newest: tuple[Unit, tuple[Tensor, Tensor, Tensor]] | None = None
        times = self.loss.times
        self.sigmas = engine.adapter.schedule(times.steps).sigmas if isinstance(times, ScheduleTimes) else torch.ones(1)

    def parts(self, epoch: int) -> list[list[Unit]]:
        """The samples in a drawn order, evenly over the optimizer steps, in micro-batches of equal text shapes."""
        steps = self.config.steps
        kept = [row for row, weight in enumerate(self.rows.weights) if weight]
        if steps > len(kept):
            raise InputError(f"{self.ctx.place}: steps is {steps}, but there are only {len(kept)} samples; lower it")
        order = drawn_order(kept, lambda row: self.rows.sample_ids[row], self.ctx, epoch)
        draws = range(self.loss.times.draws)
        return [
            [unit for number in draws for unit in self._units(part, number, epoch)] for part in even_parts(order, steps)
        ]

    def idle(self, unit: Unit) -> bool:
        """Never: these losses pull at advantage 0 too."""
        return False

    def velocity(self, engine: Engine, unit: Unit) -> Tensor:
        """At (1 - t) x0 + t noise."""
        x0, times, noise = self._drawn(unit)
        given = self.rows.given([self._prompt(row, unit.step, unit.epoch) for row in unit.rows], guided=False)
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

    def _units(self, rows: Sequence[int], number: int, epoch: int) -> list[Unit]:
        by_shape: dict[object, list[int]] = {}
        for row in rows:
            shape = self.rows.embeddings.shape(self._prompt(row, number, epoch))
            by_shape.setdefault(shape, []).append(row)
        size = self.ctx.micro_batch
        cuts = [tuple(same[i : i + size]) for same in by_shape.values() for i in range(0, len(same), size)]
        return [Unit(cut, number, epoch) for cut in cuts]

    def _drawn(self, unit: Unit) -> tuple[Tensor, Tensor, Tensor]:
        """Latents, times and noise; those of the newest unit are remembered, which is asked for more than once."""
        if self._newest is None or self._newest[0] != unit:
            self._newest = unit, self._draw(unit)
        return self._newest[1]

    def _draw(self, unit: Unit) -> tuple[Tensor, Tensor, Tensor]:
        seeds = [self._seed(row, unit.step, unit.epoch, "draw") for row in unit.rows]
        x0 = self.rows.tensor("latents", unit.rows)
        with self.rows.timed("data"):
            times, noise = draw(self.loss.times, tuple(x0.shape[1:]), seeds, self.sigmas)
        return x0, times.to(self.rows.device), noise.to(self.rows.device)

    def _seed(self, row: int, number: int, epoch: int, purpose: str) -> int:
        return seed_of(self.ctx.seed, self.ctx.iteration or 0, epoch, self.rows.sample_ids[row], number, purpose)

    def _prompt(self, row: int, number: int, epoch: int) -> str:
        """The sample's prompt, or the negative one where its text is dropped."""
        share = self.loss.text_dropout if isinstance(self.loss, SftLoss) else 0.0
        if share and self._seed(row, number, epoch, "drop") / 2**63 < share:
            return NEGATIVE
        return self.rows.prompt_ids[row]


def _mix(x0: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    t = times.reshape((-1,) + (1,) * (x0.dim() - 1))
    return (1 - t) * x0 + t * noise
