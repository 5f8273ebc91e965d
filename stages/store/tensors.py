"""Named tensors as safetensors files, written whole or not at all."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from schemas.errors import InputError
from stages.store.files import written


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes `tensors` and returns their digest."""
    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    with written(path) as temporary:
        save_file(on_cpu, str(temporary))
    return digest(on_cpu)


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, by sorted name. Raises InputError when the file is missing or broken."""
    remedy = f"Delete the stage's directory {path.parent.parent} and run again."
    if not path.is_file():
        raise InputError(f"{path}: the file is missing. {remedy}")
    try:
        tensors = load_file(str(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: wanted a safetensors file, got: {error}. {remedy}") from error
    return {name: tensors[name] for name in sorted(tensors)}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes, in sorted order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name!r}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
