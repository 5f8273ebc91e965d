"""From an empty folder to pictures: init, plan, run, samples, report and generate, as a user types them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.load import load
from tests.pipelines.test_views import Page

ROOT = Path(__file__).parents[2]
SMALL = ("times=2", "prompts.choose=2", "sample.per_prompt=2", "eval.per_prompt=2", "keep=null")
pytestmark = pytest.mark.slow


def rewardflow(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipelines.cli", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def done(folder: Path, *words: str) -> str:
    result = rewardflow(folder, *words)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `init` made, and a small run of its flow."""
    folder = tmp_path_factory.mktemp("everyday") / "mine"
    said = done(folder.parent, "init", "mine")
    assert said.splitlines()[-1] == "next: cd mine && rewardflow plan tune, then: rewardflow run tune --as first"
    words = [word for text in SMALL for word in ("--set", text)]
    assert "preflight passed" in done(folder, "run", "tune", "--as", "first", "--plain", *words)
    return folder


def pictures(folder: Path, place: str) -> dict[tuple[str, int], bytes]:
    """Prompt and index to PNG, read without the code under test."""
    shards = sorted((folder / "runs" / "first" / place / "samples").glob("*.arrow"))
    table = pa.concat_tables([pa.ipc.open_stream(shard.read_bytes()).read_all() for shard in shards])
    return {(row["prompt"], row["index"]): row["image"]["bytes"] for row in table.to_pylist()}


def test_the_template_is_a_checked_flow_and_is_not_written_over(folder: Path) -> None:
    assert "warning" not in done(folder, "plan", "tune")
    text = (folder / "flows.yaml").read_text()
    assert list(load(folder / "flows.yaml").spec.flows) == ["tune"]
    again = rewardflow(folder, "init")
    assert again.returncode == 2
    assert "flows.yaml, prompts/eval.txt, prompts/train.txt, rewards.py there already" in again.stderr
    assert (folder / "flows.yaml").read_text() == text


def test_generate_draws_what_the_evaluation_drew(folder: Path) -> None:
    """Byte for byte: of the base, and of the policy that the second evaluation was of."""
    for policy, evaluation in (("base", "0000/eval"), ("0", "0001/eval")):
        words = ("--prompts", "prompts/eval.txt", "--policy", policy, "--per-prompt", "2", "--out", f"out-{policy}")
        assert done(folder, "generate", "first", *words).endswith(f"in out-{policy}\n")
        drawn = pictures(folder, evaluation)
        lines = [json.loads(line) for line in (folder / f"out-{policy}" / "metadata.jsonl").read_text().splitlines()]
        assert len(lines) == len(drawn) == 8
        for line in lines:
            name = line["file_name"]
            index = int(name.removesuffix(".png").rpartition("-")[2])
            assert name == f"{line['prompt'].replace(' ', '-')}-{index}.png"
            assert (folder / f"out-{policy}" / name).read_bytes() == drawn[line["prompt"], index]
            assert (line["policy"], line["weights"], line["steps"]) == (
                "base" if policy == "base" else "0000",
                "ema",
                8,
            )
    assert (
        sorted(file.name for file in (folder / "out-0").iterdir())[0] == "metadata.jsonl"
    )  # no working folder is left


def test_generated_pictures_are_samples_that_can_be_imported(folder: Path) -> None:
    words = ("--prompt", "two red circles", "--per-prompt", "1", "--out", "few", "--policy", "last")
    done(folder, "generate", "first", *words)
    done(folder, "generate", "first", *words, "--seed", "5", "--weights", "raw", "--steps", "4")
    assert "2 pictures of 1 prompts" in done(
        folder, "import-samples", "few", "--as", "taken", "--rewards", "size=jpeg_size"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--prompt", "x", "--policy", "7"),
            "--policy 7: wants best, last, base or the iteration that made it (0 to 1)",
        ),
        (("--prompt", "x", "--per-prompt", "0"), "--per-prompt 0: input should be greater than or equal to 1"),
        (("--prompt", " "), "--prompt: wants words, got none"),
        (("--prompt", "x", "--seed", "-1"), "--seed -1: wants 0 or more"),
        (("--prompts", "prompts"), "--prompts: no file prompts; write the prompts there, one a line"),
        (("--prompt", "x", "--out", "rewards.py"), "--out rewards.py: is a file; name an empty or a new folder"),
        (("--prompt", "x", "--out", "prompts"), "--out prompts: holds other files; name an empty or a new folder"),
    ],
)
def test_generate_says_what_it_cannot(folder: Path, words: tuple[str, ...], message: str) -> None:
    result = rewardflow(folder, "generate", "first", *words)
    assert (result.returncode, result.stderr) == (2, f"rewardflow: {message}\n")


