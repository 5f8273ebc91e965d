"""Flow matching on given samples (rectified flow, arXiv 2209.03003)."""

from torch import Tensor

from schemas.losses import SftLoss
from stages.losses.terms import LossTerms, mean_over_dims


def sft(config: SftLoss, velocity: Tensor, noise: Tensor, x0: Tensor) -> LossTerms:
    """mean (v - (noise - x0))^2; tensors (batch, ...)."""
    return LossTerms(mean_over_dims((velocity - (noise - x0)) ** 2), {})
