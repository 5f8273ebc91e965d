"""DDIM with noise (arXiv 2010.02502, equation 12), as DDPO trains it (arXiv 2305.13301)."""

import torch
from torch import Tensor

from schemas.sampling import DdimSampler
from stages.sde.moments import Moments, Point, require_noise


def ddim(config: DdimSampler, latents: Tensor, velocity: Tensor, point: Point) -> Moments:
    """mean = alpha' x0 + sqrt(sigma'^2 - s^2) e, std = s = eta sigma' sqrt(1 - (sigma' alpha/(sigma alpha'))^2).

    alpha = 1 - sigma; x0 = x - sigma v and e = x + (1-sigma) v are the estimates of data and noise.
    """
    require_noise(config.eta, point)
    sigma, sigma_next, _ = point
    alpha, alpha_next = 1 - sigma, 1 - sigma_next
    std = config.eta * sigma_next * torch.sqrt(1 - (sigma_next * alpha / (sigma * alpha_next)) ** 2)
    kept = torch.sqrt(sigma_next**2 - std**2)
    mean = alpha_next * (latents - sigma * velocity) + kept * (latents + alpha * velocity)
    return Moments(mean, std)
