"""kill -9 of all processes amid a stage, then the same command: it ends as the run that nothing broke."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.pipelines import prefect_server
from tests.processes import MARK, gone, marked

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

FLOWS = """\
python_path: [.]
external: {held: {target: "held_reward:held"}}
flows:
  small:
    description: Two small iterations.
    seed: 5
    model: {kind: sd3, path: "package:stages.shapes/pipeline", max_sequence_length: 8}
    stages:
      prompts: {path: "package:stages.shapes/prompts/heldout.txt"}
      encode: {prompts: prompts.chosen}
    loop:
      times: 2
      carry: {policy: {start: model, next: update.policy}}
      body:
        sample:
          prompts: prompts.chosen
          conditioning: encode.embeddings
          policy: carry.policy
          per_prompt: 4
          sampler: {kind: flow_sde, steps: 6, shared_noise: true}
        score: {samples: sample.samples, rewards: {size: {kind: jpeg_size}, held: {kind: external, name: held}}}
        advantage: {rewards: score.rewards}
        update:
          trajectory: sample.trajectory
          conditioning: encode.embeddings
          advantages: advantage.advantages
          policy: carry.policy
          loss: {kind: grpo, clip: 1e-3}
          epochs: 2
          steps: 3
          ema: {decay: 0.9}
    after:
      export: {policy: loop.last(update.policy)}
    resources: {processes: 1, threads: 1, micro_batch: {sample: 2, update: 8}, shard_micro_batches: 1}
"""
# When a file says so it waits for ever in the second iteration, with two shards of scores written.
REWARD = """\
import time
from pathlib import Path

def held(settings, pictures, prompts, metadata):
    if Path("hold").exists() and Path("runs/small/0001/score.partial/rewards/shard-00001.json").exists():
        Path("started").touch()
        time.sleep(600)
    return [float(picture.mean()) for picture in pictures]
"""
COMMAND = [sys.executable, "-m", "pipelines.cli", "run", "small"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing broke."""
    folder = prepared(tmp_path_factory.mktemp("whole"))
    finish(folder, "--plain")
    return folder / "runs" / "small"


def prepared(folder: Path) -> Path:
    (folder / "flows.yaml").write_text(FLOWS)
    (folder / "held_reward.py").write_text(REWARD)
    return folder


def environment(folder: Path) -> dict[str, str]:
    return prefect_server.environment(folder / "prefect", **{"PYTHONPATH": str(ROOT), MARK: str(folder)})


def finish(folder: Path, *words: str) -> str:
    env = environment(folder)
    done = subprocess.run([*COMMAND, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def killed_when(folder: Path, amid: Callable[[], bool], *words: str) -> None:
    """Starts the command as a terminal does, in a group of its own, and kills that group."""
    with (folder / "out.txt").open("w") as out:
        command = subprocess.Popen(
            [*COMMAND, *words], cwd=folder, env=environment(folder), stdout=out, stderr=out, start_new_session=True
        )
    end = time.monotonic() + 200
    while not amid():
        assert command.poll() is None, (folder / "out.txt").read_text()
        assert time.monotonic() < end, (folder / "out.txt").read_text()
        time.sleep(0.005)
    os.killpg(command.pid, signal.SIGSTOP)  # looking for processes takes longer than a stage's last moments
    left = marked(str(folder))
    os.killpg(command.pid, signal.SIGKILL)
    assert command.wait(10) == -signal.SIGKILL
    assert len(left) >= 2  # the command and a worker, at least
    assert gone(left, 20)
    assert marked(str(folder)) == []


def records(run: Path) -> dict[str, bytes]:
    """Committed records as they lie there, by place in the run."""
    found = [path for path in run.glob("*/*/record.json") if path.parent.suffix != ".partial"]
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def lasting(run: Path) -> dict[str, Any]:
    """Records without the part that may differ between equal runs."""
    found = {place: json.loads(record) for place, record in records(run).items()}
    return {place: {k: v for k, v in record.items() if k != "volatile"} for place, record in found.items()}


def files(run: Path) -> set[str]:
    """All files but the logs, for a launcher starts only the workers that it needs."""
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.parent.name != "logs"}


def assert_ends_like(run: Path, whole: Path, before: dict[str, bytes]) -> None:
    """What was committed stayed, the rest is as if nothing had happened, down to the last bit of the weights."""
    after = records(run)
    assert {place: after[place] for place in before} == before
    assert lasting(run) == lasting(whole)
    assert files(run) == files(whole)  # no scratch, nothing moved aside
    (file,) = (path.relative_to(run) for path in (run / "0001/update/policy").glob("*.safetensors"))
    ours, theirs = load_file(run / file), load_file(whole / file)
    assert {key.partition(".")[0] for key in ours} == {"raw", "ema", "optimizer"}
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


def amid_sample(folder: Path) -> bool:
    return (folder / "runs/small/0001/sample.partial/samples/shard-00002.arrow").exists()


def amid_score(folder: Path) -> bool:
    return (folder / "started").exists()


def amid_update(folder: Path) -> bool:
    """Halfway through its six optimizer steps, by the time that they took in the iteration before."""
    run = folder / "runs" / "small"
    try:
        begun = (run / "0001" / "update.partial" / "request.json").stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - begun > json.loads((run / "0000/update/record.json").read_bytes())["volatile"]["seconds"] / 2


def amid_saving(folder: Path) -> bool:
    """After the steps, when the policy's weights are being written."""
    return any((folder / "runs/small/0001/update.partial").glob("policy/*.safetensors"))


@pytest.mark.parametrize("amid", [amid_sample, amid_score, amid_update])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    whole: Path, tmp_path: Path, amid: Callable[[Path], bool]
) -> None:
    folder, run = prepared(tmp_path), tmp_path / "runs" / "small"
    stage = amid.__name__.removeprefix("amid_")
    if stage == "score":
        (folder / "hold").touch()
    killed_when(folder, lambda: amid(folder), "--plain")
    assert (run / "0001" / f"{stage}.partial").is_dir()
    assert not (run / "0001" / stage).exists()
    before = records(run)
    # The first two shards of each table are there; of the third sample shard the trajectory may be missing.
    partial = run / "0001" / f"{stage}.partial"
    shards = {path: path.stat().st_mtime_ns for path in partial.glob("*/shard-0000[01].arrow")}
    assert len(shards) == {"sample": 4, "score": 2, "update": 0}[stage]
    (folder / "hold").unlink(missing_ok=True)
    said = finish(folder, "--plain")
    assert f"reused {len(before)} finished stages" in said
    assert_ends_like(run, whole, before)
    for path, time_written in shards.items():  # whole shards of the unfinished stage were taken up
        kept = run / "0001" / stage / path.relative_to(partial)
        assert kept.stat().st_mtime_ns == time_written


def test_the_same_through_prefect_amid_the_saving_of_a_policy(whole: Path, tmp_path: Path) -> None:
    folder, run = prepared(tmp_path), tmp_path / "runs" / "small"
    killed_when(folder, lambda: amid_saving(folder))
    assert not (run / "0001" / "update").exists()
    before = records(run)
    said = finish(folder)
    assert f"reused {len(before)} finished stages" in said
    assert_ends_like(run, whole, before)
