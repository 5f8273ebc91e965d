"""Pictures from the policy, with the trajectories that led to them.

Work is cut by identity, never by rank: a micro-batch is samples of one prompt, a shard is whole micro-batches, and a
shard that is there is not drawn again.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from schemas.artifacts import SamplesTable, TrajectoryTable
from schemas.contracts import SampleConfig, SampleInputs, SampleOutputs
from schemas.errors import NonFinite
from schemas.sampling import FlowSdeSampler
from schemas.tables import samples_schema, trajectory_schema
from stages.context import StageContext
from stages.engine.embeddings import NEGATIVE, Embeddings
from stages.engine.mesh import barrier, first_of, total
from stages.engine.policy import Engine, resident
from stages.models import NoiseSchedule
from stages.sde.loop import Rollout, denoise
from stages.sde.noise import initial_seed, normal, step_seed
from stages.store import files, images, tables

_DTYPES = {"float32": torch.float32, "float16": torch.float16}
_CUT = "micro_batches.json"  # beside the launcher's own mark, for a stage that runs alone


class MicroBatch(NamedTuple):
    """Samples of one prompt that share their model calls; `number` counts over the whole stage."""

    number: int
    prompt_id: str
    prompt: str
    metadata: str
    indices: tuple[int, ...]

    @property
    def sample_ids(self) -> list[str]:
        """One a sample."""
        return [f"{self.prompt_id}/{index}" for index in self.indices]


class Drawn(NamedTuple):
    """A micro-batch's latents and pictures (batch, height, width, 3) uint8."""

    batch: MicroBatch
    rollout: Rollout
    pictures: np.ndarray


@dataclass(frozen=True)
class Drawing:
    """What all micro-batches of the stage share. `window` are the stochastic steps."""

    config: SampleConfig
    ctx: StageContext
    engine: Engine
    embeddings: Embeddings
    schedule: NoiseSchedule
    window: tuple[int, ...]
    epoch: int | str

    @property
    def storage(self) -> Literal["float32", "float16"]:
        """Dtype of stored states."""
        return self.config.sampler.states if isinstance(self.config.sampler, FlowSdeSampler) else "float32"


class Writers(NamedTuple):
    """The two tables."""

    samples: tables.TableWriter
    trajectory: tables.TableWriter


def run(config: SampleConfig, inputs: SampleInputs, ctx: StageContext) -> SampleOutputs:
    """Draws `per_prompt` samples for each prompt from the policy's chosen weights."""
    with ctx.timed("load"):
        engine = resident(ctx, config.model, inputs.pipeline)
        engine.load(inputs.policy)
    work = engine.work(ctx)
    drawing = _drawing(config, inputs, ctx, engine)
    batches = micro_batches(config, inputs, ctx.micro_batch)
    drawing.embeddings.require([batch.prompt_id for batch in batches] + [NEGATIVE] * config.sampler.guided)
    size = ctx.resources.shard_micro_batches
    shards = [batches[i : i + size] for i in range(0, len(batches), size)]
    _drop_other_cut(ctx)
    writers = _writers(drawing)
    with engine.weights.using(engine.choose(config.weights)), torch.no_grad():
        missing = _missing(writers, len(shards))
        _draw_shards(drawing, writers, shards, missing)
    with ctx.timed("wait"):
        barrier()
    work.close(sum(len(batch.indices) for index in missing for batch in shards[index]))
    return _outputs(drawing, inputs, writers, len(shards), len(batches))


def micro_batches(config: SampleConfig, inputs: SampleInputs, size: int) -> list[MicroBatch]:
    """All work of the stage: prompts in the table's order, at most `size` samples each."""
    table = tables.read(inputs.prompts)
    out: list[MicroBatch] = []
    for row in table.to_pylist():
        for first in range(0, config.per_prompt, size):
            indices = tuple(range(first, min(first + size, config.per_prompt)))
            out.append(MicroBatch(len(out), row["prompt_id"], row["prompt"], row["metadata"], indices))
    return out


