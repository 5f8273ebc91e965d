"""Stable Diffusion 3 and 3.5: a ``StableDiffusion3Pipeline`` folder or hub id.

Loaded component by component, so that text encoders, transformer and autoencoder are never in memory together.
With float32 the numbers are those of the public pipeline, bit for bit.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate import init_empty_weights
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    StableDiffusion3Pipeline,
    calculate_shift,
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schemas.assets import is_hub_id
from schemas.errors import InputError
from schemas.models import ModelConfig, Sd3Model
from stages.models import Conditioning, NoiseSchedule, SequencePlan
from stages.models.files import weight_files
from stages.models.sd3_attention import PLAN, SharedAttention, kernel, must_divide

_REQUIRED = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
_THIRD = ("text_encoder_3", "tokenizer_3")
_CLASSES = {
    "transformer": SD3Transformer2DModel,
    "vae": AutoencoderKL,
    "scheduler": FlowMatchEulerDiscreteScheduler,
}
_NO_KERNEL = ("No available kernel", "No viable backend")
_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_REMEDY = "set `model.path` to a complete StableDiffusion3Pipeline folder or hub id"


class Sd3:
    """The `sd3` family. Conditioning: `embeds` (tokens, width) and `pooled` (width,)."""

    lora_targets: ClassVar[tuple[str, ...]] = Sd3Model.lora_targets
    conditioning: ClassVar[tuple[str, ...]] = ("embeds", "pooled")

    def __init__(self, config: ModelConfig, source: str) -> None:
        self.config, self.source = config, source
        self._dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self._configs: dict[str, dict[str, Any]] = {}
        self._vae: Any = None
        self._token_ranks = 1
        if Path(source).exists() or not is_hub_id(source):
            _check_folder(Path(source))

    def transformer(self) -> SD3Transformer2DModel:
        """The denoiser in the config's dtype on the CPU, in eval mode, frozen."""
        loaded = self._load(SD3Transformer2DModel, "transformer", dtype=self._dtype)
        return loaded.requires_grad_(False).eval()

    def shell(self) -> SD3Transformer2DModel:
        """The same with its parameters on the meta device, without any memory; buffers are real."""
        with init_empty_weights(include_buffers=False):
            empty = SD3Transformer2DModel.from_config(self._config("transformer"))
        assert isinstance(empty, SD3Transformer2DModel)
        # Not the model's own `to`, which warns of a list of modules that is empty here.
        nn.Module.to(empty, self._dtype)
        return empty.requires_grad_(False).eval()

    def weights(self) -> list[Path]:
        """The denoiser's safetensors files, downloaded if need be."""
        try:
            return weight_files(self.source, "transformer", self.config.revision)
        except (OSError, ValueError) as error:
            raise self._unreadable("transformer", error) from error

    def checkpoint_activations(self, transformer: nn.Module) -> None:
        """From now on blocks are computed again in the backward pass instead of keeping what is inside them."""
        assert isinstance(transformer, SD3Transformer2DModel)
        kernel = self._kernel
        again = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), kernel()))
        transformer.enable_gradient_checkpointing(again)

    def share_tokens(self, transformer: nn.Module, ranks: int) -> SequencePlan:
        """Splits pictures' and text's tokens before the first block and gathers the pictures' after the last layer."""
        assert isinstance(transformer, SD3Transformer2DModel)
        heads = self._config("transformer")["num_attention_heads"]
        must_divide(ranks, {"tokens of a picture": self._picture_tokens(), "heads of attention": heads})
        transformer.set_attn_processor(cast(Any, SharedAttention()))
        self._token_ranks = ranks
        return PLAN

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """The joint transformer blocks."""
        return list(transformer.get_submodule("transformer_blocks").children())

    def encode(self, prompts: Sequence[str], device: torch.device) -> list[dict[str, Tensor]]:
        """Embeddings by the pipeline's own `encode_prompt`, one prompt a call, so that no number depends on others.

        Without T5 the pipeline pads with `max_sequence_length` zero tokens; with it T5 pads to that length.
        """
        pipeline = self._text_pipeline()
        encoders = [part for name in _ENCODERS if isinstance(part := pipeline.components[name], nn.Module)]
        for encoder in encoders:
            encoder.requires_grad_(False).eval().to(device)
        return [self._encode_one(pipeline, prompt, device) for prompt in prompts]

    def resolution(self) -> int:
        """Height and width of a picture in pixels."""
        if self.config.resolution is not None:
            return self.config.resolution
        return int(self._config("transformer")["sample_size"]) * self._factor()

    def tokens(self, given: Conditioning) -> int:
        """Tokens of one sample in one branch of a model call, of latents and text."""
        return self._picture_tokens() + given.positive["embeds"].shape[1]

    def latent_shape(self) -> tuple[int, ...]:
        """(channels, height, width) of one sample's latents."""
        config, factor, pixels = self._config("transformer"), self._factor(), self.resolution()
        if pixels % (factor * config["patch_size"]):
            multiple = factor * config["patch_size"]
            raise InputError(f"`model.resolution` {pixels} must be a multiple of {multiple} for {self.source!r}")
        return int(config["in_channels"]), pixels // factor, pixels // factor

    def schedule(self, steps: int) -> NoiseSchedule:
        """Sigmas and timesteps of a fresh scheduler, set as the pipeline sets it (dynamic shift included)."""
        scheduler = self._load(FlowMatchEulerDiscreteScheduler, "scheduler")
        scheduler.set_timesteps(steps, device="cpu", mu=self._shift(scheduler.config))
        return NoiseSchedule(scheduler.sigmas.float().clone(), scheduler.timesteps.float().clone())

    def timesteps(self, sigmas: Tensor) -> Tensor:
        """Model time, float32 in (0, 1000), for any sigma in (0, 1)."""
        return sigmas.float() * self._config("scheduler").get("num_train_timesteps", 1000)

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        guidance_scale: float,
    ) -> Tensor:
        """Guided velocity (batch, channels, height, width) in float32; `timesteps` (batch,) stays float32.

        Guided, both branches go through the model as one batch, negative first, as in the public pipeline;
        they are mixed in float32. Without guidance (scale <= 1) the negative branch is not computed.
        """
        if guidance_scale <= 1:
            return self._call(transformer, latents, timesteps, conditioning.positive)
        if conditioning.negative is None:
            raise ValueError(f"guidance_scale {guidance_scale} needs the negative branch's conditioning")
        both = {k: torch.cat([conditioning.negative[k], conditioning.positive[k]]) for k in self.conditioning}
        out = self._call(transformer, torch.cat([latents, latents]), torch.cat([timesteps, timesteps]), both)
        negative, positive = out.chunk(2)
        return negative + guidance_scale * (positive - negative)

    def decode(self, latents: Tensor, device: torch.device) -> Tensor:
        """Pictures (batch, 3, height, width) in [0, 1], float32 on the CPU. The autoencoder computes in float32."""
        vae = self._autoencoder(device)
        with torch.no_grad():
            scaled = latents.to(device, torch.float32) / vae.config["scaling_factor"] + vae.config["shift_factor"]
            return (vae.decode(scaled, return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1).cpu()

    def encode_pictures(self, pictures: Tensor, device: torch.device) -> Tensor:
        """Latents of pictures (batch, 3, height, width) in [0, 1]: the mean of the posterior, float32 on the CPU."""
        vae = self._autoencoder(device)
        with torch.no_grad():
            mean = vae.encode(pictures.to(device, torch.float32) * 2 - 1, return_dict=False)[0].mean
            return ((mean - vae.config["shift_factor"]) * vae.config["scaling_factor"]).cpu()

    def rest(self) -> None:
        """The autoencoder waits in the machine's memory until it is used again."""
        if self._vae is not None:
            self._vae.to("cpu")

    def _call(self, transformer: nn.Module, latents: Tensor, timesteps: Tensor, given: dict[str, Tensor]) -> Tensor:
        must_divide(self._token_ranks, {"tokens of the text": given["embeds"].shape[1]})
        try:
            with self._kernel():
                return transformer(
                    hidden_states=latents.to(self._dtype),
                    timestep=timesteps.float(),
                    encoder_hidden_states=given["embeds"].to(self._dtype),
                    pooled_projections=given["pooled"].to(self._dtype),
                    return_dict=False,
                )[0].float()
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_KERNEL):
                raise
            raise InputError(
                f"`model.attention` {self.config.attention!r} cannot compute this model on {latents.device} in "
                f"{self.config.dtype}; write native, or a kernel that this machine has"
            ) from error

    def _kernel(self) -> AbstractContextManager[Any]:
        """Inside, attention is computed by the config's kernel and by no other."""
        return kernel(self.config.attention)

    def _encode_one(self, pipeline: Any, prompt: str, device: torch.device) -> dict[str, Tensor]:
        with torch.no_grad():
            embeds, _, pooled, _ = pipeline.encode_prompt(
                prompt=[prompt],
                # Lists, because the pipeline takes an empty string for a missing one.
                prompt_2=[prompt],
                prompt_3=[prompt],
                device=device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.config.max_sequence_length,
            )
        return {"embeds": embeds[0].float().cpu(), "pooled": pooled[0].float().cpu()}

    def _text_pipeline(self) -> StableDiffusion3Pipeline:
        # The pipeline asks the transformer only for its width: a shell without layers answers.
        config = {**self._config("transformer"), "num_layers": 0, "pos_embed_max_size": 1}
        absent = {name: None for name in _THIRD if not _has(self._index(), name)}
        shell = SD3Transformer2DModel.from_config(config)
        return self._load(StableDiffusion3Pipeline, None, transformer=shell, vae=None, dtype=self._dtype, **absent)

    def _autoencoder(self, device: torch.device) -> Any:
        if self._vae is None:
            self._vae = self._load(AutoencoderKL, "vae", dtype=torch.float32).requires_grad_(False).eval()
            if self.config.tiling:
                self._vae.enable_tiling()
        return self._vae.to(device)

    def _shift(self, scheduler: Any) -> float | None:
        """`mu` of dynamic shifting from the number of image tokens, as the pipeline computes it."""
        if not scheduler.get("use_dynamic_shifting"):
            return None
        return calculate_shift(
            self._picture_tokens(),
            scheduler.get("base_image_seq_len", 256),
            scheduler.get("max_image_seq_len", 4096),
            scheduler.get("base_shift", 0.5),
            scheduler.get("max_shift", 1.16),
        )

    def _picture_tokens(self) -> int:
        _, height, width = self.latent_shape()
        patch = self._config("transformer")["patch_size"]
        return (height // patch) * (width // patch)

    def _factor(self) -> int:
        return 2 ** (len(self._config("vae")["block_out_channels"]) - 1)

    def _config(self, component: str) -> dict[str, Any]:
        if component not in self._configs:
            self._configs[component] = self._read_config(_CLASSES[component], component)
        return self._configs[component]

    def _index(self) -> dict[str, Any]:
        return self._read_config(StableDiffusion3Pipeline, None)

    def _read_config(self, kind: type[Any], component: str | None) -> dict[str, Any]:
        place = {"subfolder": component} if component else {}
        try:
            return dict(kind.load_config(self.source, revision=self.config.revision, **place))
        except (OSError, ValueError) as error:
            raise self._unreadable(component or "model_index.json", error) from error

    def _load(self, kind: type[Any], component: str | None, **settings: Any) -> Any:
        place = {"subfolder": component} if component else {}
        try:
            return kind.from_pretrained(self.source, revision=self.config.revision, **place, **settings)
        except (OSError, ValueError) as error:
            raise self._unreadable(component or "the text encoders", error) from error

    def _unreadable(self, component: str, error: Exception) -> InputError:
        at = f" (revision {self.config.revision!r})" if self.config.revision else ""
        return InputError(f"cannot load {component} of the model {self.source!r}{at}: {error}; {_REMEDY}")


def _has(index: dict[str, Any], component: str) -> bool:
    """Whether model_index.json names a class for it; T5 is left out of small copies of SD3."""
    return bool((index.get(component) or [None])[0])


def _check_folder(folder: Path) -> None:
    """Names what a pipeline folder lacks before anything is loaded."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise InputError(f"the model folder {str(folder)!r} has no model_index.json; {_REMEDY}")
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{str(index)!r} is no JSON ({error}); {_REMEDY}") from error
    wanted = (*_REQUIRED, *(name for name in _THIRD if _has(listed, name)))
    missing = [name for name in wanted if not (folder / name).is_dir()]
    if missing:
        raise InputError(f"the model folder {str(folder)!r} lacks {', '.join(map(repr, missing))}; {_REMEDY}")
