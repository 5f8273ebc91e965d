"""Advantages against hand-worked numbers and a NumPy reference."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from schemas.artifacts import RewardsTable
from schemas.contracts import AdvantageConfig, AdvantageInputs, AdvantageOutputs
from schemas.engine import Resources
from schemas.errors import InputError, NonFinite
from schemas.tables import rewards_schema
from stages.advantage import advantages, run
from stages.context import StageContext
from stages.store import tables

NAN = float("nan")


def _context(directory: Path) -> StageContext:
    return StageContext(directory, "advantage", 0, 3, Resources(), 8)


def _rewards(
    directory: Path, prompts: Sequence[str], columns: Mapping[str, Sequence[float | None]], weights: dict[str, float]
) -> RewardsTable:
    writer = tables.TableWriter(directory, "rewards", rewards_schema(tuple(columns)))
    ids = [f"s{i}" for i in range(len(prompts))]
    half = len(ids) // 2
    for index, rows in enumerate((slice(0, half), slice(half, None))):
        scores = {name: list(values[rows]) for name, values in columns.items()}
        writer.write(index, {"sample_id": ids[rows], "prompt_id": list(prompts[rows]), **scores})
    return writer.ref(RewardsTable, 2, weights=weights).under(directory)


def _run(directory: Path, config: AdvantageConfig, rewards: RewardsTable) -> tuple[AdvantageOutputs, dict[str, list]]:
    outputs = run(config, AdvantageInputs(rewards=rewards), _context(directory))
    return outputs, tables.read(outputs.advantages.under(directory)).to_pydict()


@pytest.mark.parametrize("kind", ["group", "global", "none"])
def test_equals_a_reference(kind: str) -> None:
    rng = np.random.default_rng(0)
    rewards, prompts = rng.normal(size=24), [f"p{i % 4}" for i in range(24)]
    got = advantages(rewards, prompts, AdvantageConfig.model_validate({"kind": kind, "clamp": 1.5}))
    for i in range(24):
        group = rewards[[j for j in range(24) if prompts[j] == prompts[i]]]
        scale = {"group": np.std(group) + 1e-4, "global": np.std(rewards) + 1e-4, "none": 1.0}[kind]
        wanted = min(max((rewards[i] - np.mean(group)) / scale, -1.5), 1.5)
        assert got.values[i] == pytest.approx(wanted, rel=1e-12)
    assert (got.groups, got.flat, got.dropped) == (4, 0, 0)
    assert (np.abs(got.values) == 1.5).any()  # so the clamp is part of this


def test_by_hand() -> None:
    got = advantages(np.array([1.0, 3.0, 10.0, 10.0]), ["a", "a", "b", "b"], AdvantageConfig())
    np.testing.assert_allclose(got.values, [-1 / 1.0001, 1 / 1.0001, 0, 0], rtol=1e-15)
    assert (got.groups, got.flat) == (2, 1)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e15 + 0.3, 1e-12])
@pytest.mark.parametrize("size", [2, 3, 7, 24])
@pytest.mark.parametrize("kind", ["group", "global", "none"])
def test_a_constant_group_gets_exactly_zero_even_without_a_threshold(value: float, size: int, kind: str) -> None:
    config = AdvantageConfig.model_validate({"kind": kind, "flat": 0.0})
    got = advantages(np.array([value] * size + [0.0, 1.0]), ["a"] * size + ["b", "b"], config)
    assert got.values[:size].tolist() == [0.0] * size
    assert got.flat == 1


def test_spread_up_to_the_threshold_is_none() -> None:
    rewards, prompts = np.array([0.0, 2e-6, 0.0, 2.1e-6]), ["a", "a", "b", "b"]
    got = advantages(rewards, prompts, AdvantageConfig(flat=1e-6))
    assert got.values[:2].tolist() == [0.0, 0.0]
    assert got.values[3] == pytest.approx(1.05e-6 / (1.05e-6 + 1e-4))


def test_order_of_rows_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    rewards, prompts = rng.normal(size=30) * 10.0 ** rng.integers(-6, 6, 30), [f"p{i % 3}" for i in range(30)]
    order = rng.permutation(30)
    for kind in ("group", "global", "none"):
        config = AdvantageConfig.model_validate({"kind": kind})
        plain = advantages(rewards, prompts, config).values
        mixed = advantages(rewards[order], [prompts[i] for i in order], config).values
        np.testing.assert_array_equal(mixed, plain[order])


def test_the_clamp_comes_after_the_division() -> None:
    rewards = np.array([0.0] * 99 + [1.0])
    got = advantages(rewards, ["a"] * 100, AdvantageConfig(clamp=5.0))
    assert got.values[99] == 5.0
    assert got.values[0] == pytest.approx(-0.01 / (np.std(rewards) + 1e-4))


def test_missing_samples_leave_the_statistics_and_small_groups_are_dropped() -> None:
    rewards = np.array([1.0, NAN, 3.0, 7.0, NAN, 4.0, NAN])
    prompts = ["a", "a", "a", "b", "b", "one", "gone"]
    got = advantages(rewards, prompts, AdvantageConfig())
    np.testing.assert_allclose(got.values, [-1 / 1.0001, NAN, 1 / 1.0001, NAN, NAN, 0.0, NAN], rtol=1e-15)
    assert (got.groups, got.flat, got.dropped) == (2, 1, 2)
    whole = advantages(rewards, prompts, AdvantageConfig(kind="global")).values
    assert whole[2] == pytest.approx(1 / (np.std([1.0, 3.0, 4.0]) + 1e-4))  # dropped samples are no part of it


def test_run_writes_a_row_a_sample_and_the_named_metrics(tmp_path: Path) -> None:
    prompts = ["a", "b", "a", "b", "c", "c"]
    columns = {"z": [1.0, 5.0, 3.0, 5.0, None, 2.0], "a": [0.0, 0.5, 1.0, 0.5, 1.0, 0.0], "eyes": [None] * 6}
    rewards = _rewards(tmp_path, prompts, columns, {"z": 1.0, "a": 2.0, "eyes": 0.0})
    outputs, rows = _run(tmp_path, AdvantageConfig(), rewards)
    assert rows["sample_id"] == [f"s{i}" for i in range(6)]
    assert rows["prompt_id"] == prompts
    assert rows["reward"] == [1.0, 6.0, 5.0, 6.0, None, 2.0]
    assert rows["advantage"] == [pytest.approx(-2 / 2.0001), 0.0, pytest.approx(2 / 2.0001), 0.0, None, None]
    assert set(outputs.metrics) == set(AdvantageConfig().metric_names())
    assert outputs.metrics == {
        "reward/mean": 4.0,
        "reward/std": pytest.approx(np.std([1, 6, 5, 6, 2])),
        "reward/zero_std_ratio": 0.5,
        "advantage/std": pytest.approx(np.std([-2 / 2.0001, 0, 2 / 2.0001, 0])),
        "advantage/dropped": 1.0,
    }
    assert outputs.advantages.path == "advantages"


def test_the_order_of_the_rewards_names_is_not_identity(tmp_path: Path) -> None:
    prompts, values = ["p"] * 6, np.random.default_rng(2).normal(size=(3, 6)).tolist()
    digests = set()
    for i, names in enumerate((("a", "b", "c"), ("c", "a", "b"))):
        columns = {name: values["abc".index(name)] for name in names}
        folder = tmp_path / str(i)
        ref = _rewards(folder, prompts, columns, {name: 0.1 * (1 + "abc".index(name)) for name in names})
        digests.add(_run(folder, AdvantageConfig(), ref)[0].advantages.digest)
    assert len(digests) == 1


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_names_place_reward_and_sample(tmp_path: Path, bad: float) -> None:
    rewards = _rewards(tmp_path, ["a"] * 4, {"r": [1.0, None, 0.0, bad]}, {"r": 1.0})
    with pytest.raises(NonFinite, match=r"advantage\[3\]: reward 'r' of sample 's3' is (nan|-?inf)"):
        _run(tmp_path, AdvantageConfig(), rewards)


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    weightless = _rewards(tmp_path / "a", ["a"] * 4, {"r": [1.0, 2.0, 3.0, 4.0]}, {"r": 0.0})
    with pytest.raises(InputError, match="every reward has weight 0"):
        _run(tmp_path / "a", AdvantageConfig(), weightless)
    missing = _rewards(tmp_path / "b", ["a", "a", "b", "b"], {"r": [1.0, None, None, None]}, {"r": 1.0})
    with pytest.raises(InputError, match=r"advantage\[3\]: wanted a group of two scored samples, got none among 4"):
        _run(tmp_path / "b", AdvantageConfig(), missing)


def test_the_stage_loads_no_torch() -> None:
    code = "import sys, stages.advantage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
