"""The denoising loop, written out once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from schemas.errors import NonFinite
from schemas.sampling import SamplerConfig
from stages.models import NoiseSchedule
from stages.sde import transition
from stages.sde.moments import Point
from stages.sde.ode import SOLVERS, Past, estimate


class Rollout(NamedTuple):
    """Final `latents` (batch, ...); `states` (batch, K+1, ...) around K stochastic steps; `log_prob` (batch, K)."""

    latents: Tensor
    states: Tensor | None
    log_prob: Tensor | None


def denoise(
    velocity: Callable[[Tensor, Tensor], Tensor],
    sampler: SamplerConfig,
    schedule: NoiseSchedule,
    noise: Tensor,
    step_noise: Callable[[int], Tensor],
    window: tuple[int, ...],
    storage: torch.dtype = torch.float32,
) -> Rollout:
    """From noise (batch, ...) to latents: the sampler's stepper inside the window, its ODE solver outside.

    `velocity(latents, timesteps)` takes timesteps (batch,); `step_noise(step)` gives noise like the latents. States are
    kept in the storage dtype. With a shared prefix the steps before the window are taken once, with a batch of 1.
    NonFinite names the step and the places in the batch. ValueError for a window with gaps or with the last step.
    """
    _fits(window, len(schedule.timesteps))
    latents = noise.to(storage).float() if 0 in window else noise.float()
    latents = latents[: sampler.num_prefixes(len(latents))] if window and window[0] > 0 else latents
    states, log_probs = [], []
    past: Past | None = None
    for step, timestep in enumerate(schedule.timesteps):
        if window and step == window[0]:
            latents = latents.expand_as(noise).contiguous()
        point = Point(schedule.sigmas[step], schedule.sigmas[step + 1], schedule.sigmas[1])
        predicted = velocity(latents, timestep.to(latents.device).expand(len(latents)))
        if step not in window:
            here, predicted = point.like(latents), predicted.float()
            after = SOLVERS[sampler.solver](latents, predicted, here, past)
            latents, past = after, estimate(latents, predicted, here)
            if step + 1 in window:
                latents = latents.to(storage).float()
        else:
            if not states:
                states.append(latents)
            taken = transition(sampler, latents, predicted, point, noise=step_noise(step), storage=storage)
            latents, past = taken.next_latents, None
            states.append(latents)
            log_probs.append(taken.log_prob)
        _finite(latents, step)
    if not states:
        return Rollout(latents, None, None)
    return Rollout(latents, torch.stack(states, 1).to(storage), torch.stack(log_probs, 1))


def _fits(window: tuple[int, ...], num_steps: int) -> None:
    if window and (
        window != tuple(range(window[0], window[-1] + 1)) or not 0 <= window[0] <= window[-1] < num_steps - 1
    ):
        raise ValueError(
            f"wanted a window of neighbouring steps in 0..{num_steps - 2} (the last has no noise), got {window}"
        )


def _finite(latents: Tensor, step: int) -> None:
    good = latents.flatten(1).isfinite().all(1)
    if not bool(good.all()):
        places = (~good).nonzero().flatten().tolist()
        raise NonFinite(f"latents are not finite after step {step} at places {places} of the batch")
