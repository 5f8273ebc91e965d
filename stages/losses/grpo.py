"""Clipped policy gradient on log-probs of stochastic steps (Flow-GRPO, arXiv 2505.05470; PPO's clip)."""

import torch
from torch import Tensor

from schemas.losses import GrpoLoss
from stages.losses.terms import LossTerms


def grpo(config: GrpoLoss, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> LossTerms:
    """max(-A rho, -A clip(rho)), rho = exp(log_prob - old_log_prob); all (batch,) float32.

    Stats: `ratio`, `clipped` (1 where the clip removes the gradient), `approx_kl` = rho - 1 - log rho >= 0.
    """
    low, high = config.clip_range
    log_ratio = log_prob - old_log_prob
    ratio = torch.exp(log_ratio)
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    with torch.no_grad():
        outside = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
        stats = {"ratio": ratio.detach(), "clipped": outside.float(), "approx_kl": torch.expm1(log_ratio) - log_ratio}
    return LossTerms(torch.maximum(plain, clipped), stats)
