"""Regularisers that keep the policy near a reference. Four scales are in use in the field, so each has a name."""

from torch import Tensor

from stages.losses.terms import mean_over_dims
from stages.sde.moments import Point


def kl_velocity(velocity: Tensor, reference: Tensor) -> Tensor:
    """mean (v - v_ref)^2: (batch,)."""
    return mean_over_dims((velocity - reference) ** 2)


def kl_mean(mean: Tensor, reference: Tensor, std: Tensor) -> Tensor:
    """mean (mu - mu_ref)^2 / (2 std^2) with the full std: the exact KL of one step, per dimension: (batch,)."""
    return mean_over_dims((mean - reference) ** 2 / (2 * std**2))


def kl_mean_over_g(mean: Tensor, reference: Tensor, std: Tensor, point: Point) -> Tensor:
    """mean (mu - mu_ref)^2 / (2 g^2), g = std / sqrt(-dt): Flow-GRPO's published code, for its published weight."""
    sigma, sigma_next, _ = point.like(mean)  # (batch,) beside (batch, 1, ...) would broadcast to (batch, ..., batch)
    variance = std**2 / (sigma - sigma_next)
    return mean_over_dims((mean - reference) ** 2 / (2 * variance))
