"""Pictures from the policy, with the trajectories that led to them.

Work is cut by identity, never by rank: a micro-batch is samples of one prompt, a shard is whole micro-batches, and a
shard that is there is not drawn again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from schemas.artifacts import SamplesTable, TrajectoryTable
from schemas.contracts import SampleConfig, SampleInputs, SampleOutputs
from schemas.errors import NonFinite
from schemas.sampling import FlowSdeSampler
from schemas.tables import samples_schema, trajectory_schema
from stages.context import StageContext
from stages.engine.embeddings import Embeddings
from stages.engine.mesh import barrier
from stages.engine.policy import Engine, resident
from stages.models import NoiseSchedule
from stages.sde.loop import Rollout, denoise
from stages.sde.noise import initial_seed, normal, step_seed
from stages.store import images, tables

_DTYPES = {"float32": torch.float32, "float16": torch.float16}


class MicroBatch(NamedTuple):
    """Samples of one prompt that share their model calls; `number` counts over the whole stage."""

    number: int
    prompt_id: str
    prompt: str
    metadata: str
    indices: tuple[int, ...]


class Plan(NamedTuple):
    """What all micro-batches of the stage share. `window` are the stochastic steps."""

    schedule: NoiseSchedule
    window: tuple[int, ...]
    epoch: int | str


def run(config: SampleConfig, inputs: SampleInputs, ctx: StageContext) -> SampleOutputs:
    """Draws `per_prompt` samples for each prompt from the policy's chosen weights."""
    engine = resident(ctx, config.model, inputs.pipeline)
    engine.load(inputs.policy)
    batches = micro_batches(config, inputs, ctx.micro_batch)
    size = ctx.resources.shard_micro_batches
    shards = [batches[i : i + size] for i in range(0, len(batches), size)]
    plan = _plan(config, engine, ctx)
    states = config.sampler.states if isinstance(config.sampler, FlowSdeSampler) else "float32"
    schema = trajectory_schema(engine.adapter.latent_shape(), len(plan.window), states)
    writers = (
        tables.TableWriter(ctx.directory, "samples", samples_schema()),
        tables.TableWriter(ctx.directory, "trajectory", schema),
    )
    missing = _missing(writers, len(shards))
    embeddings = Embeddings(inputs.conditioning, engine.device)
    chosen = engine.choose(config.weights)
    turns, done = _turns(missing, ctx), 0
    total = sum(len(shards[index]) for index, counts in turns if counts)
    with engine.weights.using(chosen), torch.no_grad():
        for index, counts in turns:
            drawn = []
            for batch in _padded(shards[index], size):
                drawn.append(_draw(batch, config, plan, engine, embeddings, ctx))
                done += counts
                ctx.progress(min(done, total), total, "micro-batches")
            if counts:
                _write(writers, index, shards[index], drawn, config, plan, engine, ctx)
    barrier()
    return _outputs(config, inputs, writers, len(shards), engine, plan, len(batches))


def micro_batches(config: SampleConfig, inputs: SampleInputs, size: int) -> list[MicroBatch]:
    """All work of the stage: prompts in the table's order, at most `size` samples each."""
    table = tables.read(inputs.prompts)
    out: list[MicroBatch] = []
    for row in table.to_pylist():
        for first in range(0, config.per_prompt, size):
            indices = tuple(range(first, min(first + size, config.per_prompt)))
            out.append(MicroBatch(len(out), row["prompt_id"], row["prompt"], row["metadata"], indices))
    return out


def _plan(config: SampleConfig, engine: Engine, ctx: StageContext) -> Plan:
    sampler, iteration = config.sampler, ctx.iteration or 0
    window = sampler.window.steps(sampler.steps, ctx.seed, iteration) if isinstance(sampler, FlowSdeSampler) else ()
    return Plan(engine.adapter.schedule(sampler.steps), window, "fixed" if config.fixed_noise else iteration)


def _missing(writers: Sequence[tables.TableWriter], num_shards: int) -> list[int]:
    # Every rank looks before any rank writes, so that all see the same.
    finished = set.intersection(*(writer.finished() for writer in writers))
    barrier()
    return [index for index in range(num_shards) if index not in finished]


