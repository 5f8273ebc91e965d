"""Losses and what each needs from the stages before it, so that a plan is checked without torch."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from schemas.strict import Strict

WeightSet = Literal["raw", "old", "ema"]


class Needs(NamedTuple):
    """What a loss needs from sampling: checked when the plan is compiled."""

    states: bool  # states and log-probs of stochastic steps; else final latents
    advantages: bool
    old_policy: bool  # a second set of weights that lags behind
    sampled_from: WeightSet | None  # the weights the samples must come from; none: anything


class UniformTimes(Strict):
    """Times t in `range`, uniform."""

    kind: Literal["uniform"] = "uniform"
    range: tuple[float, float] = (0.001, 0.999)
    draws: int = Field(default=1, ge=1, description="(time, noise) pairs drawn per sample and epoch.")

    @model_validator(mode="after")
    def _rises_within_the_unit_interval(self) -> "UniformTimes":
        low, high = self.range
        if not 0 < low < high <= 1:
            raise ValueError(f"range wants 0 < low < high <= 1, got {list(self.range)}")
        return self


class LogitNormalTimes(Strict):
    """Times t = sigmoid(N(mean, std)): more weight on the middle (SD3, arXiv 2403.03206)."""

    kind: Literal["logit_normal"] = "logit_normal"
    mean: float = 0.0
    std: float = Field(default=1.0, gt=0)
    draws: int = Field(default=1, ge=1, description="(time, noise) pairs drawn per sample and epoch.")


class ScheduleTimes(Strict):
    """Times are the sigmas of the sampler's own schedule with this many steps, one drawn at a time."""

    kind: Literal["schedule"] = "schedule"
    steps: int = Field(default=10, ge=1)
    draws: int = Field(default=1, ge=1, description="(time, noise) pairs drawn per sample and epoch.")


TrainTimes = Annotated[UniformTimes | LogitNormalTimes | ScheduleTimes, Field(discriminator="kind")]


class GrpoLoss(Strict):
    """Clipped policy gradient on the log-probs of stochastic steps (Flow-GRPO, arXiv 2505.05470)."""

    kind: Literal["grpo"] = "grpo"
    clip: float = Field(default=1e-4, gt=0, lt=1, description="The ratio is clipped to [1-clip, 1+clip].")
    clip_high: float | None = Field(default=None, gt=0, description="Another upper range: 1+clip_high.")
    needs: ClassVar[Needs] = Needs(states=True, advantages=True, old_policy=False, sampled_from="raw")

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        return 1.0 - self.clip, 1.0 + (self.clip if self.clip_high is None else self.clip_high)


class NftLoss(Strict):
    """DiffusionNFT: contrast of implicit positive and negative policies (arXiv 2509.16117)."""

    kind: Literal["nft"] = "nft"
    beta: float = Field(default=0.1, gt=0, le=1, description="Strength of the implicit policies.")
    advantage_clip: float = Field(default=5.0, gt=0, description="c in r = clamp(A, -c, c)/(2c) + 1/2.")
    times: TrainTimes = Field(default_factory=UniformTimes)
    needs: ClassVar[Needs] = Needs(states=False, advantages=True, old_policy=True, sampled_from="old")


class SftLoss(Strict):
    """Flow matching on given or kept samples: mean of (v - (noise - x0))^2."""

    kind: Literal["sft"] = "sft"
    times: TrainTimes = Field(default_factory=LogitNormalTimes)
    text_dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of samples trained on the negative prompt.")
    needs: ClassVar[Needs] = Needs(states=False, advantages=False, old_policy=False, sampled_from=None)


LossConfig = Annotated[GrpoLoss | NftLoss | SftLoss, Field(discriminator="kind")]


class KlConfig(Strict):
    """Keeps the policy near the reference (the base model)."""

    kind: Literal["velocity", "mean", "mean_over_g"] = Field(
        default="velocity",
        description="mean (v-v_ref)^2; or of step means over 2 std^2; or over 2 g^2 as Flow-GRPO published.",
    )
    weight: float = Field(gt=0)


class OldPolicyConfig(Strict):
    """The lagging policy that samples for `nft`: old = decay * old + (1 - decay) * raw after each iteration.

    decay = min(rate * iteration, max_decay) with the iteration counted from 0: DiffusionNFT's schedule.
    """

    rate: float = Field(default=0.001, ge=0)
    max_decay: float = Field(default=0.5, ge=0, lt=1)

    def decay(self, iteration: int) -> float:
        """The decay after this iteration."""
        return min(self.rate * iteration, self.max_decay)


class EmaConfig(Strict):
    """Average of the trainable weights, for evaluation and export; updated after every optimizer step.

    decay = min(decay, (1 + step) / (10 + step)) with warm-up, so that early weights do not linger.
    """

    decay: float = Field(default=0.95, ge=0, lt=1)
    warm_up: bool = True

    def at(self, step: int) -> float:
        """The decay after optimizer step `step`, counted from 1 over the whole run."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warm_up else self.decay


class LearningRate(Strict):
    """Learning rate by iteration; what it is at an iteration does not depend on how many will follow."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    start: float = Field(gt=0, description="Rate after the warm-up.")
    end: float = Field(default=0.0, ge=0, description="Rate at `over` iterations and after; unused when constant.")
    over: int = Field(default=1, ge=1, description="Iterations from start to end.")
    warm_up: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up over the whole run.")

    def at(self, iteration: int, update: int) -> float:
        """The rate in `iteration` (from 0) at optimizer step `update` of the whole run (from 1)."""
        done = min(iteration / (self.over - 1), 1.0) if self.kind != "constant" else 0.0
        share = (1 - math.cos(math.pi * done)) / 2 if self.kind == "cosine" else done
        rate = self.start + (self.end - self.start) * share
        return rate * min(1.0, update / self.warm_up) if self.warm_up else rate

    @model_validator(mode="after")
    def _falls(self) -> "LearningRate":
        if self.kind != "constant" and self.over < 2:
            raise ValueError(f"kind {self.kind!r} needs over: the number of iterations from start to end")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Strict):
    """AdamW with float32 moments, or with moments of 8 bits in a fourth of the memory (extra `adam8bit`).

    `eps` is far below the gradients here (1e-9), where 1e-8 would swallow them.
    """

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    learning_rate: LearningRate = LearningRate(start=1e-4)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-15, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="Gradients above this norm are scaled down to it."
    )
