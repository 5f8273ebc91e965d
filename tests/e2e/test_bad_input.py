"""Bad input as a user meets it: a message that names file, field and remedy, exit code 2, no traceback."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOW = """
flows:
  small:
    description: A small flow.
    model: {kind: sd3, path: MODEL, max_sequence_length: 8}
    stages:
      prompts: {path: PROMPTS}
      encode: {prompts: prompts.chosen}
    resources: {processes: 1}
"""


def rewardflow(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.cli", *words]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("two red circles\n")
    text = FLOW.replace("MODEL", "package:stages.shapes/pipeline").replace("PROMPTS", "prompts.txt")
    (tmp_path / "flows.yaml").write_text(text)
    return tmp_path


def test_unknown_field(folder: Path) -> None:
    file = folder / "flows.yaml"
    file.write_text(file.read_text().replace("prompts: {path", "prompts: {pth"))
    refused(rewardflow("plan", "small", cwd=folder), "flows.yaml:7", "pth", "path")


def test_unknown_flow(folder: Path) -> None:
    refused(rewardflow("plan", "smal", cwd=folder), "smal", "small")


def test_missing_prompt_file(folder: Path) -> None:
    (folder / "prompts.txt").unlink()
    refused(rewardflow("run", "small", "--plain", cwd=folder), "prompts.txt", "path")
    assert not (folder / "runs").exists()


def test_empty_prompt_file(folder: Path) -> None:
    (folder / "prompts.txt").write_text("\n \n")
    refused(rewardflow("run", "small", "--plain", cwd=folder), "prompts.txt", "path")


def test_model_folder_without_transformer(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    file = folder / "flows.yaml"
    file.write_text(file.read_text().replace("package:stages.shapes/pipeline", "model"))
    refused(rewardflow("run", "small", "--plain", cwd=folder), "model", "transformer", "path")


def test_world_size_zero(folder: Path) -> None:
    result = rewardflow("run", "small", "--plain", "--set", "resources.processes=0", cwd=folder)
    refused(result, "resources.processes", "1")


def test_no_flows_yaml(tmp_path: Path) -> None:
    refused(rewardflow("plan", "small", cwd=tmp_path), "flows.yaml", "--file")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "one bit"])
def test_broken_shard_is_named_and_nothing_else_is_lost(folder: Path, damage: str) -> None:
    more = """
  pictures:
    description: Draw and score.
    stages:
      prompts: {path: prompts.txt}
      render: {prompts: prompts.chosen, per_prompt: 4}
      score: {samples: render.samples, rewards: {size: {kind: jpeg_size}}}
    resources: {processes: 1}
"""
    file = folder / "flows.yaml"
    file.write_text(file.read_text() + more)
    words = ("run", "pictures", "--plain", "--as", "one")
    assert rewardflow(*words, cwd=folder).returncode == 0
    before = folder / "runs" / "one" / "before"
    shard = next((before / "render").rglob("*.arrow"))
    whole = shard.read_bytes()
    wrong = bytearray(whole)
    wrong[whole.index(b"\x89PNG") + 40] ^= 1
    shard.write_bytes(whole[: len(whole) // 2] if damage == "cut" else wrong)
    shutil.rmtree(before / "score")
    stage = before / "render"
    refused(rewardflow(*words, cwd=folder), shard.name, f"Delete the stage's directory {stage.resolve()} and run again")
    shutil.rmtree(stage)  # as told: it is made again, and nothing else is
    done = rewardflow(*words, cwd=folder)
    assert done.returncode == 0
    assert "reused 1 finished stages" in done.stdout
    assert shard.read_bytes() == whole


def test_a_runs_folder_that_is_a_file(folder: Path) -> None:
    (folder / "runs").write_text("")
    refused(rewardflow("run", "small", "--plain", cwd=folder), "runs/small", "--runs")
