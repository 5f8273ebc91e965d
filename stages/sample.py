"""Pictures from the policy, with the trajectories that led to them.

Work is cut by identity, never by rank: a micro-batch is samples of one prompt, a shard is whole micro-batches, and a
shard that is there is not drawn again. Shards are written behind the next model calls, and pictures decoded there too
where the model has a device of its own; on the CPU both would share the same cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from schemas.artifacts import SamplesTable, TrajectoryTable
from schemas.contracts import SampleConfig, SampleInputs, SampleOutputs
from schemas.errors import NonFinite
from schemas.sampling import StochasticSampler
from schemas.tables import samples_schema, trajectory_schema
from stages.behind import Behind
from stages.context import StageContext
from stages.engine.embeddings import NEGATIVE, Embeddings
from stages.engine.mesh import barrier, first_of
from stages.engine.policy import Engine, resident
from stages.models import NoiseSchedule
from stages.rollouts.batches import MicroBatch, Turn, drop_other_cut, micro_batches, turns
from stages.rollouts.shards import Drawn, Taken, Writers, write
from stages.sde.loop import Rollout, denoise
from stages.sde.noise import initial_seed, normal, step_seed
from stages.store import images, tables

_AHEAD = 4  # micro-batches whose pictures may wait to be decoded
_DTYPES = {"float32": torch.float32, "float16": torch.float16}


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
        return self.config.sampler.states if isinstance(self.config.sampler, StochasticSampler) else "float32"

    @property
    def taken(self) -> Taken:
        """How the samples are drawn, for the tables."""
        return Taken(self.schedule, self.window, self.config.sampler.guidance_scale)

    def seeds(self, batch: MicroBatch) -> list[int]:
        """Of each sample's first noise."""
        shared = self.config.sampler.shared_noise
        return [initial_seed(self.ctx.seed, self.epoch, batch.prompt_id, i, shared) for i in batch.indices]


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
    drop_other_cut(ctx, Writers._fields)
    writers = _writers(drawing)
    with engine.weights.using(engine.choose(config.weights)), torch.no_grad():
        missing = writers.missing(len(shards))
        _draw_shards(drawing, writers, shards, turns(missing, shards, ctx))
    if "autoencoder" in ctx.resources.offload:
        engine.adapter.rest()
    with ctx.timed("idle"):
        barrier()
    work.close(sum(len(batch.indices) for index in missing for batch in shards[index]))
    return _outputs(drawing, inputs, writers, len(shards), len(batches))


def _drawing(config: SampleConfig, inputs: SampleInputs, ctx: StageContext, engine: Engine) -> Drawing:
    # With fixed noise nothing at all may depend on the iteration.
    sampler, iteration = config.sampler, 0 if config.fixed_noise else ctx.iteration or 0
    window = sampler.window.steps(sampler.steps, ctx.seed, iteration) if isinstance(sampler, StochasticSampler) else ()
    embeddings = Embeddings(inputs.conditioning, engine.device)
    epoch = "fixed" if config.fixed_noise else iteration
    return Drawing(config, ctx, engine, embeddings, engine.adapter.schedule(sampler.steps), window, epoch)


def _writers(drawing: Drawing) -> Writers:
    shape, directory = drawing.engine.adapter.latent_shape(), drawing.ctx.directory
    schemas = (samples_schema(), trajectory_schema(shape, len(drawing.window), drawing.storage))
    return Writers(*(tables.TableWriter(directory, *named) for named in zip(Writers._fields, schemas, strict=True)))


def _draw_shards(
    drawing: Drawing, writers: Writers, shards: Sequence[Sequence[MicroBatch]], mine: Sequence[Turn]
) -> None:
    ctx, done = drawing.ctx, 0
    num_batches = sum(len(shards[turn.shard]) for turn in mine if turn.counts)
    with Behind(ctx, _AHEAD) as behind:
        for turn in mine:
            shard, drawn = shards[turn.shard], []
            for place in range(turn.calls):
                counts = turn.counts and place < len(shard)
                batch = shard[place] if place < len(shard) else shard[0]
                with drawing.engine.flops.counted(counts):
                    rollout = _rollout(drawing, batch)
                if counts:
                    decode = partial(_decode, drawing, batch, rollout, drawn)
                    if drawing.engine.device.type == "cpu":
                        decode()
                    else:
                        behind.put(decode)
                done += counts
                ctx.progress(done, num_batches, "micro-batches")
            if turn.counts:
                behind.put(partial(_write, drawing, writers, turn.shard, drawn))


def _rollout(drawing: Drawing, batch: MicroBatch) -> Rollout:
    """One micro-batch. A rank whose numbers are not finite still makes all its model calls; then all ranks stop."""
    engine, sampler, num_calls, rollout, problem = drawing.engine, drawing.config.sampler, 0, None, ""
    shape = engine.adapter.latent_shape()
    with drawing.ctx.timed("data"):
        given = drawing.embeddings.of([batch.prompt_id] * len(batch.indices), sampler.guided)
        alone = drawing.embeddings.of([batch.prompt_id], sampler.guided)
        noise = normal(shape, drawing.seeds(batch)).to(engine.device)

    def velocity(latents: Tensor, timesteps: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        shared = given if len(latents) == len(noise) else alone
        return engine.velocity(latents, timesteps, shared, sampler.guidance_scale)

    def step_noise(step: int) -> Tensor:
        seeds = [step_seed(drawing.ctx.seed, drawing.epoch, batch.prompt_id, i, step) for i in batch.indices]
        return normal(shape, seeds).to(engine.device)

    try:
        with drawing.ctx.timed("denoise"):
            rollout = denoise(
                velocity, sampler, drawing.schedule, noise, step_noise, drawing.window, _DTYPES[drawing.storage]
            )
    except NonFinite as error:
        who = f"samples {batch.sample_ids} of prompt {batch.prompt!r}"
        problem = f"{drawing.ctx.place}: {error}; the batch was {who}"
        for timestep in drawing.schedule.timesteps[num_calls:]:
            velocity(noise, timestep.to(noise.device).expand(len(noise)))
    with drawing.ctx.timed("idle"):
        problem = first_of(problem)
    if rollout is None or problem:
        raise NonFinite(problem)
    return rollout


def _decode(drawing: Drawing, batch: MicroBatch, rollout: Rollout, drawn: list[Drawn]) -> None:
    """Adds a micro-batch with its pictures, as many decoded at once as the resources say."""
    engine = drawing.engine
    size = drawing.ctx.resources.decode_batch or len(rollout.latents)
    with drawing.ctx.timed("decode"):
        parts = [engine.adapter.decode(part, engine.device) for part in rollout.latents.split(size)]
        drawn.append(Drawn(batch, rollout, drawing.seeds(batch), images.to_uint8(torch.cat(parts))))


def _write(drawing: Drawing, writers: Writers, index: int, drawn: Sequence[Drawn]) -> None:
    with drawing.ctx.timed("write"):
        write(writers, index, drawn, drawing.taken)


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
