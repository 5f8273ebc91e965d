"""FSDP2: every block is a unit, then the root."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Shards in place. Parameters keep their dtype and are gathered in `compute`; gradients are reduced in float32.

    Forward inputs are never cast: the timestep must stay float32 (857.69 would become 856 in bfloat16).
    """
    reduced = compute != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=compute if reduced else None,
        reduce_dtype=torch.float32 if reduced else None,
        cast_forward_inputs=False,
    )
    # On one CPU rank gathering is a copy with nothing to gain; on a GPU gathered blocks would double the memory.
    free = mesh.size() > 1 or mesh.device_type != "cpu"
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=free)


def reshard(module: nn.Module) -> None:
    """Drops gathered weights, so that the next forward gathers what the shards hold now."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def sync_gradients(module: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks; without it they pile up on each rank."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(sync)
