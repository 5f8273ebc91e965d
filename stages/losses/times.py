"""Times and noise for losses on final latents, from identity."""

from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.losses import LogitNormalTimes, ScheduleTimes, TrainTimes, UniformTimes


def draw(config: TrainTimes, shape: tuple[int, ...], seeds: Sequence[int], sigmas: Tensor) -> tuple[Tensor, Tensor]:
    """Times (batch,) in (0, 1) and noise (batch, *shape), float32 on the CPU, a generator for each seed.

    `sigmas` (steps + 1,) are those of the scheduler with ScheduleTimes.steps steps; other kinds do not read them.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    times = torch.stack([_time(config, generator, sigmas) for generator in generators])
    return times, torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def _time(config: TrainTimes, generator: torch.Generator, sigmas: Tensor) -> Tensor:
    match config:
        case UniformTimes():
            low, high = config.range
            return low + (high - low) * torch.rand((), generator=generator)
        case LogitNormalTimes():
            return torch.sigmoid(config.mean + config.std * torch.randn((), generator=generator))
        case ScheduleTimes():
            if len(sigmas) != config.steps + 1:
                raise ValueError(f"wanted the sigmas of {config.steps} steps, got {len(sigmas) - 1}")
            return sigmas[int(torch.randint(config.steps, (), generator=generator))]
