"""sweep: every combination a run of its own, one table, and one that fails stops no other."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.cli import main

FLOWS = """\
flows:
  own:
    description: Scores.
    stages:
      pictures: {stage: import_samples, path: pictures}
      score: {samples: pictures.samples, rewards: {size: {kind: jpeg_size}}}
      advantage: {rewards: score.rewards}
"""
KIND, COLUMN = "score.rewards.size.prefer", "pictures.prompt_column"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pictures").mkdir()
    generator, lines = np.random.default_rng(0), []
    for index in range(3):
        pixels = generator.integers(100, 110 + 40 * index, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{index}.png")
        lines.append(json.dumps({"file_name": f"{index}.png", "prompt": "noise", "other": "more"}))
    (tmp_path / "pictures" / "metadata.jsonl").write_text("\n".join(lines))
    (tmp_path / "flows.yaml").write_text(FLOWS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def swept(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main(["sweep", "own", "--as", "s", "--plain", *words])
    said, errors = capfd.readouterr()
    return code, said, errors


@pytest.mark.slow
def test_each_combination_is_a_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    over = ("--over", f"{KIND}=small,large", "--over", f"{COLUMN}=[prompt, nothing]")
    code, said, errors = swept(capfd, *over, "--dry-run")
    assert (code, errors) == (0, "")
    assert [line.split()[:3] for line in said.splitlines()[1:]] == [
        ["s-1", "small", "prompt"],
        ["s-2", "small", "nothing"],
        ["s-3", "large", "prompt"],
        ["s-4", "large", "nothing"],
    ]
    assert not (folder / "runs").exists()

    code, said, errors = swept(capfd, *over)
    assert code == 2  # the input of both was wrong
    assert [line.split()[3] for line in said.splitlines()[-4:]] == ["complete", "failed", "complete", "failed"]
    assert [line.split(":")[1].strip() for line in errors.splitlines()] == ["s-2", "s-4"]
    code, said, errors = swept(capfd, *over, "--json")
    assert "sweep: s-2" in errors  # progress is not in the way of the JSON
    lines = json.loads(said)
    assert [line["state"] for line in lines] == ["complete", "failed", "complete", "failed"]
    assert lines[0]["results"]["score.size"] == pytest.approx(-lines[2]["results"]["score.size"])
    assert lines[2]["settings"] == {KIND: "large", COLUMN: "prompt"}
    plan = json.loads((folder / "runs" / "s-3" / "run.json").read_bytes())["plan"]
    assert plan["sets"] == [f'{KIND}="large"', f'{COLUMN}="prompt"']
    _, said, _ = swept(capfd, *over)
    assert said.count("reused 3 finished stages") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--over", f"{KIND}="), f"--over {KIND}=: wants PATH=VALUES, such as update.loss.beta=0.5,1"),
        (("--over", "seed"), "--over seed: wants PATH=VALUES, such as update.loss.beta=0.5,1"),
        (("--over", "seed=[1"), "--over seed=[1: the values are no YAML list: write 1,2,3 or [a, b]"),
        (("--over", "seed=[]"), "--over seed=[]: wants at least one value"),
        (("--over", "seed=1", "--over", "seed=2"), "--over seed: given twice; list all values in one --over"),
        (("--over", "seed=1,2", "--set", "seed=3"), "--over seed: given twice; list all values in one --over"),
        (("--over", "seed=1,1"), "--over seed=1,1: a value is there twice"),
        (("--over", f"{KIND}=small,vast"), "unknown value 'vast'. Known: large, small."),
    ],
)
def test_nothing_runs_when_a_value_is_wrong(
    folder: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, said, errors = swept(capfd, *words)
    assert (code, said) == (2, "")
    assert message in errors
    assert not (folder / "runs").exists()