def alone(folder: Path, *words: str) -> tuple[dict[str, Any], Path]:
    """`python -m stages`: outputs, and where they lie."""
    command = [sys.executable, "-m", "stages", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    place = next(line for line in result.stderr.splitlines() if line.startswith("outputs go to "))
    return json.loads(result.stdout), Path(place.removeprefix("outputs go to "))


def test_a_finished_stage_runs_alone_also_in_a_copied_run(folder: Path) -> None:
    first, copied = folder / "runs" / "first", folder / "elsewhere" / "copied"
    record = json.loads((first / "0001" / "score" / "record.json").read_bytes())
    out, place = alone(folder, "runs/first/0001/score/request.json")
    assert out["rewards"]["digest"] == record["outputs"]["rewards"]["digest"]
    assert place == first / "alone" / "0001-score"
    assert alone(folder, "runs/first/0001/score/request.json")[1] == first / "alone" / "0001-score-2"
    shutil.copytree(first, copied)
    first.rename(first.with_name("gone"))
    try:
        out, place = alone(folder, "elsewhere/copied/0001/score/request.json", "--out", "new")
        assert out["rewards"]["digest"] == record["outputs"]["rewards"]["digest"]
        assert (place, (folder / "new" / "outputs.json").is_file()) == (Path("new"), True)
        refused = rewardflow(folder, "show", "first")
        assert refused.returncode == 2
        shown = json.loads(done(folder, "show", "copied", "--json", "--runs", "elsewhere"))
        assert (shown["state"], shown["iterations"], shown["damaged"]) == ("complete", 2, {})
    finally:
        first.with_name("gone").rename(first)


def test_a_copied_run_goes_on_and_is_run_again(folder: Path) -> None:
    """As on another machine: the place of the first run is gone."""
    first, moved = folder / "runs" / "first", folder / "moved"
    shutil.copytree(first, moved / "first")
    first.rename(first.with_name("gone"))
    words = [word for text in ("times=3", *SMALL[1:]) for word in ("--set", text)]
    try:
        said = done(folder, "run", "tune", "--as", "first", "--plain", "--runs", "moved", *words)
        assert "run moved/first is complete" in said
        assert not re.search(r"\[[01]\] +(sample|update) +done", said)
        assert re.search(r"\[2\] +update +done", said)
        again = (
            "--from",
            "1/advantage",
            "--as",
            "batch",
            "--set",
            "advantage.kind=global",
            "--runs",
            "moved",
            "--plain",
        )
        assert re.search(r"\[1\] +advantage +done", done(folder, "rerun", "first", *again))
        assert not first.exists()
    finally:
        first.with_name("gone").rename(first)


def test_the_report_of_a_training_run(folder: Path) -> None:
    done(folder, "report", "first")
    page = Page((folder / "runs" / "first" / "views" / "report.html").read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("data:image/") or link[1:] in page.ids for link in page.links)
    words = " ".join(page.words)
    for title in (
        "reward/zero_std_ratio",
        "score: spread",
        "train/grad_norm",
        "images_per_second",
        "eval: the same noise",
    ):
        assert title in words
    assert "0001/sample: best and worst of each group" in words
    assert done(folder, "samples", "first", "last").splitlines()[-1] == "runs/first/views/0001-sample.png"


def test_views_take_the_place_of_nothing_else(folder: Path) -> None:
    for words in (
        ("samples", "first", "0", "--out", "runs/first/run.json"),
        ("report", "first", "--out", "rewards.py"),
    ):
        refused = rewardflow(folder, *words)
        assert refused.returncode == 2
        assert re.search(r"--out \S+: wants the name of a \.(png|html) file", refused.stderr)


def test_the_best_of_a_rerun_is_what_was_evaluated(folder: Path) -> None:
    """Its evaluations were adopted: they speak of the first run's policies, not of those it made anew."""
    words = ("--from", "all/update", "--only", "--as", "other", "--set", "update.loss.beta=0.5", "--plain")
    done(folder, "rerun", "first", *words)
    drawn = {}
    for run in ("first", "other"):
        done(folder, "generate", run, "--prompts", "prompts/eval.txt", "--per-prompt", "1", "--out", f"best-{run}")
        drawn[run] = {file.name: file.read_bytes() for file in (folder / f"best-{run}").glob("*.png")}
    assert drawn["first"] == drawn["other"]
    policies = json.loads((folder / "best-other" / "metadata.jsonl").read_text().splitlines()[0])["policy"]
    assert policies in ("base", "first-0000", "first-0001")
    (folder / "apart").mkdir()
    shutil.copytree(folder / "runs" / "other", folder / "apart" / "other")
    lost = rewardflow(folder, "generate", "other", "--prompt", "x", "--runs", "apart")
    assert lost.returncode == 2
    assert "was adopted from" in lost.stderr
    assert "which is gone; bring that run back to its place" in lost.stderr
    assert "which is gone" in rewardflow(folder, "samples", "other", "0", "--runs", "apart").stderr
    assert "damaged" in done(folder, "runs", "--runs", "apart")
