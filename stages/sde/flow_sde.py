"""Flow-GRPO's stochastic step (arXiv 2505.05470, equation 9), and the form that it shares with DanceGRPO's."""

import torch
from torch import Tensor

from schemas.sampling import FlowSdeSampler
from stages.sde.moments import Moments, Point, require_noise


def flow_sde(config: FlowSdeSampler, latents: Tensor, velocity: Tensor, point: Point) -> Moments:
    """`sde` with g = eta sqrt(sigma/(1-sigma~)), sigma~ = `sigma_max` where sigma >= 1 - 1e-6, else sigma."""
    require_noise(config.eta, point)
    sigma, _, sigma_max = point
    below_one = torch.where(sigma >= 1 - 1e-6, sigma_max, sigma)
    return sde(latents, velocity, point, config.eta * torch.sqrt(sigma / (1 - below_one)))


def sde(latents: Tensor, velocity: Tensor, point: Point, g: Tensor) -> Moments:
    """mean = x + [v + g^2/(2 sigma) (x + (1-sigma) v)] dt, std = g sqrt(-dt), with the ODE's marginals."""
    sigma, sigma_next, _ = point
    dt = sigma_next - sigma
    noise_estimate = latents + (1 - sigma) * velocity
    mean = latents + (velocity + g**2 / (2 * sigma) * noise_estimate) * dt
    return Moments(mean, g * torch.sqrt(-dt))