def _drawing(config: SampleConfig, inputs: SampleInputs, ctx: StageContext, engine: Engine) -> Drawing:
    # With fixed noise nothing at all may depend on the iteration.
    sampler, iteration = config.sampler, 0 if config.fixed_noise else ctx.iteration or 0
    window = sampler.window.steps(sampler.steps, ctx.seed, iteration) if isinstance(sampler, FlowSdeSampler) else ()
    embeddings = Embeddings(inputs.conditioning, engine.device)
    epoch = "fixed" if config.fixed_noise else iteration
    return Drawing(config, ctx, engine, embeddings, engine.adapter.schedule(sampler.steps), window, epoch)


def _drop_other_cut(ctx: StageContext) -> None:
    """Shards that a stopped run left are kept only if they were cut in the same way."""
    cut = {"micro_batch": ctx.micro_batch, "shard_micro_batches": ctx.resources.shard_micro_batches}
    path = Path(ctx.directory) / _CUT
    if ctx.rank == 0 and not (path.is_file() and path.read_text() == json.dumps(cut)):
        for name in Writers._fields:
            shutil.rmtree(Path(ctx.directory) / name, ignore_errors=True)
        with files.written(path) as temporary:
            temporary.write_text(json.dumps(cut))
    barrier()


def _writers(drawing: Drawing) -> Writers:
    shape, directory = drawing.engine.adapter.latent_shape(), drawing.ctx.directory
    schemas = (samples_schema(), trajectory_schema(shape, len(drawing.window), drawing.storage))
    return Writers(*(tables.TableWriter(directory, *named) for named in zip(Writers._fields, schemas, strict=True)))


def _missing(writers: Writers, num_shards: int) -> list[int]:
    """Shards that are not there on any one rank's view of the disk; no rank writes before all have looked."""
    finished = set.intersection(*(writer.finished() for writer in writers))
    lost = total(torch.tensor([float(index not in finished) for index in range(num_shards)]))
    return lost.nonzero().flatten().tolist()


def _draw_shards(drawing: Drawing, writers: Writers, shards: list[list[MicroBatch]], missing: list[int]) -> None:
    ctx = drawing.ctx
    turns, done = _turns(missing, ctx), 0
    num_batches = sum(len(shards[index]) for index, counts in turns if counts)
    for turn, (index, counts) in enumerate(turns):
        # All ranks make as many calls as the longest shard of this turn; what is drawn over and above is dropped.
        longest = max(len(shards[k]) for k in missing[turn * ctx.world_size : (turn + 1) * ctx.world_size])
        drawn = []
        for place in range(longest):
            counted = counts and place < len(shards[index])
            with drawing.engine.flops.counted(counted):
                drawn.append(_draw(drawing, shards[index][place if place < len(shards[index]) else 0]))
            done += counted
            ctx.progress(done, num_batches, "micro-batches")
        if counts:
            with ctx.timed("write"):
                _write(drawing, writers, index, drawn[: len(shards[index])])


