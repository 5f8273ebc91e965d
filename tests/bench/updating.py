"""The update stage against a plain loop on the same sharded module, FSDP2 against a plain module, and skipping."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from schemas.artifacts import PolicyRef, TrajectoryTable
from schemas.contracts import UpdateInputs, UpdateOutputs
from schemas.losses import GrpoLoss
from stages import update
from stages.context import StageContext
from stages.engine.policy import resident
from stages.engine.sharded import whole
from stages.objectives import objective
from stages.store import tables
from tests.bench.bare import transformer
from tests.bench.ground import ITERATION, Ground, ground
from tests.bench.measure import Row, Scale, compared, interleaved, medians, parts_of
from tests.bench.sampling import sharded
from tests.bench.training import Data, Parts, Trainer, distance, eta_of, second

_SAVED = "weights and optimizer saved in both"


def rows(scale: Scale) -> Iterator[Row]:
    """The stage with DiffusionNFT (`shapes`) and with Flow-GRPO (`shapes_grpo`)."""
    for flow, name in (("shapes", "update"), ("shapes_grpo", "update_grpo")):
        with ground(flow, scale.sets) as base:
            yield _stage(base, name, flow, scale)


def fsdp_rows(scale: Scale) -> Iterator[Row]:
    """The bare loop on a sharded module and on a plain one."""
    with ground("shapes", scale.sets) as base:
        inputs = base.update_inputs(base.trajectory())
        data, parts = bare_data(base, inputs), bare_parts(base, inputs)
        source = str(base.updating.model.path)
        plain = transformer(source)
        trainers = [_trainer(base, sharded(base), sharded(base)), _trainer(base, plain, second(plain))]

        def once(which: int) -> None:
            trainers[which].run(data, parts, None)

        times = interleaved(lambda _: once(0), lambda _: once(1), scale.repetitions)
        off = distance(trainers[0].leaves, trainers[1].leaves)
        assert off < 1e-4, f"weights differ by {off}"
        what = "bare update loop: FSDP2 on one rank / plain module (shapes, nothing saved)"
        sides = ("fsdp", "plain")
        yield compared("fsdp_update", what, 1.15, sides, times, checked=f"weights after all, off by {off:.0e}")


def skip_rows(scale: Scale) -> Iterator[Row]:
    """Half of the groups flat: left out, and computed all the same."""
    with ground("shapes_grpo", scale.sets) as base:
        trajectory = base.trajectory()
        inputs = base.update_inputs(trajectory, flat=base.prompts.rows // 2)
        told: list[dict[str, float]] = []
        gradients: dict[bool, dict[str, Tensor]] = {}

        def once(everything: bool) -> None:
            ctx = base.context("update", rehearsal=everything)
            out = update.run(base.updating, inputs, ctx)
            told.append(parts_of(ctx))
            gradients[everything] = whole(ctx.directory / out.policy.path, "optimizer")

        times = interleaved(lambda _: once(False), lambda _: once(True), scale.repetitions)
        off = distance(gradients[False], gradients[True])
        assert off < 1e-6, f"gradients differ by {off}"
        what = "update stage with half its groups flat: skipped / computed all the same (shapes_grpo)"
        checked = f"gradient, off by {off:.0e}"
        yield compared("skip", what, 0.6, ("skipped", "full"), times, parts=medians(told[2::2]), checked=checked)


def bare_data(base: Ground, inputs: UpdateInputs) -> Data:
    """The update's samples in memory."""
    assert inputs.advantages is not None
    table = tables.read(inputs.trajectory)

    def column(name: str) -> Tensor:
        return torch.from_numpy(np.copy(tables.tensors(table, name)))

    advantages = torch.from_numpy(np.copy(tables.read(inputs.advantages).column("advantage").to_numpy())).float()
    ids, prompt_ids = (table.column(name).to_pylist() for name in ("sample_id", "prompt_id"))
    data = Data(ids, prompt_ids, advantages, column("latents"), base.embeddings())
    if inputs.trajectory.num_steps:
        data.states = column("states")
        names = ("sigma", "sigma_next", "sigma_max", "timestep", "log_prob")
        data.numbers = {name: column(name) for name in names}
        data.numbers["eta"] = torch.full_like(data.numbers["sigma"], eta_of(base.sampling.sampler))
    return data


def bare_parts(base: Ground, inputs: UpdateInputs) -> Parts:
    """The stage's own cut into optimizer steps and model calls."""
    ctx = base.context("update")
    goal = objective(base.updating, inputs, ctx, resident(ctx, base.updating.model, None))
    return [[unit.rows for unit in units] for units in goal.parts(0)]


def _trainer(base: Ground, module: nn.Module, old: nn.Module | None) -> Trainer:
    frozen = None if old is None or not base.updating.loss.needs.old_policy else old.requires_grad_(False)
    return Trainer(module, frozen, base.updating, base.plan.seed, ITERATION)


def _stage(base: Ground, name: str, flow: str, scale: Scale) -> Row:
    """Both go on from where they were, as in a warm loop: policy after policy on the same samples."""
    trajectory: TrajectoryTable = base.trajectory()
    inputs = base.update_inputs(trajectory)
    data, parts = bare_data(base, inputs), bare_parts(base, inputs)
    trainer = _trainer(base, sharded(base), sharded(base))
    told: list[StageContext] = []
    losses: list[tuple[float, float]] = []
    newest: dict[str, Any] = {}

    def stage(number: int) -> None:
        told.append(base.context("update", f"update-{number % 2}"))
        given = inputs.model_copy(update={"policy": newest.get("policy")})
        out: UpdateOutputs = update.run(base.updating, given, told[-1])
        newest.update(policy=out.policy.under(told[-1].directory), loss=out.metrics["train/loss"])

    def plain(number: int) -> None:
        found = trainer.run(data, parts, base.emptied("bare"))
        losses.append((newest["loss"], sum(found) / len(found)))

    times = interleaved(stage, plain, scale.repetitions)
    off = distance(_saved(newest["policy"]), trainer.leaves)
    assert off < 1e-4, f"weights differ by {off}"
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-3, atol=1e-5)
    kind = "Flow-GRPO" if isinstance(base.updating.loss, GrpoLoss) else "DiffusionNFT"
    what = f"update stage, warm / plain loop on the same sharded module ({flow}, {kind}, {_SAVED})"
    parts_told = medians([parts_of(ctx) for ctx in told[1:]])
    checked = f"losses; weights after all, off by {off:.0e}"
    return compared(name, what, 1.05, ("stage", "bare"), times, parts=parts_told, checked=checked)


def _saved(policy: PolicyRef) -> dict[str, Tensor]:
    return whole(Path(policy.path), "raw")
