"""Fits the example's own autoencoder to rendered pictures."""

from collections.abc import Callable

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from numpy.typing import NDArray
from torch import Tensor

_BATCH = 32
_LEARNING_RATE = 2e-3
_WARM_UP = 50  # steps
_KL_WEIGHT = 1e-3  # per latent value, against the mean absolute error: keeps latents smooth enough to be generated
_REPORT_EVERY = 50  # steps

Progress = Callable[[int, int, str], None]


def fit_autoencoder(
    vae: AutoencoderKL, images: NDArray[np.uint8], steps: int, seed: int, progress: Progress
) -> dict[str, float]:
    """Fits `vae` in place to pictures (pictures, height, width, 3), then sets its scaling and shift factors.

    Afterwards the latents have mean 0 and standard deviation 1 over all values. Returns the last loss, the mean
    absolute error of round trips in units of the pixel range, and the two factors.
    """
    if steps < 1 or not len(images):
        raise ValueError(f"want at least one step and one picture, got {steps} steps and {len(images)} pictures")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        loss = _fit(vae, images, steps, progress)
    vae.requires_grad_(False).eval()
    return {"loss": loss, **_set_factors(vae, images)}


def to_signed(images: NDArray[np.uint8]) -> Tensor:
    """uint8 pictures (pictures, height, width, 3) as float32 (pictures, 3, height, width) in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def _fit(vae: AutoencoderKL, images: NDArray[np.uint8], steps: int, progress: Progress) -> float:
    vae.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_LEARNING_RATE, weight_decay=0.0, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    value = float("nan")
    for step in range(steps):
        batch = to_signed(images[torch.randint(len(images), (min(_BATCH, len(images)),)).numpy()])
        posterior = vae.encode(batch, return_dict=False)[0]
        decoded = _decoded(vae, posterior.sample())
        loss = (decoded - batch).abs().mean() + _KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        rate.step()
        value = float(loss.detach())
        if not np.isfinite(value):
            raise FloatingPointError(f"the autoencoder's loss is {value} at step {step}")
        if (step + 1) % _REPORT_EVERY == 0 or step + 1 == steps:
            progress(step + 1, steps, "steps")
    return value


def _decoded(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    return vae.decode(latents, return_dict=False)[0]  # pyright: ignore[reportArgumentType]  # any device's Tensor


def _rate(step: int, steps: int) -> float:
    """Factor on the learning rate: warm-up, then half a cosine down to a hundredth."""
    fall = 0.5 * (1.0 + np.cos(np.pi * step / steps))
    return min(1.0, (step + 1) / _WARM_UP) * float(0.01 + 0.99 * fall)


@torch.no_grad()
def _set_factors(vae: AutoencoderKL, images: NDArray[np.uint8]) -> dict[str, float]:
    means, errors = [], []
    for chunk in to_signed(images[:2048]).split(256):
        mean = vae.encode(chunk, return_dict=False)[0].mean
        errors.append((_decoded(vae, mean).clamp(-1, 1) - chunk).abs().mean((1, 2, 3)) / 2)
        means.append(mean)
    latents = torch.cat(means)
    shift, scaling = float(latents.mean()), 1.0 / float(latents.std())
    vae.register_to_config(shift_factor=shift, scaling_factor=scaling)
    return {"error": float(torch.cat(errors).mean()), "shift_factor": shift, "scaling_factor": scaling}
