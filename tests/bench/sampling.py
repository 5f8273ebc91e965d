"""The sampling stage against a bare loop, and FSDP2 against an unsharded module in that bare loop."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from schemas.contracts import SampleOutputs
from stages import sample
from stages.context import StageContext
from stages.engine.mesh import mesh
from stages.engine.shard import shard
from stages.store import images, tables
from tests.bench.bare import Batch, Sampler, transformer
from tests.bench.ground import ITERATION, Ground, ground
from tests.bench.measure import Row, Scale, compared, interleaved, medians, parts_of

_WRITTEN = "pictures decoded and Arrow shards written in both"


def rows(scale: Scale) -> Iterator[Row]:
    """The stage with the ODE of `shapes` and with the SDE of `shapes_grpo`."""
    for flow, name in (("shapes", "sample"), ("shapes_grpo", "sample_sde")):
        with ground(flow, scale.sets) as base:
            yield _stage(base, name, flow, scale)


def fsdp_rows(scale: Scale) -> Iterator[Row]:
    """The bare loop on a sharded module and on a plain one."""
    with ground("shapes", scale.sets) as base:
        loops = [bare(base, module) for module in (sharded(base), transformer(str(base.sampling.model.path)))]
        drawn: list[list[Batch]] = [[], []]

        def once(which: int) -> None:
            drawn[which] = loops[which].run(base.emptied("bare"))

        times = interleaved(lambda _: once(0), lambda _: once(1), scale.repetitions)
        for one, other in zip(*drawn, strict=True):
            assert one.latents is not None
            torch.testing.assert_close(one.latents, other.latents)
        what = f"bare sampling loop: FSDP2 on one rank / plain module (shapes, {_WRITTEN})"
        yield compared("fsdp_sample", what, 1.05, ("fsdp", "plain"), times, checked="latents")


def bare(base: Ground, module: nn.Module) -> Sampler:
    """The bare loop for the flow's own sampling."""
    config, resources = base.sampling, base.plan.resources
    chosen = tables.read(base.prompts).to_pylist()
    size = resources.micro_batch_of("sample", "sample")
    cut = (size, resources.shard_micro_batches)
    return Sampler(module, config, chosen, base.embeddings(), base.plan.seed, ITERATION, *cut)


def sharded(base: Ground) -> nn.Module:
    """The flow's transformer as the engine shards it."""
    module = transformer(str(base.sampling.model.path))
    shard(module, list(module.transformer_blocks.children()), mesh("cpu"), torch.float32, lambda name: nullcontext())
    return module


def _stage(base: Ground, name: str, flow: str, scale: Scale) -> Row:
    loop = bare(base, transformer(str(base.sampling.model.path)))
    told: list[StageContext] = []
    kept: dict[str, Any] = {}

    def stage(number: int) -> None:
        told.append(base.context("sample"))
        kept["out"] = sample.run(base.sampling, base.sample_inputs, told[-1])

    def plain(number: int) -> None:
        kept["drawn"] = loop.run(base.emptied("bare"))

    times = interleaved(stage, plain, scale.repetitions)
    _same(kept["out"], kept["drawn"], told[-1])
    parts = medians([parts_of(ctx) for ctx in told[1:]])
    what = f"sampling stage, warm / bare loop over the unsharded module ({flow}, {_WRITTEN})"
    return compared(
        name, what, 1.05, ("stage", "bare"), times, parts=parts, checked="latents, pictures, log-probs, row order"
    )


def _same(out: SampleOutputs, drawn: list[Batch], ctx: StageContext) -> None:
    """AssertionError unless both have drawn the same."""
    samples = tables.read(out.samples.under(ctx.directory))
    trajectory = tables.read(out.trajectory.under(ctx.directory))
    ids = [f"{batch.prompt_id}/{i}" for batch in drawn for i in batch.indices]
    assert samples.column("sample_id").to_pylist() == trajectory.column("sample_id").to_pylist() == ids
    latents = np.concatenate([batch.latents.numpy() for batch in drawn if batch.latents is not None])
    np.testing.assert_allclose(tables.tensors(trajectory, "latents"), latents, rtol=1e-4, atol=1e-4)
    pictures = np.concatenate([batch.pixels for batch in drawn if batch.pixels is not None]).astype(int)
    got = np.stack([images.pixels(value) for value in samples.column("image").to_pylist()]).astype(int)
    assert np.abs(got - pictures).max() <= 1
    if out.trajectory.num_steps:
        log_probs = np.concatenate([batch.log_prob.numpy() for batch in drawn if batch.log_prob is not None])
        np.testing.assert_allclose(tables.tensors(trajectory, "log_prob"), log_probs, rtol=1e-4, atol=1e-4)
