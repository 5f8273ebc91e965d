"""Full weights in the safetensors form of torch's distributed checkpoint: a file a rank, read at any world size.

A tensor of part `ema` is called ``ema.NAME`` in the files; each file notes where its rows begin. torch reads them. It
would also write them, after it had built each file in memory, and after ranks had exchanged plans that all know.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from schemas.errors import InputError, RunError
from stages.engine.mesh import beside
from stages.engine.weights import local
from stages.store import files

_OFFSETS = "DCP_SHARDING_INFO"  # torch's note of where a file's tensors lie in the whole ones
_FORM = {"DCP_VERSION": "1.0", "format": "pt"}
_NAME = "shard-{}-model-00001-of-00001.safetensors"


class Piece(NamedTuple):
    """This rank's part of a tensor, and where it begins in the whole one."""

    values: Tensor
    start: tuple[int, ...]


def pieces(shards: Mapping[str, Tensor], places: Mapping[str, tuple[int, ...]], copied: bool) -> dict[str, Piece]:
    """What this rank writes of `shards`, on the CPU, in memory of its own if `copied`."""
    return {name: Piece(shards[name].detach().to("cpu", copy=copied), start) for name, start in places.items()}


def places(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Where this rank's parts begin, without those that another rank writes."""
    return {name: _start(parameter) for name, parameter in parameters.items() if _is_ours(parameter)}


def write(folder: Path, parts: Mapping[str, Mapping[str, Piece]]) -> dict[str, str]:
    """Writes this rank's file; gives its digest by part, empty if it has nothing of its own."""
    mine = {f"{part}.{name}": piece for part, named in parts.items() for name, piece in named.items()}
    if not mine:
        return {}
    notes = {name: {"saved_offsets": piece.start} for name, piece in mine.items()}
    values = {name: piece.values.contiguous() for name, piece in mine.items()}
    with ThreadPoolExecutor() as beside_disk:
        digests = {part: beside_disk.submit(_digest, _of(part, mine, values)) for part in parts}
        with files.written(file(folder, f"{dist.get_rank() + 1:05d}")) as temporary:
            save_file(values, temporary, {_OFFSETS: json.dumps(notes), **_FORM})
        return {part: digest.result() for part, digest in digests.items()}


def _of(
    part: str, mine: Mapping[str, Piece], values: Mapping[str, Tensor]
) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    return ((name, mine[name].start, values[name]) for name in sorted(mine) if name.startswith(f"{part}."))


def is_here(folder: Path) -> bool:
    """Whether a policy lies there in this form."""
    return any(folder.glob(_NAME.format("*")))


def file(folder: Path, number: str) -> Path:
    """One rank's file; ranks count from 00001."""
    return folder / _NAME.format(number)


def digest(path: Path, part: str) -> str:
    """SHA-256 over name, offset, dtype, shape and bytes of a part's tensors in a file; InputError if it is broken."""
    try:
        with safe_open(path, framework="pt") as stored:
            notes = json.loads(stored.metadata()[_OFFSETS])
            names = sorted(name for name in stored.keys() if name.startswith(f"{part}."))  # noqa: SIM118
            return _digest((name, notes[name]["saved_offsets"], stored.get_tensor(name)) for name in names)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: wanted a file of a distributed checkpoint, got: {error}. Delete the stage's directory "
            f"{path.parent.parent} and run again."
        ) from error


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


def _digest(tensors: Iterable[tuple[str, Sequence[int], Tensor]]) -> str:
    total = hashlib.sha256()
    for name, start, tensor in tensors:
        total.update(f"{name!r}:{list(start)}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _is_ours(parameter: Tensor) -> bool:
    """Whether this rank writes its part: of replicas the first does, and of what is not sharded rank 0."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    copies = (at for at, placement in zip(coordinates, parameter.placements, strict=True) if placement.is_replicate())
    return not any(copies) and local(parameter).numel() > 0


def _start(parameter: Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1]


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
