"""Full weights through torch's distributed checkpoint, in its safetensors form: a file a rank, for any world size.

A tensor of part `ema` is called ``ema.NAME`` in the files; each file notes where its rows begin.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from schemas.errors import InputError, RunError
from stages.engine.mesh import beside
from stages.engine.weights import local

_OFFSETS = "DCP_SHARDING_INFO"  # torch's note of where a file's tensors lie in the whole ones
_NAME = "shard-{}-model-00001-of-00001.safetensors"


def placed(shards: Mapping[str, Tensor], parameters: Mapping[str, Tensor], copied: bool) -> dict[str, Tensor]:
    """This rank's shards as DTensors placed as the parameters, on the CPU, in memory of their own if `copied`."""
    return {name: _placed(value.detach().to("cpu", copy=copied), parameters[name]) for name, value in shards.items()}


def write(folder: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Writes this rank's file; gives its digest by part, empty if it had nothing of its own. A collective."""
    state = {f"{part}.{name}": value for part, named in parts.items() for name, value in named.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _told():
        save(state, storage_writer=writer, process_group=beside())
    mine = file(folder, f"{dist.get_rank() + 1:05d}")
    return {part: digest(mine, part) for part in parts} if mine.is_file() else {}


def is_here(folder: Path) -> bool:
    """Whether a policy lies there in this form."""
    return any(folder.glob(_NAME.format("*")))


def file(folder: Path, number: str) -> Path:
    """One rank's file; ranks count from 00001."""
    return folder / _NAME.format(number)


def digest(path: Path, part: str) -> str:
    """SHA-256 over name, offset, dtype, shape and bytes of a part's tensors in a file; InputError if it is broken."""
    total = hashlib.sha256()
    try:
        with safe_open(path, framework="pt") as stored:
            offsets = json.loads(stored.metadata()[_OFFSETS])
            for name in sorted(name for name in stored.keys() if name.startswith(f"{part}.")):  # noqa: SIM118
                tensor = stored.get_tensor(name)
                start = offsets[name]["saved_offsets"]
                total.update(f"{name!r}:{start}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
                total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: wanted a file of a distributed checkpoint, got: {error}. Delete the stage's directory "
            f"{path.parent.parent} and run again."
        ) from error
    return total.hexdigest()


def cut(folder: Path, prefix: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of the tensors called `prefix`NAME, float32; ValueError when they are not the model's."""
    _fits(folder, prefix, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    state = {
        f"{prefix}{name}": _placed(torch.empty_like(local(parameter), dtype=torch.float32), parameter)
        for name, parameter in parameters.items()
    }
    with _told():
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=beside())
    return {name: local(state[f"{prefix}{name}"]) for name in parameters}


def whole(folder: Path, part: str) -> dict[str, Tensor]:
    """All tensors of a part, whole, in one process."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    out = {name: torch.empty(tuple(_size(one))) for name, one in found.items() if name.startswith(f"{part}.")}
    for path in sorted(folder.glob(_NAME.format("*"))):
        with safe_open(path, framework="pt") as stored:
            offsets = json.loads(stored.metadata()[_OFFSETS])
            for name in set(stored.keys()) & out.keys():
                rows = stored.get_tensor(name)
                starts = zip(offsets[name]["saved_offsets"], rows.shape, strict=True)
                out[name][tuple(slice(start, start + length) for start, length in starts)] = rows
    return {name.removeprefix(f"{part}."): out[name] for name in sorted(out)}


@contextmanager
def _told() -> Iterator[None]:
    """torch's exception here is no Exception, so that nothing that looks out for those would see it."""
    try:
        yield
    except CheckpointException as error:
        raise RunError(f"a distributed checkpoint failed: {error}") from error


def _fits(folder: Path, prefix: str, wanted: Mapping[str, tuple[int, ...]]) -> None:
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    got = {name.removeprefix(prefix): tuple(_size(one)) for name, one in stored.items() if name.startswith(prefix)}
    strange = sorted(got.keys() ^ wanted.keys())
    if strange:
        raise ValueError(f"{len(strange)} tensors do not fit the model, first {strange[0]!r}")
    for name, shape in wanted.items():
        if got[name] != shape:
            raise ValueError(f"a tensor of shape {got[name]} does not fit {shape}")


def _size(stored: object) -> torch.Size:
    assert isinstance(stored, TensorStorageMetadata)
    return stored.size


def _placed(shard: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
