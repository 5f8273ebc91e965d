"""Optimizer steps on the trainable weights.

Each optimizer step: the old policy and the base predict without gradient, the raw weights with it; losses are divided
by global counts, gradients are synchronised once, and AdamW steps on local shards.
"""

import math
from functools import partial

import torch
from torch import Tensor

from schemas.contracts import UpdateConfig, UpdateInputs, UpdateOutputs
from schemas.errors import NonFinite, RunError
from schemas.losses import OldPolicyConfig
from stages.behind import Behind
from stages.context import StageContext
from stages.engine import checkpoint
from stages.engine.dropout import dropout
from stages.engine.mesh import total
from stages.engine.optim import Optimizer
from stages.engine.policy import BASE, Engine, changing, resident
from stages.engine.shard import sync_gradients
from stages.objectives import objective
from stages.objectives.metrics import StepMetrics, UpdateMetrics
from stages.objectives.units import Objective, Others, Unit, deal


def run(config: UpdateConfig, inputs: UpdateInputs, ctx: StageContext) -> UpdateOutputs:
    """Improves the policy (the base, when there is none) and saves it with its sets and optimizer state."""
    with ctx.timed("load"):
        engine = resident(ctx, config.model, inputs.pipeline)
        engine.load(inputs.policy)
    work = engine.work(ctx)
    goal = objective(config, inputs, ctx, engine)
    # All weights of the base are the base.
    raw = inputs.trajectory.weights == "raw" or engine.digest == BASE
    on_policy = raw and inputs.trajectory.policy == engine.digest
    left = checkpoint.halfway(ctx.directory)
    metrics = UpdateMetrics() if left is None else UpdateMetrics.of(left.note)
    with changing(ctx, engine):
        if left is not None:
            engine.resume(left.policy)
        optimizer = engine.prepare_optimizer(config.optimizer, inputs.policy if left is None else left.policy)
        engine.weights.keep(_sets(config))
        _train(config, ctx, engine, optimizer, goal, metrics, on_policy, 0 if left is None else left.steps)
        with ctx.timed("save"):
            policy = checkpoint.save(ctx.directory, "policy", engine.weights, optimizer, config.model)
            optimizer.settle()
            checkpoint.drop_halfway(ctx.directory)
    engine.hold(policy)
    work.close(len(goal.rows.sample_ids))
    return UpdateOutputs(policy=policy, metrics=metrics.named())


def _sets(config: UpdateConfig) -> list[str]:
    return ["old"] * config.loss.needs.old_policy + ["ema"] * (config.ema is not None)


def _train(
    config: UpdateConfig,
    ctx: StageContext,
    engine: Engine,
    optimizer: Optimizer,
    goal: Objective,
    metrics: UpdateMetrics,
    on_policy: bool,
    taken: int,
) -> None:
    """All optimizer steps but the `taken` ones; every so many of them are kept, so that a stopped update goes on."""
    parts = [part for epoch in range(config.epochs) for part in goal.parts(epoch)]
    interval = ctx.resources.checkpoint_steps or len(parts)
    with Behind(ctx, 1) as behind:
        for done, units in enumerate(parts[taken:], start=taken + 1):
            bound = goal.bound if on_policy and done == 1 else None
            _step(ctx, engine, optimizer, goal, units, metrics, bound)
            if config.ema is not None:
                engine.weights.blend("ema", config.ema.at(optimizer.updates))
            if done % interval == 0 and done < len(parts):
                with ctx.timed("save"):
                    now = checkpoint.Snapshot.of(engine.weights, optimizer, config.model, copied=True)
                    optimizer.settle()
                behind.put(partial(checkpoint.keep_halfway, ctx.directory, done, metrics.note(), now))
            ctx.progress(done, len(parts), "optimizer steps")
    if config.loss.needs.old_policy:
        engine.weights.blend("old", (config.old or OldPolicyConfig()).decay(ctx.iteration or 0))