def _turns(missing: list[int], ctx: StageContext) -> list[tuple[int, bool]]:
    """This rank's shards; a short rank repeats one and drops it, so that all make equally many model calls."""
    turns = -(-len(missing) // ctx.world_size)
    mine = [(index, True) for index in missing[ctx.rank :: ctx.world_size]]
    return mine if len(mine) == turns else [*mine, (missing[0], False)]


def _draw(drawing: Drawing, batch: MicroBatch) -> Drawn:
    """One micro-batch. A rank whose numbers are not finite still makes all its model calls; then all ranks stop."""
    engine, sampler, num_calls, drawn, problem = drawing.engine, drawing.config.sampler, 0, None, ""
    shape = engine.adapter.latent_shape()
    given = drawing.embeddings.of([batch.prompt_id] * len(batch.indices), sampler.guided)

    def velocity(latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return engine.velocity(latents, timesteps, given, sampler.guidance_scale)

    def step_noise(step: int) -> torch.Tensor:
        seeds = [step_seed(drawing.ctx.seed, drawing.epoch, batch.prompt_id, i, step) for i in batch.indices]
        return normal(shape, seeds).to(engine.device)

    noise = normal(shape, _seeds(drawing, batch)).to(engine.device)
    try:
        with drawing.ctx.timed("denoise"):
            rollout = denoise(
                velocity, sampler, drawing.schedule, noise, step_noise, drawing.window, _DTYPES[drawing.storage]
            )
        with drawing.ctx.timed("decode"):
            drawn = Drawn(batch, rollout, images.to_uint8(engine.adapter.decode(rollout.latents, engine.device)))
    except NonFinite as error:
        who = f"samples {batch.sample_ids} of prompt {batch.prompt!r}"
        problem = f"{drawing.ctx.place}: {error}; the batch was {who}"
        for timestep in drawing.schedule.timesteps[num_calls:]:
            velocity(noise, timestep.to(noise.device).expand(len(noise)))
    problem = first_of(problem)
    if drawn is None or problem:
        raise NonFinite(problem)
    return drawn


def _seeds(drawing: Drawing, batch: MicroBatch) -> list[int]:
    shared = drawing.config.sampler.shared_noise
    return [initial_seed(drawing.ctx.seed, drawing.epoch, batch.prompt_id, i, shared) for i in batch.indices]


def _write(drawing: Drawing, writers: Writers, index: int, drawn: list[Drawn]) -> None:
    """One shard of both tables."""
    of_row = [one.batch for one in drawn for _ in one.batch.indices]
    keys = {
        "sample_id": [sample_id for one in drawn for sample_id in one.batch.sample_ids],
        "prompt_id": [batch.prompt_id for batch in of_row],
        "index": [index for one in drawn for index in one.batch.indices],
        "seed": [seed for one in drawn for seed in _seeds(drawing, one.batch)],
    }
    texts = {"prompt": [batch.prompt for batch in of_row], "metadata": [batch.metadata for batch in of_row]}
    pictures = [images.png(picture) for one in drawn for picture in one.pictures]
    writers.samples.write(index, {**keys, **texts, "image": pictures})
    columns = {
        "micro_batch": [batch.number for batch in of_row],
        "guidance_scale": [drawing.config.sampler.guidance_scale] * len(of_row),
        "latents": torch.cat([one.rollout.latents for one in drawn]).cpu().numpy(),
    }
    writers.trajectory.write(index, {**keys, **columns, **_steps(drawing, [one.rollout for one in drawn])})


def _steps(drawing: Drawing, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Columns of the stochastic steps, with the schedule they were taken on."""
    if not drawing.window:
        return {}
    states = torch.cat([r.states for r in rollouts if r.states is not None]).cpu().numpy()
    log_prob = torch.cat([r.log_prob for r in rollouts if r.log_prob is not None]).cpu().numpy()
    steps, (sigmas, timesteps) = list(drawing.window), drawing.schedule
    shared = {
        "step_index": np.array(steps, dtype=np.int32),
        "sigma": sigmas[steps].numpy(),
        "sigma_next": sigmas[[step + 1 for step in steps]].numpy(),
        "sigma_max": np.full(len(steps), float(sigmas[1]), dtype=np.float32),
        "timestep": timesteps[steps].numpy(),
    }
    rows = {name: np.tile(value, (len(states), 1)) for name, value in shared.items()}
    return {"states": states, "log_prob": log_prob, **rows}


def _outputs(
    drawing: Drawing, inputs: SampleInputs, writers: Writers, num_shards: int, num_batches: int
) -> SampleOutputs:
    sampler = drawing.config.sampler
    trajectory = writers.trajectory.ref(
        TrajectoryTable,
        num_shards,
        latent_shape=drawing.engine.adapter.latent_shape(),
        num_steps=len(drawing.window),
        sampler=sampler.model_dump(mode="json"),
        policy="" if inputs.policy is None else inputs.policy.digest,
        weights=drawing.config.weights,
    )
    samples = writers.samples.ref(SamplesTable, num_shards)
    metrics = {"samples": float(samples.rows), "model_calls": float(num_batches * sampler.steps)}
    return SampleOutputs(samples=samples, trajectory=trajectory, metrics=metrics)
