"""Noise from identity: every sample has a generator of its own, so ranks and batches cannot change it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.seeds import seed_of

Epoch = int | str  # the iteration, or "fixed" for evaluations


def initial_seed(seed: int, epoch: Epoch, prompt_id: str, index: int, shared: bool) -> int:
    """Seed of a sample's first latents; samples of a group share it when `shared`."""
    return seed_of(seed, epoch, prompt_id, "shared" if shared else index)


def step_seed(seed: int, epoch: Epoch, prompt_id: str, index: int, step: int) -> int:
    """Seed of the noise that a stochastic step adds."""
    return seed_of(seed, epoch, prompt_id, index, "step", step)


def normal(shape: tuple[int, ...], seeds: Sequence[int]) -> Tensor:
    """Standard normal noise (len(seeds), *shape), float32 on the CPU, a generator for each seed."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
