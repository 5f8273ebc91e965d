"""Bytes of activations, by model family: one formula a file, derived from what the model's config.json says."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pipelines.activations import sd3
from pipelines.activations.bytes import Activations
from schemas.models import ModelConfig

__all__ = ["Activations", "Family", "family_of"]


class Formula(Protocol):
    """Bytes of one sample in one branch of a model call, from the transformer's config.json."""

    def __call__(self, config: Mapping[str, Any], model: ModelConfig, latent_side: int, text: int) -> Activations:
        """`latent_side` is the height and width of the latents, `text` the number of text tokens."""
        ...


class Family(NamedTuple):
    """What a family's memory needs to be told: the names of its blocks' tensors begin so, and its formula."""

    blocks: str
    activations: Formula


_FAMILIES: dict[str, Family] = {"sd3": Family("transformer_blocks.", sd3.activations)}


def family_of(model: ModelConfig) -> Family:
    """The family of a model."""
    return _FAMILIES[model.kind]
