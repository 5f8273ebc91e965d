"""Two families whose latents are not (channels, height, width): the real transformers of Flux and Wan, at tiny size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import init_empty_weights
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from schemas.models import ModelConfig
from schemas.seeds import seed_of
from stages.models import Conditioning, NoiseSchedule

_TOKENS, _WIDTH = 6, 32


class _Family:
    """What both share: text embeddings from the prompt's hash, no shift, pictures of the first values."""

    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    conditioning: ClassVar[tuple[str, ...]] = ("embeds", "pooled")

    def __init__(self, config: ModelConfig, source: str) -> None:
        self.config, self.source = config, source

    def encode(self, prompts: Sequence[str], device: torch.device) -> list[dict[str, Tensor]]:
        out = []
        for prompt in prompts:
            generator = torch.Generator().manual_seed(seed_of(prompt))
            embeds = torch.randn(_TOKENS, _WIDTH, generator=generator)
            out.append({"embeds": embeds, "pooled": torch.randn(_WIDTH, generator=generator)})
        return out

    def transformer(self) -> nn.Module:
        raise NotImplementedError

    def shell(self) -> nn.Module:
        with init_empty_weights(include_buffers=False):
            return self.transformer()

    def weights(self) -> list[Path]:
        file = Path(self.source) / "weights.safetensors"
        if not file.is_file():
            save_file(self.transformer().state_dict(), file)
        return [file]

    def checkpoint_activations(self, transformer: nn.Module) -> None:
        raise NotImplementedError

    def tokens(self, given: Conditioning) -> int:
        return _TOKENS + 16

    def resolution(self) -> int:
        return 4

    def schedule(self, steps: int) -> NoiseSchedule:
        sigmas = torch.linspace(1, 0, steps + 1)
        return NoiseSchedule(sigmas, self.timesteps(sigmas[:-1]))

    def timesteps(self, sigmas: Tensor) -> Tensor:
        return sigmas.float()

    def decode(self, latents: Tensor, device: torch.device) -> Tensor:
        return latents.flatten(1)[:, :48].reshape(-1, 3, 4, 4).sigmoid().cpu()


class Packed(_Family):
    """Flux: latents (tokens, channels), positions beside them, time in 0..1."""

    def transformer(self) -> nn.Module:
        torch.manual_seed(0)
        return (
            FluxTransformer2DModel(
                patch_size=1,
                in_channels=4,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=_WIDTH,
                pooled_projection_dim=_WIDTH,
                axes_dims_rope=(4, 4, 8),
            )
            .requires_grad_(False)
            .eval()
        )

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        names = ("transformer_blocks", "single_transformer_blocks")
        return [block for name in names for block in transformer.get_submodule(name).children()]

    def latent_shape(self) -> tuple[int, ...]:
        return (16, 4)

    def velocity(
        self, transformer: nn.Module, latents: Tensor, timesteps: Tensor, given: Conditioning, guidance_scale: float
    ) -> Tensor:
        places = torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], dim=1).to(latents.device)
        ids: dict[str, Any] = {"img_ids": places, "txt_ids": torch.zeros(_TOKENS, 3, device=latents.device)}
        embeds, pooled = given.positive["embeds"], given.positive["pooled"]
        return transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
            **ids,
        )[0].float()


class Video(_Family):
    """Wan: latents (channels, frames, height, width), time in 0..1000, no pooled embedding."""

    def transformer(self) -> nn.Module:
        torch.manual_seed(0)
        return (
            WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=16,
                out_channels=16,
                text_dim=_WIDTH,
                freq_dim=256,
                ffn_dim=32,
                num_layers=2,
                cross_attn_norm=True,
                qk_norm="rms_norm_across_heads",
                rope_max_seq_len=32,
            )
            .requires_grad_(False)
            .eval()
        )

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        return list(transformer.get_submodule("blocks").children())

    def latent_shape(self) -> tuple[int, ...]:
        return (16, 3, 4, 4)

    def timesteps(self, sigmas: Tensor) -> Tensor:
        return sigmas.float() * 1000

    def velocity(
        self, transformer: nn.Module, latents: Tensor, timesteps: Tensor, given: Conditioning, guidance_scale: float
    ) -> Tensor:
        return transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=given.positive["embeds"],
            return_dict=False,
        )[0].float()
