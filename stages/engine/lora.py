"""Which weights are trained: LoRA through PEFT, or all of them. Trainable weights are float32, always."""

import math
from collections.abc import Sequence

import torch
from peft import LoraConfig as PeftLora
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from schemas.errors import InputError
from schemas.models import LoraConfig
from schemas.seeds import seed_of
from stages.engine.dropout import AdapterDropout

ADAPTER = "default"
_A, _B, _MAGNITUDE = f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}.", f".lora_magnitude_vector.{ADAPTER}."


def peft_config(config: LoraConfig, targets: Sequence[str]) -> PeftLora:
    """PEFT's own config for ours; dropout and first values are ours."""
    wanted = list(config.targets or targets)
    return PeftLora(r=config.rank, lora_alpha=config.scale_alpha, target_modules=wanted, use_dora=config.dora)  # type: ignore[arg-type]


def make_trainable(module: nn.Module, config: LoraConfig | None, targets: Sequence[str]) -> None:
    """Adds adapters to a meta module, or opens all weights for training; `start_of` says what adapters begin as."""
    if config is None:
        module.requires_grad_(True)
        for parameter in module.parameters():  # buffers stay as the public pipeline has them
            parameter.data = parameter.data.float()
        return
    try:
        module.add_adapter(peft_config(config, targets), ADAPTER)  # type: ignore[operator]
    except ValueError as error:
        raise InputError(f"`model.lora.targets` does not fit the model: {error}") from error
    for name, parameter in module.named_parameters():
        if is_lora(name):
            parameter.data = parameter.data.float()
    if config.dropout:
        for name, layer in module.named_modules():
            if isinstance(layer, LoraLayer):
                layer.lora_dropout[ADAPTER] = AdapterDropout(config.dropout, name)


def start_of(name: str, shape: tuple[int, ...], config: LoraConfig) -> Tensor:
    """A whole lora_A or lora_B before any training.

    lora_A is drawn from its name, not from a global generator, so that every rank and every start has the same, as PEFT
    draws it: kaiming_uniform(a=sqrt(5)), or normal. lora_B is 0: the adapted model equals the base.
    """
    if _B in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed_of("lora", name))
    if config.init == "gaussian":
        return torch.randn(shape, generator=generator) / config.rank
    return (torch.rand(shape, generator=generator) * 2 - 1) * (1 / math.sqrt(shape[1]))


def measured_layer(name: str) -> str:
    """The layer whose rows' lengths a DoRA magnitude begins as; empty for other tensors."""
    return name.partition(_MAGNITUDE)[0] if _MAGNITUDE in name else ""


def base_of(name: str, shard: Tensor) -> Tensor | None:
    """What a trainable shard of a fresh LoRA is in the base model, or none where that makes no difference.

    lora_B is 0, which switches its adapter off exactly. DoRA's magnitudes are what they are before the training.
    """
    if _B in name:
        return torch.zeros_like(shard)
    return shard.cpu().clone() if _MAGNITUDE in name else None


def is_lora(name: str) -> bool:
    """Whether a trainable tensor belongs to an adapter."""
    return any(part in name for part in (_A, _B, _MAGNITUDE))
