"""Flow-GRPO's stochastic step (arXiv 2505.05470, equation 9)."""

import torch
from torch import Tensor

from schemas.sampling import FlowSdeSampler
from stages.sde.moments import Moments, Point


def flow_sde(config: FlowSdeSampler, latents: Tensor, velocity: Tensor, point: Point) -> Moments:
    """mean = x + [v + g^2/(2 sigma) (x + (1-sigma) v)] dt, std = g sqrt(-dt), g = eta sqrt(sigma/(1-sigma~)).

    sigma~ is `sigma_max` where sigma >= 1 - 1e-6, else sigma. ValueError at sigma' = 0, which is never stochastic, and
    at eta <= 0, where the step has no density.
    """
    if config.eta <= 0:
        raise ValueError(
            f"a stochastic step needs eta > 0, got {config.eta}; use the stepper `ode` for steps without noise"
        )
    sigma, sigma_next, sigma_max = point
    if bool((sigma_next <= 0).any()):
        raise ValueError("a step to sigma 0 cannot be stochastic; end the window before the last step")
    dt = sigma_next - sigma
    below_one = torch.where(sigma >= 1 - 1e-6, sigma_max, sigma)
    g = config.eta * torch.sqrt(sigma / (1 - below_one))
    noise_estimate = latents + (1 - sigma) * velocity
    mean = latents + (velocity + g**2 / (2 * sigma) * noise_estimate) * dt
    return Moments(mean, g * torch.sqrt(-dt))
