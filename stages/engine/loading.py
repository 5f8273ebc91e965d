"""Weights from safetensors files into a sharded module: each rank reads its own rows, one tensor at a time.

The module is made on the meta device and sharded there, so that no process ever holds the whole model.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from schemas.errors import InputError
from schemas.models import LoraConfig
from stages.engine.lora import is_lora, measured_layer, start_of
from stages.engine.weights import cut, local

_LAYER = ".base_layer."  # what PEFT puts between a wrapped layer's name and its tensor's


def fill(
    module: nn.Module, paths: Sequence[Path], lora: LoraConfig | None, device: torch.device, rest: torch.device
) -> None:
    """Gives a sharded meta module its weights from safetensors files; adapters start as drawn.

    Buffers go to `device`, sharded parameters to `rest`. InputError for a file that is broken, and names the first
    tensor that is missing, too many, or of another shape.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    folder = paths[0].parent
    module.to_empty(device=rest)
    with ExitStack() as stack, torch.no_grad():
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot read the weights in {folder}: {error}; download the model again") from error
        place = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
        stored = {name: place.pop(name.replace(_LAYER, "."), None) for name, _ in _saved(module)}
        _all_there(stored, place, folder)
        parameters = dict(module.named_parameters())
        for name in stored.keys() & parameters.keys():
            local(parameters[name]).copy_(_rows(stored[name], name, parameters[name], folder))
        for name, parameter in parameters.items():
            if lora is not None and is_lora(name):
                local(parameter).copy_(_begun(name, parameters, lora))
        for name, value in buffers.items():
            file = stored.get(name)
            owner, _, leaf = name.rpartition(".")
            found = value if file is None else file.get_tensor(name)
            setattr(module.get_submodule(owner), leaf, found.to(device, value.dtype).reshape(value.shape))


def _saved(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that a file should have."""
    return [(name, value) for name, value in module.state_dict().items() if not is_lora(name)]


def _all_there(stored: dict[str, Any], left: dict[str, Any], folder: Path) -> None:
    missing = [name for name, file in stored.items() if file is None]
    for what, names in (("lack", missing), ("have too many", sorted(left))):
        if names:
            raise InputError(
                f"the weights in {folder} {what} tensors: {len(names)}, first {names[0]!r}; they are not those of the "
                "config.json beside them: download the model again"
            )


def _rows(file: Any, name: str, parameter: Tensor, folder: Path) -> Tensor:
    """This rank's part of a stored tensor."""
    view = file.get_slice(name.replace(_LAYER, "."))
    if tuple(view.get_shape()) != tuple(parameter.shape):
        raise InputError(
            f"the weights in {folder}: {name!r} has shape {tuple(view.get_shape())}, the model wants "
            f"{tuple(parameter.shape)}; they are not those of the config.json beside them: download the model again"
        )
    if not isinstance(parameter, DTensor):
        return view[:]
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return view[tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))]


def _begun(name: str, parameters: Mapping[str, Tensor], lora: LoraConfig) -> Tensor:
    """This rank's part of an adapter's tensor; a DoRA magnitude is cut as the rows that it measures."""
    layer = measured_layer(name)
    if layer:
        return torch.linalg.norm(local(parameters[f"{layer}{_LAYER}weight"]), dim=1)
    return cut(start_of(name, tuple(parameters[name].shape), lora), parameters[name])
