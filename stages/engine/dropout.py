"""Dropout of the adapters' inputs. A sample's mask comes from what the sample is, never from a rank's generator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from schemas.errors import InputError
from schemas.seeds import seed_of


class AdapterDropout(nn.Module):
    """Dropout with one seed a sample; without seeds it hands its input on.

    The same seeds give the same mask, so that a forward that is computed again for its backward is the same too.
    """

    def __init__(self, share: float, name: str) -> None:
        super().__init__()
        self.share, self.name = share, name
        self.seeds: Sequence[int] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs` (batch, ...) with a share of each sample's numbers set to 0 and the rest raised to keep the mean."""
        if self.seeds is None:
            return inputs
        if len(inputs) != len(self.seeds):
            raise InputError(
                f"`model.lora.dropout` cannot act on {self.name!r}: its inputs have {len(inputs)} rows for "
                f"{len(self.seeds)} samples; leave it out of `model.lora.targets`"
            )
        generator = torch.Generator(inputs.device)
        kept = []
        for seed in self.seeds:
            generator.manual_seed(seed_of(seed, self.name))
            kept.append(torch.rand(inputs.shape[1:], generator=generator, device=inputs.device) >= self.share)
        return inputs * torch.stack(kept) / (1 - self.share)


@contextmanager
def dropout(module: nn.Module, seeds: Sequence[int]) -> Iterator[None]:
    """Inside, the adapters that have dropout drop, one seed a sample; nothing else of the module does."""
    layers = [(layer, part) for layer in module.modules() if isinstance(layer, LoraLayer) for part in _drops(layer)]
    try:
        for layer, part in layers:
            layer.training, part.seeds = True, seeds  # DoRA asks its layer
        yield
    finally:
        for layer, part in layers:
            layer.training, part.seeds = False, None


def _drops(layer: LoraLayer) -> list[AdapterDropout]:
    return [part for part in layer.lora_dropout.values() if isinstance(part, AdapterDropout)]
