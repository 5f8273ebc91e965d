"""Which weights are trained: LoRA through PEFT, or all of them. Trainable weights are float32, always."""

import math
from collections.abc import Sequence

import torch
from peft import LoraConfig as PeftLora
from torch import Tensor, nn

from schemas.errors import InputError
from schemas.models import LoraConfig
from schemas.seeds import seed_of

ADAPTER = "default"


def peft_config(config: LoraConfig, targets: Sequence[str]) -> PeftLora:
    """PEFT's own config for ours."""
    return PeftLora(r=config.rank, lora_alpha=config.scale_alpha, target_modules=list(config.targets or targets))  # type: ignore[arg-type]


def make_trainable(module: nn.Module, config: LoraConfig | None, targets: Sequence[str]) -> None:
    """Adds adapters to a meta module, or opens all weights for training; `start_of` says what adapters begin as."""
    if config is None:
        module.float().requires_grad_(True)
        return
    try:
        module.add_adapter(peft_config(config, targets), ADAPTER)  # type: ignore[operator]
    except ValueError as error:
        raise InputError(f"`model.lora.targets` does not fit the model: {error}") from error
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter and so to no file of the base model."""
    return f".{ADAPTER}." in name


def start_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """A whole adapter tensor before any training.

    lora_A is drawn from its name, not from a global generator, so that every rank and every start has the same; lora_B
    is 0: the adapted model equals the base.
    """
    if zero_in_base(name):
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform(a=sqrt(5)), as in PEFT
    generator = torch.Generator().manual_seed(seed_of("lora", name))
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def zero_in_base(name: str) -> bool:
    """Whether a trainable tensor is 0 in the base model: lora_B, which switches its adapter off exactly."""
    return f".lora_B.{ADAPTER}." in name
