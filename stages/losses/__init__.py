"""Losses: one file an algorithm; pure functions of tensors. `stages/update.py` divides by global counts."""

from collections.abc import Callable

from stages.losses.grpo import grpo
from stages.losses.nft import nft
from stages.losses.sft import sft
from stages.losses.terms import LossTerms

LOSSES: dict[str, Callable[..., LossTerms]] = {"grpo": grpo, "nft": nft, "sft": sft}
