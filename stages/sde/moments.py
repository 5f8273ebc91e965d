"""What a stepper is told and what it returns."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Point(NamedTuple):
    """Where a step starts and ends, float32, 0-d or (batch,): sigma > sigma_next; `sigma_max` is the schedule's second.

    `sigma_max` stands in for sigma where sigma is 1 and 1 - sigma would divide by zero (Flow-GRPO).
    """

    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor

    def like(self, latents: Tensor) -> "Point":
        """The same numbers shaped to broadcast over latents (batch, ...)."""
        shape = (-1,) + (1,) * (latents.dim() - 1)
        return Point(*(value.to(latents.device, torch.float32).reshape(shape) for value in self))


def require_noise(eta: float, point: Point) -> None:
    """ValueError at eta <= 0, where a step has no density, and at sigma' = 0, which is never stochastic."""
    if eta <= 0:
        raise ValueError(f"a stochastic step needs eta > 0, got {eta}; use the stepper `ode` for steps without noise")
    if bool((point.sigma_next <= 0).any()):
        raise ValueError("a step to sigma 0 cannot be stochastic; end the window before the last step")


class Moments(NamedTuple):
    """Mean (batch, ...) of the next latents, and the FULL standard deviation of the step, broadcastable to it."""

    mean: Tensor
    std: Tensor


def log_prob(next_latents: Tensor, moments: Moments) -> Tensor:
    """Gaussian log-density, the MEAN over all dimensions but the batch: (batch,) float32."""
    mean, std = moments
    value = -((next_latents - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(2 * math.pi) / 2
    return value.flatten(1).mean(1)
