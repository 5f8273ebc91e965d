"""What every loss returns."""

from typing import NamedTuple

from torch import Tensor


class LossTerms(NamedTuple):
    """`loss` (batch,), to be summed and divided by global counts; `stats` by name, each (batch,), detached."""

    loss: Tensor
    stats: dict[str, Tensor]


def mean_over_dims(value: Tensor) -> Tensor:
    """The mean over all dimensions but the batch: (batch,)."""
    return value.flatten(1).mean(1)
