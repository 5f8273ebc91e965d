"""Euler's step along the probability-flow ODE."""

import torch
from torch import Tensor

from schemas.sampling import SamplerConfig
from stages.sde.moments import Moments, Point


def ode(config: SamplerConfig, latents: Tensor, velocity: Tensor, point: Point) -> Moments:
    """mean = x + v (sigma' - sigma), std = 0."""
    return Moments(latents + velocity * (point.sigma_next - point.sigma), torch.zeros_like(point.sigma))
