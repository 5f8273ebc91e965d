"""Adapters: what a model family alone knows. They never save, shard, offload or average: the engine does."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from schemas.artifacts import PipelineRef
from schemas.errors import InputError
from schemas.models import ModelConfig


class Conditioning(NamedTuple):
    """What one model call is conditioned on: tensors by name, each with a batch dimension in front."""

    positive: dict[str, Tensor]
    negative: dict[str, Tensor] | None = None


class NoiseSchedule(NamedTuple):
    """The scheduler's own numbers for one resolution.

    `sigmas`: (steps + 1,) float32, descending to 0. `timesteps`: (steps,) float32, as the pipeline passes
    them to the model.
    """

    sigmas: Tensor
    timesteps: Tensor


SequencePlan = Mapping[str, Any]  # modules by name, and how diffusers' hooks split their inputs or gather their outputs


class Adapter(Protocol):
    """One model family."""

    lora_targets: ClassVar[tuple[str, ...]]
    conditioning: ClassVar[tuple[str, ...]]  # names of the tensors that `encode` gives

    def __init__(self, config: ModelConfig, source: str) -> None: ...

    def transformer(self) -> nn.Module:
        """The denoiser in the config's dtype on the CPU, in eval mode (no dropout), frozen."""
        ...

    def shell(self) -> nn.Module:
        """The same with its parameters on the meta device, without any memory; buffers are real."""
        ...

    def weights(self) -> list[Path]:
        """The denoiser's safetensors files, downloaded if need be."""
        ...

    def checkpoint_activations(self, transformer: nn.Module) -> None:
        """From now on blocks are computed again in the backward pass instead of keeping what is inside them."""
        ...

    def share_tokens(self, transformer: nn.Module, ranks: int) -> SequencePlan:
        """Prepares attention for tokens that `ranks` share; where they are split and gathered, for diffusers' hooks."""
        ...

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """The modules that FSDP shards one by one."""
        ...

    def encode(self, prompts: Sequence[str], device: torch.device) -> list[dict[str, Tensor]]:
        """Embeddings of each prompt, unbatched, float32 on the CPU; the encoders leave memory afterwards."""
        ...

    def resolution(self) -> int:
        """Height and width of a picture in pixels."""
        ...

    def tokens(self, given: Conditioning) -> int:
        """Tokens of one sample in one branch of a model call, of latents and text."""
        ...

    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents, without the batch."""
        ...

    def schedule(self, steps: int) -> NoiseSchedule:
        """Sigmas and timesteps as the family's pipeline would use them."""
        ...

    def timesteps(self, sigmas: Tensor) -> Tensor:
        """Model time for any sigma in (0, 1), for losses on final latents."""
        ...

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        guidance_scale: float,
    ) -> Tensor:
        """Guided velocity in float32, shaped as `latents`; `timesteps` is (batch,) float32."""
        ...

    def decode(self, latents: Tensor, device: torch.device) -> Tensor:
        """Pictures (batch, 3, height, width) in [0, 1], float32 on the CPU."""
        ...

    def encode_pictures(self, pictures: Tensor, device: torch.device) -> Tensor:
        """Latents of pictures (batch, 3, height, width) in [0, 1]: the mean of the posterior, float32 on the CPU."""
        ...

    def rest(self) -> None:
        """What is not the denoiser waits in the machine's memory until it is used again."""
        ...


# Named, not imported: a worker loads only the family it needs.
ADAPTERS: dict[str, str] = {"sd3": "stages.models.sd3:Sd3"}


def adapter(config: ModelConfig, pipeline: PipelineRef | None) -> Adapter:
    """The adapter of a config; `pipeline`, made in this run, comes before the config's path."""
    source = pipeline.path if pipeline is not None else config.path
    if source is None:
        raise InputError("model.path is missing: name a pipeline folder or hub id, or give the node a pipeline")
    if pipeline is not None and not Path(source).is_dir():
        raise InputError(f"the pipeline folder {source} is gone; run the stage that made it again")
    module, _, name = ADAPTERS[config.kind].partition(":")
    return getattr(importlib.import_module(module), name)(config, source)