def _step(
    ctx: StageContext,
    engine: Engine,
    optimizer: Optimizer,
    goal: Objective,
    units: list[Unit],
    metrics: UpdateMetrics,
    bound: float | None,
) -> None:
    """One optimizer step. With a `bound` the samples are this policy's own, and their log-probs must come out again."""
    count = float(sum(goal.rows.weights[list(unit.rows)].sum() for unit in units))
    active = [unit for unit in units if ctx.rehearsal or not goal.idle(unit)]
    step = StepMetrics()
    bad = _backward(ctx, engine, goal, active, count, step) if active else []
    with ctx.timed("idle"):
        finite = step.agree()
    if not finite:
        _stop_at(bad, goal, ctx)
    if active:
        _all_have_gradients(engine)
    if bound is not None and step.noise > bound:
        raise RunError(
            f"{ctx.place}: recomputed log-probs differ from the sampled ones by up to {step.noise:.1e}, more than half "
            f"the clip range ({bound:.1e}): the clip would act on rounding. Raise `loss.clip` or set "
            "`model.dtype: float32`"
        )
    rate = optimizer.config.learning_rate.at(ctx.iteration or 0, optimizer.updates + 1)
    with ctx.timed("optimizer"):
        norm = optimizer.step(rate, ctx.place)
    rms = norm / math.sqrt(sum(p.numel() for p in engine.weights.parameters.values()))
    skipped = len(units) - len(active)
    metrics.close(step, count, skipped, norm=norm, rate=rate, rms_over_eps=rms / optimizer.config.eps)


def _backward(
    ctx: StageContext, engine: Engine, goal: Objective, units: list[Unit], count: float, step: StepMetrics
) -> list[int]:
    """Gradients of this rank's units, and the rows whose numbers are not finite."""
    mine = deal(units, ctx.lane, ctx.lanes)
    others, bad = _others(ctx, engine, goal, mine), []
    for place, ((unit, counts), other) in enumerate(zip(mine, others, strict=True), start=1):
        sync_gradients(engine.module, place == len(mine))
        seeds = goal.rows.seeds(ctx, unit.rows, unit.epoch, unit.step)
        with engine.flops.counted(counts and ctx.leads), dropout(engine.module, seeds):
            velocity = goal.velocity(engine, unit)
        terms = goal.terms(unit, velocity, other)
        weight = goal.rows.weight(unit.rows) * float(counts)
        with engine.flops.counted(counts and ctx.leads), dropout(engine.module, seeds):
            # FSDP averages over ranks; those of a lane have the gradient of their own tokens.
            engine.backward((terms.loss * weight).sum() / count * ctx.world_size, len(unit.rows))
        if not step.add({"loss": terms.loss.detach(), **terms.stats}, weight * float(ctx.leads)):
            bad += unit.rows
    return bad


def _others(ctx: StageContext, engine: Engine, goal: Objective, units: list[tuple[Unit, bool]]) -> list[Others]:
    """Predictions of the old policy and the base, all before the first gradient: one swap of weights each."""
    old = _predict(ctx, engine, goal, units, "old") if goal.config.loss.needs.old_policy else [None] * len(units)
    reference = _predict(ctx, engine, goal, units, "base") if goal.config.kl is not None else [None] * len(units)
    return [Others(a, b) for a, b in zip(old, reference, strict=True)]


def _predict(
    ctx: StageContext, engine: Engine, goal: Objective, units: list[tuple[Unit, bool]], name: str
) -> list[Tensor]:
    out = []
    with engine.weights.using(name), torch.no_grad():
        for unit, counts in units:
            with engine.flops.counted(counts and ctx.leads):
                out.append(goal.velocity(engine, unit))
    return out


def _stop_at(bad: list[int], goal: Objective, ctx: StageContext) -> None:
    """Every rank raises the same error."""
    marks = torch.zeros(len(goal.rows.sample_ids))
    marks[bad] = 1
    samples = [goal.rows.sample_ids[row] for row in total(marks).nonzero().flatten().tolist()]
    more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
    raise NonFinite(
        f"{ctx.place}: the loss is not finite in the model call of samples {samples[:8]}{more}; the policy before stays"
    )


def _all_have_gradients(engine: Engine) -> None:
    lost = [name for name, p in engine.weights.parameters.items() if p.grad is None]
    if lost:
        raise RunError(
            f"{len(lost)} trainable tensors got no gradient, first {lost[0]!r}: the model does not use them; "
            "name others in `model.lora.targets`"
        )
