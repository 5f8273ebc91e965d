"""The two tables of a sample stage: pictures, and the trajectories that led to them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from stages.engine.mesh import total
from stages.models import NoiseSchedule
from stages.rollouts.batches import MicroBatch
from stages.sde.loop import Rollout
from stages.store import images, tables


class Drawn(NamedTuple):
    """A micro-batch's latents, the seeds of their first noise, and pictures (batch, height, width, 3) uint8."""

    batch: MicroBatch
    rollout: Rollout
    seeds: Sequence[int]
    pictures: np.ndarray


class Writers(NamedTuple):
    """The tables, by the names of their folders."""

    samples: tables.TableWriter
    trajectory: tables.TableWriter

    def missing(self, num_shards: int) -> list[int]:
        """Shards that are not there on any one rank's view of the disk; no rank writes before all have looked."""
        finished = set.intersection(*(writer.finished() for writer in self))
        lost = total(torch.tensor([float(index not in finished) for index in range(num_shards)]))
        return lost.nonzero().flatten().tolist()


class Taken(NamedTuple):
    """How all samples were drawn: the schedule, its stochastic steps, and the guidance."""

    schedule: NoiseSchedule
    window: tuple[int, ...]
    guidance_scale: float


def write(writers: Writers, index: int, drawn: Sequence[Drawn], taken: Taken) -> None:
    """One shard of both tables."""
    of_row = [one.batch for one in drawn for _ in one.batch.indices]
    keys = {
        "sample_id": [sample_id for one in drawn for sample_id in one.batch.sample_ids],
        "prompt_id": [batch.prompt_id for batch in of_row],
        "index": [index for one in drawn for index in one.batch.indices],
        "seed": [seed for one in drawn for seed in one.seeds],
    }
    texts = {"prompt": [batch.prompt for batch in of_row], "metadata": [batch.metadata for batch in of_row]}
    pictures = [images.png(picture) for one in drawn for picture in one.pictures]
    writers.samples.write(index, {**keys, **texts, "image": pictures})
    columns = {
        "micro_batch": [batch.number for batch in of_row],
        "guidance_scale": [taken.guidance_scale] * len(of_row),
        "latents": torch.cat([one.rollout.latents for one in drawn]).cpu().numpy(),
    }
    writers.trajectory.write(index, {**keys, **columns, **_steps(taken, [one.rollout for one in drawn])})


def _steps(taken: Taken, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Columns of the stochastic steps, with the schedule they were taken on."""
    if not taken.window:
        return {}
    states = torch.cat([r.states for r in rollouts if r.states is not None]).cpu().numpy()
    log_prob = torch.cat([r.log_prob for r in rollouts if r.log_prob is not None]).cpu().numpy()
    steps, (sigmas, timesteps) = list(taken.window), taken.schedule
    shared = {
        "step_index": np.array(steps, dtype=np.int32),
        "sigma": sigmas[steps].numpy(),
        "sigma_next": sigmas[[step + 1 for step in steps]].numpy(),
        "sigma_max": np.full(len(steps), float(sigmas[1]), dtype=np.float32),
        "timestep": timesteps[steps].numpy(),
    }
    rows = {name: np.tile(value, (len(states), 1)) for name, value in shared.items()}
    return {"states": states, "log_prob": log_prob, **rows}
