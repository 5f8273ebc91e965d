"""Rewards to advantages, over samples (never over copies of a sample), in float64."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.artifacts import AdvantagesTable
from schemas.contracts import AdvantageConfig, AdvantageInputs, AdvantageOutputs
from schemas.errors import InputError, NonFinite
from schemas.tables import advantages_schema
from stages.context import StageContext
from stages.store import tables

Floats = NDArray[np.float64]


class Advantages(NamedTuple):
    """`values` by sample, NaN where it left the statistics; numbers of groups that stayed, are flat, were dropped."""

    values: Floats
    groups: int
    flat: int
    dropped: int


def run(config: AdvantageConfig, inputs: AdvantageInputs, ctx: StageContext) -> AdvantageOutputs:
    """Weights and sums the rewards, then normalises them. One row a sample, in the order of the rewards."""
    table = tables.read(inputs.rewards)
    rewards = weighted_sum(table, inputs.rewards.weights, ctx.place)
    computed = advantages(rewards, table.column("prompt_id").to_pylist(), config)
    kept = ~np.isnan(computed.values)
    if not kept.any():
        raise InputError(
            f"{ctx.place}: wanted a group of two scored samples, got none among {len(table)} samples; "
            "raise sample.per_prompt, or see why the rewards are missing"
        )
    writer = tables.TableWriter(ctx.directory, "advantages", advantages_schema())
    keys = {name: table.column(name).to_pylist() for name in ("sample_id", "prompt_id")}
    writer.write(0, {**keys, "reward": _nullable(rewards), "advantage": _nullable(computed.values)})
    scored = rewards[~np.isnan(rewards)]
    metrics = {
        "reward/mean": float(scored.mean()),
        "reward/std": float(scored.std()),
        "reward/zero_std_ratio": computed.flat / computed.groups,
        "advantage/std": float(computed.values[kept].std()),
        "advantage/dropped": float(computed.dropped),
    }
    return AdvantageOutputs(advantages=writer.ref(AdvantagesTable, 1), metrics=metrics)


def weighted_sum(table: pa.Table, weights: Mapping[str, float], place: str) -> Floats:
    """Sum of weight * reward in sorted order of names: (samples,), NaN where a weighted reward is missing.

    Raises NonFinite for a NaN or infinite reward, InputError when no reward has a weight.
    """
    names = sorted(name for name, weight in weights.items() if weight != 0)
    if not names:
        raise InputError(
            f"{place}: every reward has weight 0, so there is nothing to learn; give one a weight in score"
        )
    total = np.zeros(len(table))
    for name in names:
        total += weights[name] * _finite(table, name, place)
    return total


def advantages(rewards: Floats, prompts: Sequence[str], config: AdvantageConfig) -> Advantages:
    """A = (r - mean of its group) / (std + 1e-4), clamped to +-`clamp`; std with ddof 0.

    std is the group's, or that of all samples which stay, or (kind none) the division is left out. A group whose std
    is at most `flat` gets exactly 0, as a group of one sample does. A NaN reward leaves the statistics; a group with
    fewer than two scored samples left because of that is dropped.
    """
    groups, dropped = _groups(rewards, prompts)
    out = np.full(len(rewards), np.nan)
    if not groups:
        return Advantages(out, 0, 0, dropped)
    _, whole = _centred(rewards[np.concatenate(groups)])
    flat = 0
    for rows in groups:
        centred, std = _centred(rewards[rows])
        if std <= config.flat:
            flat += 1
            out[rows] = 0.0
            continue
        scale = {"group": std + 1e-4, "global": whole + 1e-4, "none": 1.0}[config.kind]
        out[rows] = np.clip(centred / scale, -config.clamp, config.clamp)
    return Advantages(out, len(groups), flat, dropped)


def _groups(rewards: Floats, prompts: Sequence[str]) -> tuple[list[NDArray[np.int64]], int]:
    """Scored rows of each prompt id that stays, and the number of prompts that do not."""
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    scored = [
        (np.array([row for row in group if not np.isnan(rewards[row])], int), len(group)) for group in rows.values()
    ]
    kept = [group for group, size in scored if len(group) >= min(size, 2)]
    return kept, len(rows) - len(kept)


def _centred(values: Floats) -> tuple[Floats, float]:
    """Values minus their mean, and their std. Exact sums: neither order nor rounding gives a flat group spread."""
    mean = float(sum(map(Fraction, values.tolist()), Fraction(0)) / len(values))
    centred = values - mean
    return centred, math.sqrt(math.fsum(centred**2) / len(values))


def _finite(table: pa.Table, name: str, place: str) -> Floats:
    values = table.column(name).to_numpy().astype(np.float64)  # null becomes NaN
    bad = ~np.isfinite(values) & table.column(name).is_valid().to_numpy()
    if bad.any():
        sample = table.column("sample_id")[int(bad.argmax())].as_py()
        raise NonFinite(f"{place}: reward {name!r} of sample {sample!r} is {values[bad][0]}; return None for no score")
    return values


def _nullable(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
