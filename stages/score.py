"""Stage `score`: scores pictures, one shard of rewards for each shard of samples. Loads torch only if a reward does."""

import json
import math
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.artifacts import RewardsTable
from schemas.contracts import ScoreConfig, ScoreInputs, ScoreOutputs
from schemas.errors import NonFinite, RewardflowError, RunError
from schemas.rewards import RewardConfig
from schemas.tables import rewards_schema
from stages.context import StageContext
from stages.rewards import reward
from stages.store import images, tables
from stages.store.tables import TableWriter

_FLAT = 1e-6  # spread of a group's scores, in the reward's units, up to which it counts as none


def run(config: ScoreConfig, inputs: ScoreInputs, ctx: StageContext) -> ScoreOutputs:
    """Writes the scores; shards that are there already are kept."""
    writer = TableWriter(ctx.directory, "rewards", rewards_schema(tuple(config.rewards)))
    num_shards = len(inputs.samples.shards)
    finished = writer.finished()
    samples, start = tables.read(inputs.samples), 0
    for k, shard in enumerate(inputs.samples.shards):
        if k not in finished:
            writer.write(k, _scored(config.rewards, samples.slice(start, shard.rows), ctx))
        start += shard.rows
        ctx.progress(k + 1, num_shards, "shards")
    weights = {name: one.weight for name, one in config.rewards.items()}
    ref = writer.ref(RewardsTable, num_shards, weights=weights)
    table = tables.read(ref.under(ctx.directory))
    metrics = {key: value for name in config.rewards for key, value in statistics(table, name, ctx.place).items()}
    return ScoreOutputs(rewards=ref, metrics=metrics)


def statistics(table: pa.Table, name: str, place: str) -> dict[str, float]:
    """Mean and std (ddof 0) of the scores that are there, share of groups without spread, number of missing ones."""
    column = table.column(name)
    values = column.drop_null().to_numpy()
    if not len(values):
        raise RunError(f"{place}: reward {name!r} scored none of {len(column)} pictures; see why it returns None")
    groups = _groups(table, name)
    flat = sum(scores.std() <= _FLAT for scores in groups.values())
    return {
        name: float(values.mean()),
        f"{name}/std": float(values.std()),
        f"{name}/zero_std_ratio": float(flat / len(groups)),
        f"{name}/missing": float(column.null_count),
    }


def _groups(table: pa.Table, name: str) -> dict[str, NDArray[np.float64]]:
    found: dict[str, list[float]] = {}
    for prompt_id, score in zip(table.column("prompt_id").to_pylist(), table.column(name).to_pylist(), strict=True):
        if score is not None:
            found.setdefault(prompt_id, []).append(score)
    return {prompt_id: np.array(scores) for prompt_id, scores in found.items()}


def _scored(rewards: Mapping[str, RewardConfig], samples: pa.Table, ctx: StageContext) -> dict[str, object]:
    ids, prompts = samples.column("sample_id").to_pylist(), samples.column("prompt").to_pylist()
    metadata = [json.loads(m or "{}") for m in samples.column("metadata").to_pylist()]
    with ctx.timed("read"):
        encoded = samples.column("image").to_pylist()
        pictures = [images.pixels(value, sample_id) for value, sample_id in zip(encoded, ids, strict=True)]
    columns: dict[str, object] = {"sample_id": ids, "prompt_id": samples.column("prompt_id").to_pylist()}
    for name, config in rewards.items():
        function, settings = reward(config)
        try:
            with ctx.timed(name):
                scores = [None if s is None else float(s) for s in function(settings, pictures, prompts, metadata)]
        except RewardflowError:
            raise
        except Exception as error:
            message = f"{ctx.place}: reward {name!r} ({config.kind}) failed: {type(error).__name__}: {error}"
            raise RunError(message) from error
        columns[name] = _checked(scores, ids, name, ctx.place)
    return columns


def _checked(scores: list[float | None], ids: list[str], name: str, place: str) -> list[float | None]:
    if len(scores) != len(ids):
        raise RunError(
            f"{place}: reward {name!r} gave {len(scores)} scores for {len(ids)} pictures; it must give one each"
        )
    for sample_id, score in zip(ids, scores, strict=True):
        if score is not None and not math.isfinite(score):
            raise NonFinite(f"{place}: reward {name!r} is {score} for sample {sample_id!r}; return None for no score")
    return scores
