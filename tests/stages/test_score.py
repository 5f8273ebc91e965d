"""Rewards and the stage that applies them."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from schemas.artifacts import SamplesTable
from schemas.contracts import ScoreConfig, ScoreInputs
from schemas.engine import Resources
from schemas.errors import InputError, NonFinite, RunError
from schemas.rewards import ExternalReward, JpegSizeReward, ShapesReward
from schemas.tables import samples_schema
from stages.context import StageContext
from stages.rewards import reward
from stages.score import run
from stages.shapes.render import render
from stages.shapes.scenes import parse
from stages.store import images, tables
from stages.store.tables import TableWriter

MODULE = """
import math
calls = 0

def score(config, pictures, prompts, metadata):
    global calls
    calls += 1
    return [None if m.get("skip") else m["value"] * config["factor"] for m in metadata]

def broken(config, pictures, prompts, metadata):
    raise KeyError("aesthetic")

def short(config, pictures, prompts, metadata):
    return [1.0]

def infinite(config, pictures, prompts, metadata):
    return [1.0] * (len(pictures) - 1) + [math.nan]

def nothing(config, pictures, prompts, metadata):
    return [None] * len(pictures)
"""


def context(directory: Path) -> StageContext:
    return StageContext(directory, "score", 0, 3, Resources(), 8)


def samples(directory: Path, rows: list[dict[str, Any]], per_shard: int = 3) -> SamplesTable:
    """Rows of prompt, metadata and picture as a table of several shards."""
    writer = TableWriter(directory, "samples", samples_schema())
    full = [
        {"sample_id": f"s{i}", "prompt_id": row["prompt"], "index": i, "seed": i, "metadata": "{}", **row}
        for i, row in enumerate(rows)
    ]
    for k in range(0, len(full), per_shard):
        part = full[k : k + per_shard]
        writer.write(k // per_shard, {name: [row[name] for row in part] for name in samples_schema().names})
    return writer.ref(SamplesTable, -(-len(full) // per_shard)).under(directory)


def picture(prompt: str, seed: int = 0) -> np.ndarray:
    return render(parse(prompt), np.random.default_rng(seed))


@pytest.fixture
def external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_reward.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)
    return "own_reward"


def valued(values: list[float | None]) -> list[dict[str, Any]]:
    image = images.png(np.zeros((4, 4, 3), np.uint8))
    return [
        {
            "prompt": "ab"[i // 3],
            "image": image,
            "metadata": '{"skip": true}' if v is None else f'{{"value": {v}}}',
        }
        for i, v in enumerate(values)
    ]


def test_scores_and_statistics(tmp_path: Path, external: str) -> None:
    table = samples(tmp_path, valued([1.0, 1.0, None, 2.0, 4.0, 3.0]), per_shard=4)
    config = ScoreConfig(
        rewards={"own": ExternalReward(name="own", target=f"{external}:score", settings={"factor": 2}, weight=0.5)}
    )
    outputs = run(config, ScoreInputs(samples=table), context(tmp_path))
    rewards = outputs.rewards.under(tmp_path)
    assert tables.read(rewards).column("own").to_pylist() == [2.0, 2.0, None, 4.0, 8.0, 6.0]
    assert rewards.weights == {"own": 0.5}
    assert len(rewards.shards) == 2
    values = np.array([2.0, 2.0, 4.0, 8.0, 6.0])
    assert outputs.metrics == pytest.approx(
        {"own": values.mean(), "own/std": values.std(), "own/zero_std_ratio": 0.5, "own/missing": 1.0}
    )
    assert tuple(outputs.metrics) == config.metric_names()


def test_finished_shards_are_kept(tmp_path: Path, external: str) -> None:
    table = samples(tmp_path, valued([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), per_shard=2)
    config = ScoreConfig(
        rewards={"own": ExternalReward(name="own", target=f"{external}:score", settings={"factor": 1})}
    )
    first = run(config, ScoreInputs(samples=table), context(tmp_path))
    (tmp_path / "rewards" / "shard-00001.json").unlink()
    before = sys.modules[external].calls
    second = run(config, ScoreInputs(samples=table), context(tmp_path))
    assert sys.modules[external].calls == before + 1
    assert first == second


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("broken", RunError, r"score\[3\]: reward 'own'.*KeyError.*aesthetic"),
        ("short", RunError, r"'own' gave 1 scores for 3 pictures"),
        ("infinite", NonFinite, r"score\[3\]: reward 'own' is nan for sample 's2'"),
        ("nothing", RunError, r"'own' scored none of 3"),
        ("absent", InputError, r"own_reward.*'absent'.*target"),
    ],
)
def test_bad_rewards(tmp_path: Path, external: str, function: str, error: type[Exception], words: str) -> None:
    table = samples(tmp_path, valued([1.0, 2.0, 3.0]))
    config = ScoreConfig(rewards={"own": ExternalReward(name="own", target=f"{external}:{function}")})
    with pytest.raises(error, match=words):
        run(config, ScoreInputs(samples=table), context(tmp_path))


def test_a_reward_whose_package_is_missing() -> None:
    with pytest.raises(InputError, match=r"no_such_package.*'own'.*python_path"):
        reward(ExternalReward(name="own", target="no_such_package:score"))


def test_shapes(tmp_path: Path) -> None:
    prompts = ["two red circles", "three blue squares", "one yellow triangle"]
    rows = [{"prompt": prompt, "image": images.png(picture(prompt, i))} for i, prompt in enumerate(prompts)]
    rows.append({"prompt": "two red circles", "image": images.png(picture("one red circle"))})
    config = ScoreConfig(rewards={"partial": ShapesReward(), "strict": ShapesReward(score="strict", weight=0)})
    outputs = run(config, ScoreInputs(samples=samples(tmp_path, rows)), context(tmp_path))
    table = tables.read(outputs.rewards.under(tmp_path))
    assert table.column("strict").to_pylist() == [1.0, 1.0, 1.0, 0.0]
    partial = table.column("partial").to_pylist()
    assert 0.2 < partial[3] < 0.7
    assert min(partial[:3]) > 0.8


def test_shapes_of_another_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "a horse", "image": images.png(picture("one red circle"))}]
    with pytest.raises(RunError, match=r"'s' \(shapes\).*a horse"):
        run(ScoreConfig(rewards={"s": ShapesReward()}), ScoreInputs(samples=samples(tmp_path, rows)), context(tmp_path))


def test_jpeg_size() -> None:
    flat = np.full((32, 32, 3), 200, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    function, config = reward(JpegSizeReward(prefer="large", quality=90))
    small, large = (float(s or 0) for s in function(config, [flat, noise], ["", ""], [{}, {}]))
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, format="JPEG", quality=90)
    assert large == len(stream.getvalue()) / 1000
    assert large > small > 0
    function, config = reward(JpegSizeReward(prefer="small", quality=90))
    assert function(config, [flat, noise], ["", ""], [{}, {}]) == [-small, -large]
