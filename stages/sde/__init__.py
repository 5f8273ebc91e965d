"""Steppers: one function takes a step when sampling (noise given) and when training (next state given)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schemas.sampling import SamplerConfig, StochasticSampler
from stages.sde.cps import cps
from stages.sde.dance_sde import dance_sde
from stages.sde.ddim import ddim
from stages.sde.flow_sde import flow_sde
from stages.sde.moments import Moments, Point, log_prob

Stepper = Callable[[Any, Tensor, Tensor, Point], Moments]

STEPPERS: dict[str, Stepper] = {"flow_sde": flow_sde, "dance_sde": dance_sde, "cps": cps, "ddim": ddim}


class Transition(NamedTuple):
    """One stochastic step: next latents and mean (batch, ...), full std, log-prob (batch,)."""

    next_latents: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor


def transition(
    config: SamplerConfig,
    latents: Tensor,
    velocity: Tensor,
    point: Point,
    *,
    noise: Tensor | None = None,
    next_latents: Tensor | None = None,
    storage: torch.dtype = torch.float32,
) -> Transition:
    """A stochastic step from `noise`, or the density of the step to `next_latents`: exactly one is given.

    With noise, the next state is rounded to the storage dtype before its log-prob, so that replay is exact.
    Raises ValueError for a stepper without noise, whose steps have no density.
    """
    if not isinstance(config, StochasticSampler):
        raise ValueError(f"stepper {config.kind!r} adds no noise, so its steps have no log-prob; use a stochastic one")
    moments = STEPPERS[config.kind](config, latents.float(), velocity.float(), point.like(latents))
    if noise is not None and next_latents is None:
        next_latents = (moments.mean + moments.std * noise).to(storage)
    elif noise is not None or next_latents is None:
        raise ValueError("give either noise, to sample, or next_latents, to replay")
    next_latents = next_latents.float()
    return Transition(next_latents, moments.mean, moments.std, log_prob(next_latents, moments))
