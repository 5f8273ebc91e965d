"""A small flow on two ranks, the command that runs it, and what of its records must not depend on where ranks are."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import MARK

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0  # seconds, on a busy machine
FLOWS = """\
flows:
  small:
    description: One iteration, of which sampling takes some seconds.
    seed: 5
    model: {kind: sd3, path: "package:stages.shapes/pipeline", max_sequence_length: 8, lora: {rank: 4}}
    stages:
      prompts: {path: "package:stages.shapes/prompts/heldout.txt"}
      encode: {prompts: prompts.chosen}
    loop:
      times: 1
      carry: {policy: {start: model, next: update.policy}}
      body:
        sample:
          prompts: prompts.chosen
          conditioning: encode.embeddings
          policy: carry.policy
          per_prompt: 12
          sampler: {kind: flow_sde, steps: 8, shared_noise: true, window: {kind: random, size: 1, range: [0, 5]}}
        score: {samples: sample.samples, rewards: {size: {kind: jpeg_size}}}
        advantage: {rewards: score.rewards}
        update:
          trajectory: sample.trajectory
          conditioning: encode.embeddings
          advantages: advantage.advantages
          policy: carry.policy
          loss: {kind: grpo, clip: 1e-3}
    resources:
      {processes: 2, threads: 1, preflight: false, shard_micro_batches: 1, micro_batch: {sample: 2, update: 8}}
"""


def environment(folder: Path) -> dict[str, str]:
    """One thread; everything that is started is marked, but for workers of a Ray cluster or of torchrun."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(folder)}


def started(folder: Path, *sets: str) -> "subprocess.Popen[bytes]":
    """The command, in a group of its own; what it says is in out.txt."""
    (folder / "flows.yaml").write_text(FLOWS)
    words = [word for setting in sets for word in ("--set", setting)]
    command = [sys.executable, "-m", "pipelines.cli", "run", "small", "--plain", *words]
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=out, stderr=out, start_new_session=True
        )


def finished(folder: Path, command: "subprocess.Popen[bytes]") -> str:
    """What it said, once it has ended well."""
    code = command.wait(PATIENCE)
    said = (folder / "out.txt").read_text()
    assert code == 0, said
    return said


def until(condition: Callable[[], Any], command: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Waits while the command runs."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert command.poll() is None, (folder / "out.txt").read_text()
        assert time.monotonic() < end, (folder / "out.txt").read_text()
        time.sleep(0.02)


def amid_sample(folder: Path, command: "subprocess.Popen[bytes]") -> None:
    """Returns when some of the samples are there, and not all."""
    partial = folder / "runs/small/0000/sample.partial"
    until((partial / "samples/shard-00002.arrow").exists, command, folder)
    assert partial.is_dir()


def stopped(folder: Path, command: "subprocess.Popen[bytes]", sent: signal.Signals) -> None:
    """Ends the command by a signal."""
    os.kill(command.pid, sent)
    code = command.wait(60)
    assert code == (-signal.SIGKILL if sent == signal.SIGKILL else 130), (folder / "out.txt").read_text()


def lasting(folder: Path) -> dict[str, Any]:
    """Records without the part that may differ between equal runs; digests of all tables and weights are in them."""
    run = folder / "runs" / "small"
    found = {str(path.relative_to(run)): json.loads(path.read_bytes()) for path in run.glob("*/*/record.json")}
    return {place: {k: v for k, v in record.items() if k != "volatile"} for place, record in found.items()}
