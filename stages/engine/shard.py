"""FSDP2: every block is a unit, then the root; with replicas (HSDP) each of them is sharded over its own ranks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

Timed = Callable[[str], AbstractContextManager[None]]


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute: torch.dtype,
    timed: Timed,
    offload: bool = False,
) -> None:
    """Shards in place; gathering and reducing is `timed`.

    Parameters keep their dtype and are gathered in `compute`; gradients are reduced in float32. Forward inputs are
    never cast: the timestep must stay float32 (857.69 would become 856 in bfloat16).
    """
    reduced = compute != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=compute if reduced else None,
        reduce_dtype=torch.float32 if reduced else None,
        cast_forward_inputs=False,
    )
    resting = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    # What stays gathered in any case needs no units of its own, whose hooks would cost each call up to a tenth.
    units = [*blocks, module] if frees_blocks(mesh) else [module]
    for part in units:
        sharded = fully_shard(
            part, mesh=mesh, mp_policy=precision, offload_policy=resting, reshard_after_forward=frees_blocks(mesh)
        )
        sharded.set_custom_all_gather(_AllGather(timed))
        sharded.set_custom_reduce_scatter(_ReduceScatter(timed))


class _AllGather(DefaultAllGather):
    def __init__(self, timed: Timed) -> None:
        self._timed = timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("communication"):
            return super().__call__(*args, **kwargs)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, timed: Timed) -> None:
        self._timed = timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("communication"):
            return super().__call__(*args, **kwargs)


def frees_blocks(mesh: DeviceMesh) -> bool:
    """Whether gathered blocks are dropped after use when nothing is said.

    On one CPU rank gathering is a copy with nothing to gain; on a GPU gathered blocks would double the memory.
    """
    return mesh.size() > 1 or mesh.device_type != "cpu"


def free_after_forward(module: nn.Module, free: bool) -> None:
    """Whether each block's gathered weights are dropped after its forward, from now on."""
    assert isinstance(module, FSDPModule)
    module.set_reshard_after_forward(free)


def reshard(module: nn.Module) -> None:
    """Drops gathered weights, so that the next forward gathers what the shards hold now."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def sync_gradients(module: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks; without it they pile up on each rank."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(sync)
