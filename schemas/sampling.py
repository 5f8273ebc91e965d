"""Samplers: the stepper, its schedule and the window of stochastic steps."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.seeds import seed_of
from schemas.strict import Strict


class AllSteps(Strict):
    """Every step but the last is stochastic and trained (Flow-GRPO)."""

    kind: Literal["all"] = "all"

    def steps(self, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
        """Indices of the stochastic steps."""
        return tuple(range(num_steps - 1))


class RandomWindow(Strict):
    """`size` neighbouring steps drawn once an iteration from `range`, the same for every sample and rank.

    Flow-GRPO-Fast, MixGRPO. The high-noise half is the default range: low-noise steps own the gradient.
    """

    kind: Literal["random"] = "random"
    size: int = Field(default=1, ge=1, description="Number of stochastic steps.")
    range: tuple[int, int] | None = Field(
        default=None, description="First step and end (exclusive) that the window may cover; the first half when none."
    )

    def steps(self, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
        """Indices of the stochastic steps."""
        first, end = self.range or (0, max(self.size, num_steps // 2))
        choices = end - first - self.size + 1
        start = first + seed_of(seed, iteration, "window") % choices
        return tuple(range(start, start + self.size))

    @model_validator(mode="after")
    def _fits(self) -> "RandomWindow":
        if self.range is not None and not 0 <= self.range[0] <= self.range[1] - self.size:
            raise ValueError(f"a window of size {self.size} does not fit into range {list(self.range)}")
        return self


Window = Annotated[AllSteps | RandomWindow, Field(discriminator="kind")]


class _Sampler(Strict):
    steps: int = Field(default=10, ge=1, description="Denoising steps.")
    guidance_scale: float = Field(
        default=1.0, ge=0, description="Classifier-free guidance; 1 leaves the negative branch out."
    )
    shared_noise: bool = Field(default=False, description="All samples of a prompt start from the same noise.")

    stochastic: ClassVar[bool]

    @property
    def guided(self) -> bool:
        """Whether the negative branch is computed."""
        return self.guidance_scale > 1.0


class OdeSampler(_Sampler):
    """Euler steps of the probability-flow ODE: no log-prob. For evaluation and for losses on final latents."""

    kind: Literal["ode"] = "ode"
    stochastic: ClassVar[bool] = False


class FlowSdeSampler(_Sampler):
    """Flow-GRPO's SDE inside the window, ODE outside (arXiv 2505.05470)."""

    kind: Literal["flow_sde"] = "flow_sde"
    eta: float = Field(default=0.7, gt=0, description="Noise level; more explores more.")
    window: Window = Field(default_factory=AllSteps)
    states: Literal["float32", "float16"] = Field(
        default="float32", description="Storage dtype; states are rounded to it first."
    )
    stochastic: ClassVar[bool] = True

    @model_validator(mode="after")
    def _window_before_last(self) -> "FlowSdeSampler":
        if self.steps < 2:
            raise ValueError("needs steps >= 2: the last step is never stochastic")
        if isinstance(self.window, RandomWindow):
            end = self.window.range[1] if self.window.range else self.window.size
            if end > self.steps - 1:
                raise ValueError(f"the window reaches step {end - 1}, but the last stochastic step is {self.steps - 2}")
        return self


SamplerConfig = Annotated[OdeSampler | FlowSdeSampler, Field(discriminator="kind")]
