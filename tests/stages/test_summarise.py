"""The summary against NumPy, and that its pictures are drawn."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from schemas.artifacts import HistoryRef, RewardsTable, SamplesTable
from schemas.contracts import SummariseConfig, SummariseInputs
from schemas.engine import Resources
from schemas.errors import InputError
from schemas.tables import rewards_schema, samples_schema
from stages.context import StageContext
from stages.shapes.render import render
from stages.shapes.scenes import ALL, parse
from stages.store import images
from stages.store.tables import TableWriter
from stages.summarise import run

PER_PROMPT = 8
HELDOUT = ALL[::6]


def context(directory: Path) -> StageContext:
    return StageContext(directory, "summarise", 0, None, Resources(), 8)


def rewards(directory: Path, name: str, values: list[float | None]) -> RewardsTable:
    writer = TableWriter(directory, name, rewards_schema(("strict", "other")))
    ids = [f"{HELDOUT[i // PER_PROMPT % len(HELDOUT)]}-{i % PER_PROMPT}" for i in range(len(values))]
    columns = {"sample_id": ids, "prompt_id": [i.rsplit("-")[0] for i in ids], "other": [0.0] * len(values)}
    writer.write(0, {**columns, "strict": values})
    return writer.ref(RewardsTable, 1, weights={"strict": 1.0, "other": 0.0}).under(directory)


def samples(directory: Path, name: str, right: list[float]) -> SamplesTable:
    """Pictures of the held-out prompts; where `right` is 0 those of another prompt."""
    rows = []
    for i, good in enumerate(right):
        prompt, index = HELDOUT[i // PER_PROMPT], i % PER_PROMPT
        shown = prompt if good else HELDOUT[(i + 1) % len(HELDOUT)]
        picture = images.png(render(parse(shown), np.random.default_rng(i)))
        keys = {"sample_id": f"{prompt}-{index}", "prompt_id": prompt, "prompt": prompt, "metadata": "{}"}
        rows.append({**keys, "index": index, "seed": i, "image": picture})
    writer = TableWriter(directory, name, samples_schema())
    writer.write(0, {column: [row[column] for row in rows] for column in rows[0]})
    return writer.ref(SamplesTable, 1).under(directory)


def test_table_of_means_and_errors(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    before, after = generator.random(40), generator.random(48) + 0.3
    inputs = SummariseInputs(
        before={"train": rewards(tmp_path, "b", [*before, None]), "held-out": rewards(tmp_path, "c", [0.0, 0.0])},
        after={"train": rewards(tmp_path, "a", [*after]), "held-out": rewards(tmp_path, "d", [1.0, 1.0])},
        curves={"reward": HistoryRef(points=((0, 0.25), (1, 0.75), (2, 0.5)))},
    )
    outputs = run(SummariseConfig(metric="strict"), inputs, context(tmp_path))
    error = np.sqrt(before.var(ddof=1) / 40 + after.var(ddof=1) / 48)
    assert outputs.metrics == pytest.approx(
        {
            "train/before": before.mean(),
            "train/after": after.mean(),
            "train/gain": after.mean() - before.mean(),
            "train/standard_error": error,
            "held-out/before": 0.0,
            "held-out/after": 1.0,
            "held-out/gain": 1.0,
            "held-out/standard_error": 0.0,
        }
    )
    text = (tmp_path / outputs.summary.path).read_text()
    gain = after.mean() - before.mean()
    assert f"**{gain:+.3f}** ± {error:.3f} | 40, then 48 |" in text
    assert "| held-out | 0.000 ± 0.000 | 1.000 ± 0.000 | **+1.000** ± 0.000 | 2 |" in text
    assert "Curve `reward`: 0.250 at iteration 0, best 0.750 at 1, last 0.500 at 2." in text
    assert outputs.grid is None
    assert outputs.curve is not None


def test_pictures_are_drawn(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    num = len(HELDOUT) * PER_PROMPT
    before = [float(x) for x in generator.random(num) < 0.4]
    after = [float(x) for x in generator.random(num) < 0.8]
    reward = [(i, 0.5 + 0.3 * (1 - np.exp(-i / 15)) + 0.02 * generator.normal()) for i in range(50)]
    outputs = run(
        SummariseConfig(metric="strict"),
        SummariseInputs(
            before={"held-out": rewards(tmp_path, "b", [*before])},
            after={"held-out": rewards(tmp_path, "a", [*after])},
            samples_before=samples(tmp_path, "sb", before),
            samples_after=samples(tmp_path, "sa", after),
            curves={"reward": HistoryRef(points=tuple(reward)), "validation": HistoryRef(points=tuple(reward[::5]))},
        ),
        context(tmp_path),
    )
    assert outputs.grid is not None
    assert outputs.curve is not None
    with Image.open(tmp_path / outputs.grid.path) as grid, Image.open(tmp_path / outputs.curve.path) as curve:
        assert grid.width > 1000
        assert curve.width > 1000
        colours = {colour for _, colour in grid.convert("RGB").getcolors(1 << 24) or []}
    # Frames tell right from wrong.
    assert {(0x2E, 0x8B, 0x57), (0xC8, 0x55, 0x3D)} <= colours


def test_wrong_orders(tmp_path: Path) -> None:
    table = rewards(tmp_path, "b", [1.0])
    with pytest.raises(InputError, match=r"`metric` 'strit'.*Did you mean 'strict'"):
        run(
            SummariseConfig(metric="strit"), SummariseInputs(before={"t": table}, after={"t": table}), context(tmp_path)
        )
    with pytest.raises(InputError, match=r"before: t; after: u"):
        run(
            SummariseConfig(metric="strict"),
            SummariseInputs(before={"t": table}, after={"u": table}),
            context(tmp_path),
        )
