"""A reward of the user's own, from a folder beside flows.yaml to the advantages, through the command."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipelines.externals import code_digest
from schemas.assets import digest_of
from schemas.errors import UserError

ROOT = Path(__file__).parents[2]

FLOWS = """\
python_path: [.]
external:
  redness: {target: "my_rewards:redness", config: "my_configs:Redness"}
flows:
  red:
    description: Rendered pictures, scored by a function of one's own.
    stages:
      prompts: {path: prompts.jsonl}
      render: {prompts: prompts.chosen, per_prompt: 3}
      score:
        samples: render.samples
        rewards: {red: {kind: external, name: redness, settings: {scale: 2.0}, weight: 0.5}}
      advantage: {rewards: score.rewards}
"""
CONFIGS = """\
from schemas.strict import Strict

class Redness(Strict):
    scale: float
"""
REDNESS = """\
import json

def redness(settings, pictures, prompts, metadata):
    return [
        None if "unknown" in extra else settings["scale"] * float(picture[..., 0].mean()) / 255
        for picture, extra in zip(pictures, metadata)
    ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_configs.py").write_text(CONFIGS)
    (tmp_path / "my_rewards.py").write_text(REDNESS)
    lines = [
        {"prompt": "two red circles"},
        {"prompt": "one blue square", "unknown": True},
        {"prompt": "one red square"},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "flows.yaml").write_text(FLOWS)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.cli", "run", "red", "--plain", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def rows(folder: Path, stage: str, table: str) -> list[dict[str, Any]]:
    files = sorted((folder / "runs" / "red" / "before" / stage / table).glob("*.arrow"))
    return [row for file in files for row in pa.ipc.open_stream(file.read_bytes()).read_all().to_pylist()]


def test_scores_go_from_the_users_function_to_advantages(folder: Path) -> None:
    done = run(folder)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = {}
    for row in rows(folder, "render", "samples"):
        picture = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
        unknown = row["prompt"] == "one blue square"
        wanted[row["sample_id"]] = None if unknown else 2.0 * float(picture[..., 0].mean()) / 255
    scores = {row["sample_id"]: row["red"] for row in rows(folder, "score", "rewards")}
    assert len(scores) == 9
    assert scores == wanted  # what is missing is null, not 0
    table = rows(folder, "advantage", "advantages")
    advantages = [row for row in table if row["advantage"] is not None]
    assert len(table) == 9
    assert len(advantages) == 6  # a group without scores has none
    for prompt_id in {row["prompt_id"] for row in advantages}:
        group = [row for row in advantages if row["prompt_id"] == prompt_id]
        given = np.array([wanted[row["sample_id"]] for row in group]) * 0.5
        normalised = (given - given.mean()) / (given.std() + 1e-4)
        np.testing.assert_allclose([row["advantage"] for row in group], normalised, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("return [1.0] * 4 + [float('nan')] + [1.0] * 4", 1, "score: reward 'red' is nan for sample 'FIFTH'"),
        ("return [1.0]", 1, "score: reward 'red' gave 1 scores for 9 pictures"),
        ("raise KeyError('weights')", 1, "score: reward 'red' (external) failed: KeyError: 'weights'"),
        ("pass\n\nredness = None", 2, "module 'my_rewards' has no function 'redness'; mend `target`"),
        ("pass\n\nimport nowhere_at_all", 2, "cannot import 'my_rewards' of external reward 'redness'"),
        ("pass\n\nredness = nowhere", 2, "cannot import 'my_rewards' of external reward 'redness': NameError"),
    ],
)
def test_a_mistake_in_it_is_one_message(folder: Path, body: str, code: int, words: str) -> None:
    mine = folder / "my_rewards.py"
    mine.write_text(f"def redness(settings, pictures, prompts, metadata):\n    {body}\n")
    done = run(folder)
    assert done.returncode == code, done.stderr
    assert words.replace("FIFTH", rows(folder, "render", "samples")[4]["sample_id"]) in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "runs" / "red" / "before" / "render" / "record.json").is_file()
    mine.write_text(REDNESS)  # the same command goes on once it is mended
    again = run(folder)
    assert (again.returncode, again.stderr) == (0, "")
    assert "reused 2 finished stages" in again.stdout


@pytest.mark.slow
def test_its_source_is_identity(folder: Path) -> None:
    assert run(folder).returncode == 0
    mine = folder / "my_rewards.py"
    mine.write_text(REDNESS.replace("255", "510"))
    done = run(folder)
    assert done.returncode == 2
    assert "score was made by another recipe than the one wanted now:\n    config.rewards.red.code: " in done.stderr
    assert "source of the reward's module: it was edited" in done.stderr
    old = {row["sample_id"]: row["red"] for row in rows(folder, "score", "rewards")}
    done = run(folder, "--on-change", "rerun")
    assert done.returncode == 0, done.stderr
    for row in rows(folder, "score", "rewards"):
        half = old[row["sample_id"]]
        assert row["red"] == (None if half is None else pytest.approx(half / 2))
    assert "reused 2 finished stages" in done.stdout  # prompts and pictures


def test_a_module_that_is_no_python_is_refused_at_once(folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def redness(settings")
    done = run(folder)
    assert done.returncode == 2
    assert f"external.redness.target: {folder / 'my_rewards.py'} is no Python: '(' was never closed" in done.stderr
    assert not (folder / "runs").exists()


def test_a_module_that_is_nowhere_is_refused_at_once(folder: Path) -> None:
    (folder / "my_rewards.py").unlink()
    done = run(folder)
    assert done.returncode == 2
    assert "flows.yaml:3:" in done.stderr
    assert "external.redness.target: no module 'my_rewards'; its folder must be in `python_path` (now: " in done.stderr
    assert not (folder / "runs").exists()


def test_the_source_is_found_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "deep" / "down"
    package.mkdir(parents=True)
    for file in (tmp_path / "deep" / "__init__.py", package / "__init__.py"):
        file.write_text("raise RuntimeError('imported')\n")
    (package / "mine.py").write_text("raise RuntimeError('imported')\n")
    found = code_digest("deep.down.mine:score", [str(tmp_path)])
    assert found == digest_of(package / "mine.py")
    assert code_digest("deep.down:score", [str(tmp_path)]) == digest_of(package / "__init__.py")
    for missing in ("deep.up:score", "deeper:score", "deep.down.mine.more:score"):
        with pytest.raises(UserError, match="no module"):
            code_digest(missing, [str(tmp_path)])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("score.rewards.red.code=abc", "`code` follows from `external`"),
        ("score.rewards.red.target=os:system", "'target' names code, and code is named only in the file"),
        (
            "score.rewards.red={kind: external, name: redness, settings: {scale: 1.0}, target: 'os:system'}",
            "`target` follows from `external`",
        ),
        ("score.rewards.red.name=system", "no entry 'system' under `external`"),
    ],
)
def test_code_is_named_in_the_file_only(folder: Path, given: str, words: str) -> None:
    done = run(folder, "--set", given)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()
