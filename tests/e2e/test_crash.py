"""Kills at random moments, again and again: the run still ends as if nothing had happened.

A short form of what `REWARDFLOW_CRASH_SEEDS=10 REWARDFLOW_CRASH_PREFECT=5 pytest tests/e2e/test_crash.py -s` does in
full: 10 kills a seed, and 5 of a run through Prefect.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.prefect_server import environment, running_server
from tests.processes import MARK, gone, marked, workers_of

ROOT = Path(__file__).parents[2]
KILLS = 10
SEEDS = int(os.environ.get("REWARDFLOW_CRASH_SEEDS", "2"))
THROUGH_PREFECT = int(os.environ.get("REWARDFLOW_CRASH_PREFECT", "2"))  # kills
pytestmark = pytest.mark.slow

# Stages that load no torch, so that a start takes a second; with retention, so that pruning is killed too.
FLOWS = """\
flows:
  micro:
    description: Choose, draw, score and judge, again and again.
    stages:
      all: {stage: prompts, path: "package:stages.shapes/prompts/all.txt"}
    loop:
      times: 200
      body:
        chosen: {stage: prompts, path: "package:stages.shapes/prompts/all.txt", choose: 3}
        render: {prompts: chosen.chosen, per_prompt: 8}
        score: {samples: render.samples, rewards: {size: {kind: jpeg_size}, right: {kind: shapes}}}
        advantage: {rewards: score.rewards}
    keep: {last: 2, every: 10}
"""
COMMAND = [sys.executable, "-m", "pipelines.cli", "run", "micro"]


def started(folder: Path, *words: str, env: Mapping[str, str] = os.environ) -> "subprocess.Popen[bytes]":
    """The command, without Prefect unless words say otherwise."""
    (folder / "flows.yaml").write_text(FLOWS)
    env = {**env, "PYTHONPATH": str(ROOT), MARK: str(folder)}
    command = [*COMMAND, *(words or ["--plain"])]
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)


def outcome(run: Path) -> dict[str, Any]:
    """Every file by its place; records without what may differ between equal runs."""
    found: dict[str, Any] = {}
    for path in run.rglob("*"):
        if path.is_dir() or path.parent.name == "logs" or path.name in ("lock", "run.json", "request.json"):
            continue
        name = str(path.relative_to(run))
        found[name] = path.read_bytes()
        if path.name == "record.json":
            found[name] = {key: value for key, value in json.loads(found[name]).items() if key != "volatile"}
    return found


def lived(dice: random.Random, run: Path, before: int) -> None:
    """Returns at a random moment: of its start, or, three times of four, of its work, however slow the machine is."""
    end = time.monotonic() + 60
    if dice.random() < 0.75:
        while committed(run) <= before and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 1))
    else:
        time.sleep(dice.uniform(0.1, 1.5))


def committed(run: Path) -> int:
    return sum(1 for _ in run.glob("*/*/record.json"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    assert started(folder).wait(120) == 0, (folder / "out.txt").read_text()
    return outcome(folder / "runs" / "micro")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_kills_change_nothing(whole: dict[str, Any], tmp_path: Path, seed: int) -> None:
    dice, run = random.Random(seed), tmp_path / "runs" / "micro"
    fruitful = kills = 0
    while kills < KILLS:
        before, command = committed(run), started(tmp_path)
        lived(dice, run, before)
        if dice.random() < 0.3 and (workers := workers_of(command.pid)):
            os.kill(dice.choice(workers), signal.SIGKILL)  # one worker alone: the command goes on with fresh ones
            kills, fruitful = kills + 1, fruitful + (committed(run) > before)
            before = committed(run)
            time.sleep(dice.uniform(0.1, 1.0))
        left = marked(str(tmp_path))
        if command.poll() is not None:
            break
        os.killpg(command.pid, signal.SIGKILL)
        command.wait(10)
        kills += 1
        assert gone(left, 20)
        fruitful += committed(run) > before
    command = started(tmp_path)
    assert command.wait(120) == 0, (tmp_path / "out.txt").read_text()
    print(f"seed {seed}: {kills} kills, {fruitful} of them after something new was committed")
    assert fruitful >= kills / 2
    assert outcome(run) == whole
    assert "Traceback" not in (tmp_path / "out.txt").read_text()


def test_the_same_through_prefect(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    dice, run, words = random.Random(0), tmp_path / "runs" / "micro", ("--set", "times=60")
    plain = tmp_path_factory.mktemp("plain")
    assert started(plain, "--plain", *words).wait(120) == 0, (plain / "out.txt").read_text()
    fruitful = 0
    with running_server(tmp_path_factory.mktemp("prefect")) as server:
        env = environment(server.home, PREFECT_API_URL=server.url)
        for _ in range(THROUGH_PREFECT):
            before, command = committed(run), started(tmp_path, *words, env=env)
            lived(dice, run, before)
            left = marked(str(tmp_path))
            assert command.poll() is None, (tmp_path / "out.txt").read_text()
            os.killpg(command.pid, signal.SIGKILL)
            command.wait(10)
            assert gone(left, 20)
            fruitful += committed(run) > before
        assert started(tmp_path, *words, env=env).wait(240) == 0, (tmp_path / "out.txt").read_text()
    print(f"through Prefect: {THROUGH_PREFECT} kills, {fruitful} of them after something new was committed")
    assert fruitful >= THROUGH_PREFECT / 2
    assert outcome(run) == outcome(plain / "runs" / "micro")
    assert "Traceback" not in (tmp_path / "out.txt").read_text()
