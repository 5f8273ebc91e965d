"""Flow-CPS: a step that keeps the schedule's coefficients (arXiv 2509.05952)."""

import math

import torch
from torch import Tensor

from schemas.sampling import CpsSampler
from stages.sde.moments import Moments, Point, require_noise


def cps(config: CpsSampler, latents: Tensor, velocity: Tensor, point: Point) -> Moments:
    """mean = (1-sigma') x0 + sqrt(sigma'^2 - s^2) e, std = s = sigma' sin(eta pi/2).

    x0 = x - sigma v and e = x + (1-sigma) v are the estimates of data and noise: signal 1-sigma', total noise sigma'.
    """
    require_noise(config.eta, point)
    sigma, sigma_next, _ = point
    std = sigma_next * math.sin(config.eta * math.pi / 2)
    kept = sigma_next * math.cos(config.eta * math.pi / 2)
    mean = (1 - sigma_next) * (latents - sigma * velocity) + kept * (latents + (1 - sigma) * velocity)
    return Moments(mean, torch.as_tensor(std))
