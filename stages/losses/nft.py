"""DiffusionNFT: implicit positive and negative policies on final latents (arXiv 2509.16117)."""

import torch
from torch import Tensor

from schemas.losses import NftLoss
from stages.losses.terms import LossTerms, mean_over_dims


def nft(
    config: NftLoss,
    velocity: Tensor,
    old_velocity: Tensor,
    noised: Tensor,
    times: Tensor,
    x0: Tensor,
    advantages: Tensor,
) -> LossTerms:
    """c (r L+ + (1-r) L-) / beta with r = clamp(A, -c, c)/(2c) + 1/2.

    v+- = v_old +- beta (v - v_old); x0+- = x_t - t v+-; L+- = mean (x0+- - x0)^2 / max(sg mean |x0+- - x0|, 1e-5).
    Tensors (batch, ...), `times` and `advantages` (batch,). Stats: `old_distance` = mean (v - v_old)^2.
    """
    c, beta = config.advantage_clip, config.beta
    step = beta * (velocity - old_velocity)
    t = times.reshape((-1,) + (1,) * (x0.dim() - 1))
    positive = _matching(noised - t * (old_velocity + step), x0)
    negative = _matching(noised - t * (old_velocity - step), x0)
    r = advantages.double().clamp(-c, c) / (2 * c) + 0.5
    loss = (c / beta) * (r.float() * positive + (1 - r).float() * negative)
    return LossTerms(loss, {"old_distance": mean_over_dims((velocity - old_velocity).detach() ** 2)})


def _matching(predicted: Tensor, x0: Tensor) -> Tensor:
    with torch.no_grad():
        weight = mean_over_dims((predicted.double() - x0.double()).abs()).clamp(min=1e-5).float()
    return mean_over_dims((predicted - x0) ** 2) / weight
