"""Samplers: the stepper, its schedule and the window of stochastic steps."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.seeds import seed_of
from schemas.strict import Strict


class AllSteps(Strict):
    """Every step but the last is stochastic and trained (Flow-GRPO)."""

    kind: Literal["all"] = "all"

    def steps(self, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
        """Indices of the stochastic steps."""
        return tuple(range(num_steps - 1))

    def end(self, num_steps: int) -> int:
        """The end (exclusive) of all steps that the window may ever cover."""
        return num_steps - 1


class _Moving(Strict):
    """`size` neighbouring steps somewhere in `range`, the same for every sample and rank.

    The high-noise half is the default range: low-noise steps own the gradient.
    """

    size: int = Field(default=1, ge=1, description="Number of stochastic steps.")
    range: tuple[int, int] | None = Field(
        default=None, description="First step and end (exclusive) that the window may cover; the first half when none."
    )

    def end(self, num_steps: int) -> int:
        """The end (exclusive) of all steps that the window may ever cover."""
        return self.range[1] if self.range else max(self.size, num_steps // 2)

    def starts(self, num_steps: int) -> Sequence[int]:
        """All first steps that the window may have."""
        first = self.range[0] if self.range else 0
        return range(first, self.end(num_steps) - self.size + 1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.range is not None and not 0 <= self.range[0] <= self.range[1] - self.size:
            raise ValueError(f"a window of size {self.size} does not fit into range {list(self.range)}")
        return self


class RandomWindow(_Moving):
    """A window drawn once an iteration (Flow-GRPO-Fast, MixGRPO)."""

    kind: Literal["random"] = "random"

    def steps(self, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
        """Indices of the stochastic steps."""
        start = self.starts(num_steps)
        first = start[seed_of(seed, iteration, "window") % len(start)]
        return tuple(range(first, first + self.size))


class ProgressiveWindow(_Moving):
    """A window that moves one step on after every `every` iterations, and starts over at the end (MixGRPO)."""

    kind: Literal["progressive"] = "progressive"
    every: int = Field(default=1, ge=1, description="Iterations that the window stays at a step.")

    def steps(self, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
        """Indices of the stochastic steps."""
        starts = self.starts(num_steps)
        first = starts[iteration // self.every % len(starts)]
        return tuple(range(first, first + self.size))


class FixedWindow(Strict):
    """The same `size` neighbouring steps from `first` in every iteration."""

    kind: Literal["fixed"] = "fixed"
    first: int = Field(default=0, ge=0, description="The first stochastic step.")
    size: int = Field(default=1, ge=1, description="Number of stochastic steps.")

    def steps(self, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
        """Indices of the stochastic steps."""
        return tuple(range(self.first, self.end(num_steps)))

    def end(self, num_steps: int) -> int:
        """The end (exclusive) of all steps that the window may ever cover."""
        return self.first + self.size


Window = Annotated[AllSteps | RandomWindow | ProgressiveWindow | FixedWindow, Field(discriminator="kind")]


class _Sampler(Strict):
    steps: int = Field(default=10, ge=1, description="Denoising steps.")
    guidance_scale: float = Field(
        default=1.0, ge=0, description="Classifier-free guidance; 1 leaves the negative branch out."
    )
    shared_noise: bool = Field(default=False, description="All samples of a prompt start from the same noise.")

    @property
    def guided(self) -> bool:
        """Whether the negative branch is computed."""
        return self.guidance_scale > 1.0

    @property
    def solver(self) -> Literal["ode", "ode_dpm"]:
        """What takes the steps that add no noise."""
        raise NotImplementedError

    def num_prefixes(self, samples: int) -> int:
        """How many of so many samples take the steps before the window: one, where the others take up its latents."""
        return samples


class OdeSampler(_Sampler):
    """Euler steps of the probability-flow ODE: no log-prob. For evaluation and for losses on final latents."""

    kind: Literal["ode"] = "ode"

    @property
    def solver(self) -> Literal["ode", "ode_dpm"]:
        """Euler."""
        return "ode"


class OdeDpmSampler(_Sampler):
    """DPM-Solver++ 2M, of second order (arXiv 2211.01095): as `ode`, nearer to the exact flow with few steps."""

    kind: Literal["ode_dpm"] = "ode_dpm"

    @property
    def solver(self) -> Literal["ode", "ode_dpm"]:
        """DPM-Solver++ 2M."""
        return "ode_dpm"


class StochasticSampler(_Sampler):
    """Steps with noise inside the window, whose log-probs are stored; an ODE outside."""

    eta: float
    window: Window = Field(default_factory=AllSteps)
    outside: Literal["ode", "ode_dpm"] = Field(
        default="ode", description="Steps outside the window: Euler, or DPM-Solver++ 2M (MixGRPO-Flash)."
    )
    states: Literal["float32", "float16"] = Field(
        default="float32", description="Storage dtype; states are rounded to it first."
    )

    shared_prefix: bool = Field(
        default=False, description="The steps before the window are taken once for a micro-batch; needs shared_noise."
    )

    @property
    def solver(self) -> Literal["ode", "ode_dpm"]:
        """That of the steps outside the window."""
        return self.outside

    def num_prefixes(self, samples: int) -> int:
        """One with a shared prefix."""
        return min(samples, 1) if self.shared_prefix else samples

    @model_validator(mode="after")
    def _can_share(self) -> Self:
        if self.shared_prefix and not self.shared_noise:
            raise ValueError("shared_prefix needs shared_noise: true, since shared steps start from shared noise")
        if self.shared_prefix and self.window.kind == "all":
            raise ValueError("shared_prefix needs steps before the window, and window `all` has none; write `random`")
        return self

    @model_validator(mode="after")
    def _window_before_last(self) -> Self:
        if self.steps < 2:
            raise ValueError("needs steps >= 2: the last step is never stochastic")
        end = self.window.end(self.steps)
        if end > self.steps - 1:
            raise ValueError(f"the window reaches step {end - 1}, but the last stochastic step is {self.steps - 2}")
        return self


class FlowSdeSampler(StochasticSampler):
    """Flow-GRPO's SDE, which keeps the ODE's marginals (arXiv 2505.05470)."""

    kind: Literal["flow_sde"] = "flow_sde"
    eta: float = Field(default=0.7, gt=0, description="Noise level; more explores more.")


class DanceSdeSampler(StochasticSampler):
    """DanceGRPO's SDE: the same with constant noise, which keeps the marginals too (arXiv 2505.07818)."""

    kind: Literal["dance_sde"] = "dance_sde"
    eta: float = Field(default=0.3, gt=0, description="Noise level; more explores more.")


class CpsSampler(StochasticSampler):
    """Flow-CPS: keeps the schedule's signal and noise coefficients, not the distribution (arXiv 2509.05952).

    Pictures stay free of leftover noise, but samples vary less than the data (eta 0.8: std 0.40 for 0.50 at 200 steps).
    """

    kind: Literal["cps"] = "cps"
    eta: float = Field(default=0.7, gt=0, le=1, description="Noise level; 1 replaces all noise at every step.")


class DdimSampler(StochasticSampler):
    """DDIM with noise, as DDPO trained (arXiv 2010.02502, equation 16; arXiv 2305.13301); keeps the marginals."""

    kind: Literal["ddim"] = "ddim"
    eta: float = Field(default=1.0, gt=0, le=1, description="Noise level; 1 is ancestral sampling.")


SAMPLERS: tuple[type[_Sampler], ...] = (
    OdeSampler,
    OdeDpmSampler,
    FlowSdeSampler,
    DanceSdeSampler,
    CpsSampler,
    DdimSampler,
)
SamplerConfig = Annotated[
    OdeSampler | OdeDpmSampler | FlowSdeSampler | DanceSdeSampler | CpsSampler | DdimSampler,
    Field(discriminator="kind"),
]
