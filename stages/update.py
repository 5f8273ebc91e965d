"""Optimizer steps on the trainable weights.

Each optimizer step: the old policy and the base predict without gradient, the raw weights with it; losses are divided
by global counts, gradients are synchronised once, and AdamW steps on local shards.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

from schemas.contracts import UpdateConfig, UpdateInputs, UpdateOutputs
from schemas.errors import NonFinite, RunError
from schemas.losses import OldPolicyConfig
from stages.context import StageContext
from stages.engine import checkpoint
from stages.engine.mesh import total
from stages.engine.optim import Optimizer
from stages.engine.policy import Engine, resident
from stages.engine.shard import sync_gradients
from stages.objectives import Objective, Others, Unit, deal, objective

_NAMES = {
    "ratio": "train/ratio_mean",
    "clipped": "train/clip_fraction",
    "approx_kl": "train/approx_kl",
    "kl": "train/kl",
    "old_distance": "train/old_distance",
}


def run(config: UpdateConfig, inputs: UpdateInputs, ctx: StageContext) -> UpdateOutputs:
    """Improves the policy (the base, when there is none) and saves it with its sets and optimizer state."""
    engine = resident(ctx, config.model, inputs.pipeline)
    engine.load(inputs.policy)
    on_policy = inputs.trajectory.policy == engine.digest and inputs.trajectory.weights in ("raw", "none")
    optimizer = engine.prepare_optimizer(config.optimizer, inputs.policy)
    goal = objective(config, inputs, ctx, engine)
    engine.digest = None  # from here on memory holds what no checkpoint holds
    if config.loss.needs.old_policy and "old" not in engine.weights.sets:
        engine.weights.blend("old", 0.0)
    metrics = _Metrics()
    calls, done = _calls(goal, config, ctx), 0
    for epoch in range(config.epochs):
        for units in goal.parts(epoch, config.steps):
            check = on_policy and metrics.steps == 0
            done += _step(engine, optimizer, goal, units, ctx, metrics, check)
            ctx.progress(done, calls, "calls")
            if config.ema is not None:
                engine.weights.blend("ema", config.ema.at(optimizer.updates))
    if config.loss.needs.old_policy:
        engine.weights.blend("old", (config.old or OldPolicyConfig()).decay(ctx.iteration or 0))
    policy = checkpoint.save(ctx.directory, "policy", engine.weights, optimizer, config.model)
    engine.digest, engine.updates = policy.digest, policy.updates
    return UpdateOutputs(policy=policy, metrics=metrics.named())


def _step(
    engine: Engine,
    optimizer: Optimizer,
    goal: Objective,
    units: list[Unit],
    ctx: StageContext,
    metrics: "_Metrics",
    check: bool,
) -> int:
    """One optimizer step; returns the number of model calls with a gradient that this rank made."""
    count = float(sum(goal.rows.weights[list(unit.rows)].sum() for unit in units))
    active = [unit for unit in units if not goal.idle(unit)]
    mine = deal(active, ctx.rank, ctx.world_size) if active else []
    others = _others(engine, goal, [unit for unit, _ in mine])
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    bad: list[str] = []
    for place, ((unit, counts), other) in enumerate(zip(mine, others, strict=True)):
        sync_gradients(engine.module, place == len(mine) - 1)
        terms = goal.terms(unit, goal.velocity(engine, unit), other)
        weight = goal.rows.weight(unit.rows) * float(counts)
        loss = (terms.loss * weight).sum() / count
        if not math.isfinite(float(loss.detach())):
            bad += [goal.rows.sample_ids[row] for row in unit.rows]
        (loss * ctx.world_size).backward()  # FSDP averages over ranks
        for name, value in {"loss": terms.loss.detach(), **terms.stats}.items():
            metrics.add(sums, name, value.double(), weight.double())
    _agree(bad, ctx)
    if metrics.steps == 0 and active:
        _all_have_gradients(engine)
    noise = metrics.close(sums, count, len(units) - len(active))
    if check and goal.bound is not None and noise > goal.bound:
        raise RunError(
            f"{ctx.place}: recomputed log-probs differ from the sampled ones by up to {noise:.1e}, more than half the "
            f"clip range ({goal.bound:.1e}): the clip would act on rounding. Raise loss.clip or use model.dtype float32"
        )
    rate = optimizer.config.learning_rate.at(ctx.iteration or 0, optimizer.updates + 1)
    norm = optimizer.step(rate, ctx.place)
    metrics.stepped(norm, rate, optimizer)
    return len(mine)


def _others(engine: Engine, goal: Objective, units: list[Unit]) -> list[Others]:
    """Predictions of the old policy and the base, all before the first gradient: one swap of weights each."""
    old = _predict(engine, goal, units, "old") if goal.config.loss.needs.old_policy else [None] * len(units)
    reference = _predict(engine, goal, units, "base") if goal.config.kl is not None else [None] * len(units)
    return [Others(a, b) for a, b in zip(old, reference, strict=True)]


def _predict(engine: Engine, goal: Objective, units: list[Unit], name: str) -> list[Tensor]:
    with engine.weights.using(name), torch.no_grad():
        return [goal.velocity(engine, unit) for unit in units]


def _agree(bad: list[str], ctx: StageContext) -> None:
    """All ranks stop together when one has a loss that is not finite; the policy before the update stays."""
    anywhere = float(total(torch.tensor(float(len(bad)))))
    if anywhere:
        here = f"samples {bad[:4]}" if bad else "samples of another rank"
        raise NonFinite(f"{ctx.place}: the loss is not finite for {here}; the policy before it stays")


def _all_have_gradients(engine: Engine) -> None:
    lost = [name for name, p in engine.weights.parameters.items() if p.grad is None]
    if lost:
        raise RunError(f"{len(lost)} trainable tensors got no gradient, first {lost[0]!r}; is the target in use?")


def _calls(goal: Objective, config: UpdateConfig, ctx: StageContext) -> int:
    units = sum(len(part) for epoch in range(config.epochs) for part in goal.parts(epoch, config.steps))
    return -(-units // ctx.world_size)


class _Metrics:
    """Sums over ranks, samples and optimizer steps."""

    def __init__(self) -> None:
        self.steps = self.skipped = 0
        self.per_step: list[dict[str, float]] = []
        self.largest: dict[str, float] = defaultdict(float)
        self.peak: dict[str, float] = defaultdict(float)

    def add(self, sums: dict[str, Tensor], name: str, value: Tensor, weight: Tensor) -> None:
        """A batch of values (batch,) with their weights."""
        kept = value[weight > 0]
        sums[name] += torch.stack([(value * weight).sum(), weight.sum()]).cpu()
        if not len(kept):
            return
        if name == "ratio":
            self.peak["ratio"] = max(self.peak["ratio"], float((kept - 1).abs().max()))
        if name == "log_prob_noise":
            self.peak["noise"] = max(self.peak["noise"], float(kept.max()))

    def close(self, sums: dict[str, Tensor], count: float, skipped: int) -> float:
        """Ends an optimizer step's sums; returns the largest log-prob difference on any rank."""
        peaks = total(torch.tensor([self.peak["ratio"], self.peak["noise"]], dtype=torch.float64), largest=True)
        self.largest["ratio"] = max(self.largest["ratio"], float(peaks[0]))
        if self.steps == 0:
            self.largest["noise"] = float(peaks[1])
        self.peak.clear()
        means = {}
        for name in sorted(sums):
            value, weight = total(sums[name]).tolist()
            # Units left out count in the loss: their part of it is 0.
            means[name] = value / (count if name == "loss" else max(weight, 1.0))
        self.per_step.append(means)
        self.skipped += skipped
        return float(peaks[1])

    def stepped(self, norm: float, rate: float, optimizer: Optimizer) -> None:
        """Facts of the optimizer's step."""
        self.steps += 1
        size = sum(p.numel() for p in optimizer.weights.parameters.values())
        facts = {"norm": norm, "rate": rate, "rms_over_eps": norm / math.sqrt(size) / optimizer.config.eps}
        self.per_step[-1].update(facts)

    def named(self) -> dict[str, float]:
        """The field's names; means over the optimizer steps."""
        mean = {name: self._mean(name) for name in {key for step in self.per_step for key in step}}
        out = {
            "train/loss": mean.get("loss", 0.0),
            "train/grad_norm": mean["norm"],
            "train/learning_rate": mean["rate"],
            "train/grad_rms_over_eps": mean["rms_over_eps"],
            "train/skipped_units": float(self.skipped),
            "train/optimizer_steps": float(self.steps),
        }
        out |= {_NAMES[name]: value for name, value in mean.items() if name in _NAMES}
        if "ratio" in mean:
            out["train/ratio_max_deviation"] = self.largest["ratio"]
            out["train/log_prob_noise"] = self.largest["noise"]
            if 1 < self.steps <= 8:
                ratios = [(i, step["ratio"]) for i, step in enumerate(self.per_step) if "ratio" in step]
                out |= {f"train/ratio_mean/{i}": ratio for i, ratio in ratios}
        return dict(sorted(out.items()))

    def _mean(self, name: str) -> float:
        values = [step[name] for step in self.per_step if name in step]
        return sum(values) / len(values)
