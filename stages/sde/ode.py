"""Steps along the probability-flow ODE: no noise, so no log-prob."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stages.sde.moments import Point


class Past(NamedTuple):
    """What the ODE step before saw: its estimate of x0 (batch, ...), and where it started."""

    x0: Tensor
    sigma: Tensor


Solver = Callable[[Tensor, Tensor, Point, Past | None], Tensor]


def estimate(latents: Tensor, velocity: Tensor, point: Point) -> Past:
    """x0 = x - sigma v, for the next step."""
    return Past(latents - point.sigma * velocity, point.sigma)


def euler(latents: Tensor, velocity: Tensor, point: Point, past: Past | None = None) -> Tensor:
    """x + v (sigma' - sigma): (batch, ...)."""
    return latents + velocity * (point.sigma_next - point.sigma)


def dpm(latents: Tensor, velocity: Tensor, point: Point, past: Past | None = None) -> Tensor:
    """DPM-Solver++ 2M (arXiv 2211.01095, algorithm 2) in flow form, alpha = 1 - sigma: (batch, ...).

    x' = (sigma'/sigma) x + (1 - sigma'/sigma) D, D = x0 + h/(2 h_before) (x0 - x0_before), with h the step of
    lambda = log(alpha/sigma). Without a step before, and to sigma' = 0, D = x0: Euler's step.
    """
    if past is None or bool((point.sigma_next <= 0).any()):
        return euler(latents, velocity, point)
    h, before = _lambda(point.sigma_next) - _lambda(point.sigma), _lambda(point.sigma) - _lambda(past.sigma)
    x0 = estimate(latents, velocity, point).x0
    bend = h / (2 * before) * (x0 - past.x0)  # 0 after a start at sigma 1, where lambda is -inf
    return euler(latents, velocity - bend / point.sigma, point)


SOLVERS: dict[str, Solver] = {"ode": euler, "ode_dpm": dpm}


def _lambda(sigma: Tensor) -> Tensor:
    return torch.log((1 - sigma) / sigma)