def _turns(missing: list[int], ctx: StageContext) -> list[tuple[int, bool]]:
    """This rank's shards; short ranks repeat one and drop it, so that all make equally many model calls."""
    turns = -(-len(missing) // ctx.world_size)
    mine = [(index, True) for index in missing[ctx.rank :: ctx.world_size]]
    return mine + [(missing[0], False)] * (turns - len(mine))


def _padded(batches: list[MicroBatch], size: int) -> list[MicroBatch]:
    # The last shard may be short; other ranks make the calls of a whole one beside it.
    return batches + [batches[0]] * (size - len(batches)) if dist.get_world_size() > 1 else batches


def _draw(
    batch: MicroBatch, config: SampleConfig, plan: Plan, engine: Engine, embeddings: Embeddings, ctx: StageContext
) -> Rollout:
    sampler, shape = config.sampler, engine.adapter.latent_shape()
    given = embeddings.of([batch.prompt_id] * len(batch.indices), sampler.guided)

    def step_noise(step: int) -> torch.Tensor:
        seeds = [step_seed(ctx.seed, plan.epoch, batch.prompt_id, index, step) for index in batch.indices]
        return normal(shape, seeds).to(engine.device)

    storage = _DTYPES[sampler.states] if isinstance(sampler, FlowSdeSampler) else torch.float32
    try:
        return denoise(
            lambda latents, timesteps: engine.velocity(latents, timesteps, given, sampler.guidance_scale),
            sampler,
            plan.schedule,
            normal(shape, _seeds(batch, config, plan, ctx)).to(engine.device),
            step_noise,
            plan.window,
            storage,
        )
    except NonFinite as error:
        names = [f"{batch.prompt_id}/{index}" for index in batch.indices]
        raise NonFinite(f"{ctx.place}: {error}, which are samples {names} of prompt {batch.prompt!r}") from error


def _seeds(batch: MicroBatch, config: SampleConfig, plan: Plan, ctx: StageContext) -> list[int]:
    shared = config.sampler.shared_noise
    return [initial_seed(ctx.seed, plan.epoch, batch.prompt_id, index, shared) for index in batch.indices]


def _write(
    writers: Sequence[tables.TableWriter],
    index: int,
    batches: list[MicroBatch],
    drawn: list[Rollout],
    config: SampleConfig,
    plan: Plan,
    engine: Engine,
    ctx: StageContext,
) -> None:
    """One shard of both tables; the micro-batches are decoded one by one, which bounds the decoder's memory."""
    rollouts = drawn[: len(batches)]
    pictures = [images.to_uint8(engine.adapter.decode(r.latents, engine.device).numpy()) for r in rollouts]
    repeated = [(batch, index) for batch in batches for index in batch.indices]
    keys = {
        "sample_id": [f"{batch.prompt_id}/{index}" for batch, index in repeated],
        "prompt_id": [batch.prompt_id for batch, _ in repeated],
        "index": [index for _, index in repeated],
        "seed": [seed for batch in batches for seed in _seeds(batch, config, plan, ctx)],
    }
    texts = {"prompt": [b.prompt for b, _ in repeated], "metadata": [b.metadata for b, _ in repeated]}
    pngs = [images.png(picture) for group in pictures for picture in group]
    writers[0].write(index, {**keys, **texts, "image": pngs})
    columns = {
        **keys,
        "micro_batch": [batch.number for batch, _ in repeated],
        "guidance_scale": [config.sampler.guidance_scale] * len(repeated),
        "latents": torch.cat([r.latents for r in rollouts]).cpu().numpy(),
    }
    writers[1].write(index, {**columns, **_steps(rollouts, plan)})


def _steps(rollouts: list[Rollout], plan: Plan) -> dict[str, np.ndarray]:
    """Columns of the stochastic steps, with the schedule they were taken on."""
    if not plan.window:
        return {}
    states = torch.cat([r.states for r in rollouts if r.states is not None]).cpu().numpy()
    log_prob = torch.cat([r.log_prob for r in rollouts if r.log_prob is not None]).cpu().numpy()
    steps, (sigmas, timesteps) = list(plan.window), plan.schedule
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
    config: SampleConfig,
    inputs: SampleInputs,
    writers: Sequence[tables.TableWriter],
    num_shards: int,
    engine: Engine,
    plan: Plan,
    num_batches: int,
) -> SampleOutputs:
    samples = writers[0].ref(SamplesTable, num_shards)
    trajectory = writers[1].ref(
        TrajectoryTable,
        num_shards,
        latent_shape=engine.adapter.latent_shape(),
        num_steps=len(plan.window),
        sampler=config.sampler.model_dump(mode="json"),
        policy="" if inputs.policy is None else inputs.policy.digest,
        weights=config.weights,
    )
    calls = num_batches * config.sampler.steps * (2 if config.sampler.guided else 1)
    return SampleOutputs(
        samples=samples,
        trajectory=trajectory,
        metrics={"samples": float(samples.rows), "model_calls": float(calls)},
    )
