"""Named sets of the trainable weights: raw, old, ema, and the base.

`raw` lives in the sharded parameters. The others are local shards that are swapped in for a forward and swapped out
again, so that nothing depends on adapter switches, which flip requires_grad behind one's back.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from schemas.losses import WeightSet
from stages.engine.lora import base_of, is_lora
from stages.engine.shard import reshard

Shards = dict[str, Tensor]


class Weights:
    """The trainable parameters of a sharded module and their sets; `copies` ranks hold the same part of each."""

    def __init__(self, module: nn.Module, copies: int = 1) -> None:
        self.module, self.copies = module, copies
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.sets: dict[str, Shards] = {}
        lora = any(map(is_lora, self.parameters))
        # The base of a LoRA needs a copy of its smallest part only. The start of full training is kept on the CPU.
        self.base: Shards = {
            name: shard
            for name, local in self.raw().items()
            if (shard := base_of(name, local) if lora else local.cpu().clone()) is not None
        }
        self.start: Shards = {name: local.cpu().clone() for name, local in self.raw().items()} if lora else self.base

    def begin(self, whole: Mapping[str, Tensor]) -> None:
        """Training starts from these whole tensors; the base stays. ValueError when they are not those of the model."""
        self.start = {name: shard.cpu() for name, shard in self.cut(whole).items()}
        self.put(self.start)

    def raw(self) -> Shards:
        """This rank's part of each trainable tensor, sharing memory with the parameters."""
        return {name: local(parameter) for name, parameter in self.parameters.items()}

    @contextmanager
    def using(self, name: WeightSet | str) -> Iterator[None]:
        """The module computes with this set inside the block. KeyError if the policy has no such set."""
        if name == "raw":
            yield
            return
        chosen = self.base if name == "base" else self.sets[name]
        raw = self.raw()
        kept = {key: raw[key].clone() for key in chosen}
        try:
            self.put(chosen)
            yield
        finally:
            self.put(kept)

    def put(self, shards: Mapping[str, Tensor]) -> None:
        """Copies shards into the parameters; memory stays where it is, since alignment changes a matrix product."""
        raw = self.raw()
        with torch.no_grad():
            for name, value in shards.items():
                raw[name].copy_(value)
        reshard(self.module)

    def copy_raw(self) -> Shards:
        """A copy of the raw shards."""
        return {name: value.detach().clone() for name, value in self.raw().items()}

    def keep(self, names: Collection[str]) -> None:
        """From now on there are these sets beside raw: new ones start as raw, others are dropped."""
        self.sets = {name: self.sets[name] if name in self.sets else self.copy_raw() for name in names}

    def blend(self, name: str, decay: float) -> None:
        """set = decay * set + (1 - decay) * raw."""
        raw = self.raw()
        with torch.no_grad():
            for key, value in self.sets[name].items():
                value.lerp_(raw[key], 1.0 - decay)

    def full(self, shards: Mapping[str, Tensor]) -> Shards:
        """Whole tensors on the CPU, gathered by all ranks together."""
        return {name: _gather(value, self.parameters[name]) for name, value in shards.items()}

    def cut(self, whole: Mapping[str, Tensor]) -> Shards:
        """This rank's parts of whole tensors; ValueError when names or shapes are not those of the model."""
        if whole.keys() != self.parameters.keys():
            strange = sorted(whole.keys() ^ self.parameters.keys())
            raise ValueError(f"{len(strange)} tensors do not fit the model, first {strange[0]!r}")
        return {name: cut(value, self.parameters[name]) for name, value in whole.items()}


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, sharing its memory."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _gather(shard: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return shard.detach().cpu().clone()
    placed = DTensor.from_local(
        shard.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return placed.full_tensor().cpu().clone()


def cut(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, on the parameter's device in float32; ValueError for another shape."""
    if whole.shape != parameter.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} does not fit {tuple(parameter.shape)}")
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device, torch.float32)
    whole = whole.to(parameter.device, torch.float32)
    return local(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)).clone()
