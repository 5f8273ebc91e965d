"""The process group and the device mesh. One rank is a group too, so that the code is the same at any world size."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_BESIDE: list[dist.ProcessGroup] = []


def join(device: str, timeout: float = 3600.0) -> None:
    """Joins the process group once a process: that of RANK and WORLD_SIZE, or one of its own.

    gloo on the CPU, NCCL on CUDA; `device` as in "cpu" or "cuda:0".
    """
    if dist.is_initialized():
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    backend, limit = ("cpu:gloo,cuda:nccl" if cuda else "gloo"), timedelta(seconds=timeout)
    if "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=limit)
    group = dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(group, dist.ProcessGroup)
    _BESIDE[:] = [group]


def mesh(device: str, replicas: int = 1) -> DeviceMesh:
    """All ranks in one dimension; with replicas two: (replicate, shard), neighbouring ranks sharing a replica."""
    join(device)
    kind, size = "cuda" if device.startswith("cuda") else "cpu", dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(kind, (size,))
    return init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def beside() -> dist.ProcessGroup:
    """All ranks again, over gloo, for a thread that works behind the model calls: its collectives meet no others."""
    return _BESIDE[0]


def barrier() -> None:
    """Waits for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def total(values: Tensor, largest: bool = False) -> Tensor:
    """Sum (or maximum) over ranks, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return values


def from_first(text: str) -> str:
    """Rank 0's text (at most 256 bytes of ASCII) on every rank."""
    return _from(0, text, 256)


def texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Every rank's text (at most 1,000 bytes of ASCII), in order, on all ranks of a gloo group."""
    mine, size = text.encode("ascii"), 1000
    parts = [torch.zeros(size, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.tensor([*mine, *bytes(size - len(mine))], dtype=torch.uint8), group=group)
    return [bytes(part.tolist()).rstrip(b"\0").decode("ascii") for part in parts]


def first_of(text: str) -> str:
    """The text (cut to 2,000 characters) of the lowest rank that has one, on every rank; empty when none has."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    waiting = torch.tensor([dist.get_world_size() - dist.get_rank() if text else 0])
    first = dist.get_world_size() - int(total(waiting, largest=True))
    return "" if first == dist.get_world_size() else _from(first, text[:2000], 2000)


def _from(rank: int, text: str, size: int) -> str:
    """One rank's text on every rank, as numbers: nothing is pickled."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    data = torch.zeros(size, dtype=torch.int64)
    if dist.get_rank() == rank:
        data[: len(text)] = torch.tensor([ord(c) for c in text], dtype=torch.int64)
    dist.broadcast(data, rank)
    return "".join(chr(c) for c in data.tolist() if c)
