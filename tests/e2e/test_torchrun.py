"""Workers of two torchrun agents with a c10d rendezvous: equal results, and nothing left however a run ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.crews.local import free_port
from pipelines.launch import Launcher, launcher
from schemas.engine import Resources
from schemas.errors import RewardflowError, StageFailed, UserError, WorkerLost
from schemas.record import StageRequest
from tests.e2e.two_ranks import ROOT, amid_sample, environment, finished, lasting, started, stopped
from tests.processes import MARK, alive, gone, marked

pytestmark = pytest.mark.slow
TORCHRUN = "resources.launcher=torchrun"
HEARTBEAT = 10.0  # seconds


class Agents:
    """torchrun twice, as on two nodes, each with one worker. They are marked with the mailbox."""

    def __init__(self, mailbox: Path, *options: str, ranks: int = 2) -> None:
        self.mark, port = str(mailbox), free_port()
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "small")
        words = ("--nnodes", str(ranks), "--nproc-per-node", "1", "--max-restarts", "3", *meeting)
        command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "stages.worker"]
        env = {**environment(mailbox), MARK: self.mark}
        mailbox.parent.mkdir(parents=True, exist_ok=True)
        self.said = mailbox.parent / "agents.txt"
        with self.said.open("wb") as out:
            self.processes = [
                subprocess.Popen(
                    [*command, "--mailbox", str(mailbox), *options], cwd=ROOT, env=env, stdout=out, stderr=out
                )
                for _ in range(ranks)
            ]

    def workers(self) -> list[int]:
        """Live worker processes, not the agents."""
        agents = {process.pid for process in self.processes}
        return [pid for pid in marked(self.mark) if pid not in agents and _is_worker(pid)]

    def codes(self, seconds: float = 60) -> list[int]:
        """Exit codes, once all have left; none of what they started is left then."""
        found = [process.wait(seconds) for process in self.processes]
        assert gone(marked(self.mark), 5)
        return found


def _is_worker(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"stages.worker" in words and b"torch.distributed.run" not in words


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(*options: str, ranks: int = 2) -> Agents:
        made.append(Agents(tmp_path / "runs/small/mail", *options, ranks=ranks))
        return made[-1]

    yield make
    for group in made:
        for pid in marked(group.mark):
            os.kill(pid, signal.SIGKILL)
        for process in group.processes:
            process.wait()


def within(condition: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_on_two_agents_equals_a_local_one(
    agents: Callable[..., Agents], local_records: dict[str, Any], tmp_path: Path
) -> None:
    group = agents()
    finished(tmp_path, started(tmp_path, TORCHRUN))
    assert group.codes() == [0, 0]
    assert lasting(tmp_path) == local_records
    for rank in range(2):
        log = (tmp_path / f"runs/small/logs/compute-rank{rank}.log").read_text()
        assert "stages.worker: leaves: the foreman has no more work" in log
    # The same command again, without workers: there is nothing for them to do.
    assert "reused 6 finished stages" in finished(tmp_path, started(tmp_path, TORCHRUN))


def test_a_killed_rank_is_started_anew_and_changes_nothing(
    agents: Callable[..., Agents], local_records: dict[str, Any], tmp_path: Path
) -> None:
    group = agents()
    command = started(tmp_path, TORCHRUN)
    amid_sample(tmp_path, command)
    first = group.workers()
    assert len(first) == 2
    os.kill(first[-1], signal.SIGKILL)
    said = finished(tmp_path, command)
    assert said.count("sample[0] lost its worker") == said.count("trying again on fresh workers") == 1
    assert group.codes() == [0, 0]
    assert lasting(tmp_path) == local_records


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_foreman(agents: Callable[..., Agents], tmp_path: Path, sent: signal.Signals) -> None:
    group = agents()
    command = started(tmp_path, TORCHRUN, f"resources.heartbeat={HEARTBEAT}")
    amid_sample(tmp_path, command)
    assert len(group.workers()) == 2
    stopped(tmp_path, command, sent)
    assert group.codes(HEARTBEAT + 30) == [0, 0]


def test_no_worker_outlives_its_agents(agents: Callable[..., Agents], tmp_path: Path) -> None:
    group = agents("--wait", "300")
    within(lambda: len(group.workers()) == 2)
    workers = group.workers()
    for process in group.processes:
        process.kill()
    assert gone(workers, 10)


def test_workers_leave_when_no_foreman_comes(agents: Callable[..., Agents]) -> None:
    group = agents("--wait", "1", ranks=1)
    group.processes[0].wait(120)
    assert gone(marked(group.mark), 5)
    assert "no foreman in" in group.said.read_text()


def ended(workers: Launcher, request: StageRequest) -> RewardflowError:
    """The error that a request ends with."""
    with pytest.raises(RewardflowError) as caught:
        workers.run(request, lambda done, total, unit: None)
    return caught.value


def wrong(tmp_path: Path) -> StageRequest:
    """Fails on all ranks before any of them loads torch."""
    return StageRequest(stage="encode", node="encode", config={"pth": "x"}, inputs={}, directory=str(tmp_path))


def test_errors_of_a_stage_and_frozen_workers(agents: Callable[..., Agents], tmp_path: Path) -> None:
    """After either torchrun has started all workers anew, and the next request reaches those."""
    group = agents()
    resources = Resources(launcher="torchrun", processes=2, heartbeat=3)
    workers = launcher(resources, tmp_path / "runs/small/logs", retries=0)
    try:
        error = ended(workers, wrong(tmp_path))
        assert isinstance(error, StageFailed)
        assert str(error).count("Traceback") == 1
        assert "encode failed on rank " in str(error)
        assert "compute-rank" in str(error)
        first = group.workers()
        within(lambda: len(group.workers()) == 2 and not set(first) & set(group.workers()))
        within(lambda: len(list((tmp_path / "runs/small/mail").glob("*/*.replies"))) == 4)  # the new ones are there
        frozen = group.workers()[0]
        os.kill(frozen, signal.SIGSTOP)
        error = ended(workers, wrong(tmp_path))
        assert isinstance(error, WorkerLost)
        assert isinstance(ended(workers, wrong(tmp_path)), StageFailed)
        assert not alive(frozen)
    finally:
        workers.close()
    assert group.codes() == [0, 0]


def test_another_number_of_ranks_is_refused(agents: Callable[..., Agents], tmp_path: Path) -> None:
    group = agents()
    workers = launcher(Resources(launcher="torchrun", processes=3), tmp_path / "runs/small/logs", retries=0)
    try:
        error = ended(workers, wrong(tmp_path))
        assert isinstance(error, UserError)
        assert "resources.processes is 3, but torchrun started 2 workers" in str(error)
    finally:
        workers.close()
    assert group.codes() == [0, 0]


def test_the_foreman_does_not_wait_for_ever(tmp_path: Path) -> None:
    resources = Resources(launcher="torchrun", processes=2, start_timeout=0.5)
    workers = launcher(resources, tmp_path / "logs", retries=0)
    try:
        with pytest.raises(UserError, match="another command works with the torchrun workers of"):
            launcher(resources, tmp_path / "logs", retries=0)
        error = ended(workers, wrong(tmp_path))
        assert isinstance(error, UserError)
        assert "after 0.5 s (resources.start_timeout) still no rank 0, 1: torchrun" in str(error)
        assert f"-m stages.worker --mailbox {tmp_path}" in str(error)
    finally:
        workers.close()
