"""DanceGRPO's stochastic step (arXiv 2505.07818): the same SDE with constant noise."""

import torch
from torch import Tensor

from schemas.sampling import DanceSdeSampler
from stages.sde.flow_sde import sde
from stages.sde.moments import Moments, Point, require_noise


def dance_sde(config: DanceSdeSampler, latents: Tensor, velocity: Tensor, point: Point) -> Moments:
    """`sde` with g = eta."""
    require_noise(config.eta, point)
    return sde(latents, velocity, point, torch.full_like(point.sigma, config.eta))
