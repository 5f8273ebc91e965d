"""Rewards to advantages, over samples (never over copies of a sample), in float64."""

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.artifacts import AdvantagesTable, RewardsTable
from schemas.contracts import AdvantageConfig, AdvantageInputs, AdvantageOutputs
from schemas.errors import InputError, NonFinite
from schemas.tables import advantages_schema
from stages.context import StageContext
from stages.store import tables

Floats = NDArray[np.float64]


class Advantages(NamedTuple):
    """Per sample, NaN where it left the statistics; `zero_std_ratio` is the share of groups without spread."""

    values: Floats
    zero_std_ratio: float


def run(config: AdvantageConfig, inputs: AdvantageInputs, ctx: StageContext) -> AdvantageOutputs:
    """Weights and sums the rewards, then normalises them."""
    table = tables.read(inputs.rewards)
    samples, prompts = table.column("sample_id").to_pylist(), table.column("prompt_id").to_pylist()
    rewards = weighted_sum(inputs.rewards, ctx.place)
    computed = advantages(rewards, prompts, config)
    values, kept = computed.values, ~np.isnan(computed.values)
    if not kept.any():
        raise InputError(f"{ctx.place}: no group has two scored samples, so there is nothing to compare")
    writer = tables.TableWriter(Path(ctx.directory), "advantages", advantages_schema())
    columns = {"reward": _nullable(rewards), "advantage": _nullable(values)}
    writer.write(0, {"sample_id": samples, "prompt_id": prompts, **columns})
    scored = rewards[~np.isnan(rewards)]
    metrics = {
        "reward/mean": float(scored.mean()),
        "reward/std": float(scored.std()),
        "reward/zero_std_ratio": computed.zero_std_ratio,
        "advantage/std": float(values[kept].std()),
        "advantage/dropped": float((~kept).sum()),
    }
    return AdvantageOutputs(advantages=writer.ref(AdvantagesTable, 1), metrics=metrics)


def weighted_sum(ref: RewardsTable, place: str) -> Floats:
    """Sum of weight * reward in sorted order of names: (samples,), NaN where a weighted reward is missing."""
    table = tables.read(ref)
    total = np.zeros(len(table))
    for name in sorted(ref.weights):
        if ref.weights[name] == 0:
            continue
        column = table.column(name).combine_chunks()
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        bad = ~np.isfinite(values) & column.is_valid().to_numpy(zero_copy_only=False)
        if bad.any():
            sample = table.column("sample_id")[int(bad.argmax())].as_py()
            raise NonFinite(f"{place}: reward {name!r} of sample {sample!r} is {values[bad][0]}")
        total = total + ref.weights[name] * values
    return total


def advantages(rewards: Floats, prompts: list[str], config: AdvantageConfig) -> Advantages:
    """A = (r - mean of its group) / (std + 1e-4), clamped; std with ddof 0.

    std is the group's, that of the whole batch about its mean, or 1. A group whose std is at most `flat` gets 0;
    NaN rewards leave the statistics, and so does a group with fewer than two scored samples, unless it is one whole
    sample: a group of one gets 0.
    """
    out = np.full(len(rewards), np.nan)
    scored = ~np.isnan(rewards)
    batch_std = float(rewards[scored].std()) if scored.any() else 0.0
    order = sorted(range(len(prompts)), key=lambda row: (prompts[row], row))
    flat = groups = 0
    for _, group in groupby(order, key=lambda row: prompts[row]):
        rows = np.array(list(group))
        kept = rows[scored[rows]]
        if len(kept) < 2 and len(rows) > 1:
            continue
        groups += 1
        values = rewards[kept]
        std = float(values.std()) if len(values) else 0.0
        if std <= config.flat:
            out[kept], flat = 0.0, flat + 1
            continue
        scale = {"group": std + 1e-4, "global": batch_std + 1e-4, "none": 1.0}[config.kind]
        out[kept] = np.clip((values - values.mean()) / scale, -config.clamp, config.clamp)
    return Advantages(out, flat / max(groups, 1))


def _nullable(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
