"""The bare loops: diffusers modules, torch, pyarrow and PIL in the most direct form; nothing of `stages` but seeds.

What a careful person writes in one script: embeddings and samples stay in memory, no digest, no fsync, no record.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor, nn

from schemas.contracts import SampleConfig
from schemas.sampling import FlowSdeSampler
from schemas.seeds import seed_of
from schemas.tables import samples_schema, trajectory_schema

Embedded = dict[str, tuple[Tensor, Tensor]]


def transformer(source: str) -> SD3Transformer2DModel:
    """Unsharded, float32, no gradient."""
    return SD3Transformer2DModel.from_pretrained(source, subfolder="transformer").float().requires_grad_(False).eval()


def velocity(module: nn.Module, latents: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
    """One call of the model; times (batch,) in 0..1000."""
    return module(
        hidden_states=latents,
        timestep=times,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0]


@dataclass
class Batch:
    """Samples of one prompt."""

    prompt_id: str
    prompt: str
    metadata: str
    indices: range
    latents: Tensor | None = None
    states: Tensor | None = None
    log_prob: Tensor | None = None
    pixels: np.ndarray | None = None


@dataclass
class Sampler:
    """A loop over prompts, micro-batches and steps that writes the two tables of samples."""

    module: nn.Module
    config: SampleConfig
    prompts: Sequence[dict[str, str]]
    embedded: Embedded
    seed: int
    iteration: int
    micro_batch: int
    shard_micro_batches: int

    def __post_init__(self) -> None:
        source = str(self.config.model.path)
        self.vae = AutoencoderKL.from_pretrained(source, subfolder="vae").float().requires_grad_(False).eval()
        self.scheduler: Any = FlowMatchEulerDiscreteScheduler.from_pretrained(source, subfolder="scheduler")
        facts: Any = self.module.config
        self.shape = (facts["in_channels"], facts["sample_size"], facts["sample_size"])
        sampler = self.config.sampler
        self.window: tuple[int, ...] = ()
        if isinstance(sampler, FlowSdeSampler):
            self.window = sampler.window.steps(sampler.steps, self.seed, self.iteration)

    def run(self, folder: Path) -> list[Batch]:
        """All samples; shards go to `folder`, which is empty."""
        drawn: list[Batch] = []
        with torch.no_grad():
            for row in self.prompts:
                for first in range(0, self.config.per_prompt, self.micro_batch):
                    indices = range(first, min(first + self.micro_batch, self.config.per_prompt))
                    batch = Batch(row["prompt_id"], row["prompt"], row["metadata"], indices)
                    self._denoise(batch)
                    assert batch.latents is not None
                    batch.pixels = self._decoded(batch.latents)
                    drawn.append(batch)
        size = self.shard_micro_batches
        for shard in range(0, len(drawn), size):
            self._write(folder, shard, drawn[shard : shard + size])
        return drawn

    def _denoise(self, batch: Batch) -> None:
        self.scheduler.set_timesteps(self.config.sampler.steps)
        sigmas, times = self.scheduler.sigmas, self.scheduler.timesteps
        embeds, pooled = (part.expand(len(batch.indices), *part.shape) for part in self.embedded[batch.prompt_id])
        latents = self._noise([self._seed(batch, index) for index in batch.indices])
        states, log_probs = [latents] if 0 in self.window else [], []
        for step, time in enumerate(times):
            predicted = velocity(self.module, latents, time.expand(len(latents)), embeds, pooled)
            if step in self.window:
                states = states or [latents]
                noise = self._noise(
                    [seed_of(self.seed, self.iteration, batch.prompt_id, i, "step", step) for i in batch.indices]
                )
                latents, log_prob = self._stochastic(latents, predicted, noise, sigmas, step)
                states.append(latents)
                log_probs.append(log_prob)
            else:
                latents = latents + predicted * (sigmas[step + 1] - sigmas[step])
        batch.latents = latents
        if states:
            batch.states, batch.log_prob = torch.stack(states, 1), torch.stack(log_probs, 1)

    def _stochastic(
        self, latents: Tensor, predicted: Tensor, noise: Tensor, sigmas: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Flow-GRPO's step, from its paper."""
        assert isinstance(self.config.sampler, FlowSdeSampler)
        sigma, dt = sigmas[step], sigmas[step + 1] - sigmas[step]
        g = self.config.sampler.eta * torch.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
        mean = latents + (predicted + g**2 / (2 * sigma) * (latents + (1 - sigma) * predicted)) * dt
        std = g * torch.sqrt(-dt)
        after = mean + std * noise
        log_prob = -((after - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(2 * math.pi) / 2
        return after, log_prob.flatten(1).mean(1)

    def _seed(self, batch: Batch, index: int) -> int:
        shared = self.config.sampler.shared_noise
        return seed_of(self.seed, self.iteration, batch.prompt_id, "shared" if shared else index)

    def _noise(self, seeds: Sequence[int]) -> Tensor:
        return torch.stack([torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])

    def _decoded(self, latents: Tensor) -> np.ndarray:
        facts: Any = self.vae.config
        pictures = self.vae.decode(latents / facts["scaling_factor"] + facts["shift_factor"], return_dict=False)[0]
        return ((pictures * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()

    def _write(self, folder: Path, shard: int, drawn: list[Batch]) -> None:
        keys = {
            "sample_id": [f"{batch.prompt_id}/{i}" for batch in drawn for i in batch.indices],
            "prompt_id": [batch.prompt_id for batch in drawn for _ in batch.indices],
            "index": [i for batch in drawn for i in batch.indices],
            "seed": [self._seed(batch, i) for batch in drawn for i in batch.indices],
        }
        texts = {name: [getattr(b, name) for b in drawn for _ in b.indices] for name in ("prompt", "metadata")}
        pictures = [_png(one) for batch in drawn if batch.pixels is not None for one in batch.pixels]
        _stream(folder / f"samples-{shard}.arrow", samples_schema(), {**keys, **texts, "image": pictures})
        numbers = [shard + place for place, batch in enumerate(drawn) for _ in batch.indices]
        columns = {
            "micro_batch": numbers,
            "guidance_scale": [self.config.sampler.guidance_scale] * len(numbers),
            "latents": torch.cat([batch.latents for batch in drawn if batch.latents is not None]),
        }
        schema = trajectory_schema(self.shape, len(self.window))
        _stream(folder / f"trajectory-{shard}.arrow", schema, {**keys, **columns, **self._steps(drawn)})

    def _steps(self, drawn: list[Batch]) -> dict[str, Tensor]:
        if not self.window:
            return {}
        steps, sigmas = list(self.window), self.scheduler.sigmas
        states = torch.cat([batch.states for batch in drawn if batch.states is not None])
        shared = {
            "step_index": torch.tensor(steps, dtype=torch.int32),
            "sigma": sigmas[steps],
            "sigma_next": sigmas[[step + 1 for step in steps]],
            "sigma_max": sigmas[1].expand(len(steps)),
            "timestep": self.scheduler.timesteps[steps],
        }
        log_prob = torch.cat([batch.log_prob for batch in drawn if batch.log_prob is not None])
        return {"states": states, "log_prob": log_prob, **{n: v.expand(len(states), -1) for n, v in shared.items()}}


def _png(pixels: np.ndarray) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}


def _stream(path: Path, schema: pa.Schema, columns: dict[str, Any]) -> None:
    table = pa.table([_array(field, columns[field.name]) for field in schema], schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(table)


def _array(field: pa.Field, values: Any) -> pa.Array:
    if isinstance(values, Tensor):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.contiguous().numpy().reshape(-1)), type=field.type)
    return pa.array(values, field.type)
