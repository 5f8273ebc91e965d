"""AdamW with moments of 8 bits in blocks of 256 (Dettmers et al., arXiv 2110.02861), from the extra `adam8bit`.

Saved moments are float32, as any other's: blocks belong to a rank's shards, and what is saved loads at any world size.
Quantising them again is not exact (a block's largest may come out at 0.993), so memory takes up what was saved, too.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from schemas.errors import UserError
from schemas.losses import OptimizerConfig

_BLOCK = 256
_STATES = {"exp_avg": "1", "exp_avg_sq": "2"}  # how bitsandbytes calls them


def adamw(leaves: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer; tensors of fewer than 4,096 numbers keep float32 moments."""
    first, second = config.betas
    return _bitsandbytes("optim").AdamW8bit(
        [leaf for leaf in leaves if leaf.numel()],  # some ranks have no part of a small tensor
        lr=config.learning_rate.start,
        betas=(first, second),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def moments(state: Mapping[str, Any], leaf: Tensor) -> dict[str, Tensor]:
    """A leaf's moments in float32."""
    return {kind: _whole(state, number) if leaf.numel() else torch.zeros_like(leaf) for kind, number in _STATES.items()}


def restore(optimizer: Any, leaf: Tensor, step: int, saved: Mapping[str, Tensor]) -> None:
    """Takes up saved moments."""
    if not leaf.numel():
        return
    optimizer.init_state(optimizer.param_groups[0], leaf, 0, 0)
    state = optimizer.state[leaf]
    state["step"] = step
    for kind, number in _STATES.items():
        value = saved[kind].to(leaf.device, torch.float32)
        if state[f"state{number}"].dtype == torch.float32:
            state[f"state{number}"].copy_(value)
            continue
        quantised, facts = _bitsandbytes("functional").quantize_blockwise(
            value.contiguous(), code=state[f"qmap{number}"], blocksize=_BLOCK
        )
        state[f"state{number}"].copy_(quantised)
        state[f"absmax{number}"].copy_(facts.absmax)


def _whole(state: Mapping[str, Any], number: str) -> Tensor:
    held = state[f"state{number}"]
    if held.dtype == torch.float32:
        return held
    return _bitsandbytes("functional").dequantize_blockwise(
        held, absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=_BLOCK
    )


def _bitsandbytes(part: str) -> Any:
    try:
        return importlib.import_module(f"bitsandbytes.{part}")
    except ImportError as error:
        raise UserError(
            f"optimizer.kind is 'adamw_8bit', which needs bitsandbytes ({error}); pip install 'rewardflow[adam8bit]'"
        ) from error
