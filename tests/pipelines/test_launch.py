"""Real worker processes running real stages."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.launch import Launcher, launcher
from schemas.engine import Resources
from schemas.errors import InputError, RunError, StageFailed, WorkerLost
from schemas.record import StageRequest
from tests.processes import gone, workers_of

ROOT = Path(__file__).parents[2]


def quiet(done: int, total: int, unit: str) -> None:
    """No progress is shown."""


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Launcher]:
    workers = launcher(Resources(), tmp_path / "logs", retries=0)
    yield workers
    workers.close()


@pytest.fixture
def prompts(tmp_path: Path) -> StageRequest:
    (tmp_path / "prompts.txt").write_text("one red circle\ntwo blue squares\n")
    return ordered(tmp_path, "prompts", {"path": str(tmp_path / "prompts.txt")}, {})


def ordered(tmp_path: Path, stage: str, config: dict[str, object], inputs: dict[str, object]) -> StageRequest:
    directory = tmp_path / f"{stage}.partial"
    directory.mkdir(exist_ok=True)
    return StageRequest(stage=stage, node=stage, config=config, inputs=inputs, directory=str(directory))


def long_request(tmp_path: Path, workers: Launcher, prompts: StageRequest, per_prompt: int) -> StageRequest:
    """A render stage that reports progress for as long as the test needs."""
    chosen = workers.run(prompts, quiet).outputs["chosen"]
    located = {**chosen, "path": str(Path(prompts.directory) / chosen["path"])}
    return ordered(tmp_path, "render", {"per_prompt": per_prompt}, {"prompts": located})


def test_stage_runs_in_a_warm_worker_without_torch(local: Launcher, prompts: StageRequest) -> None:
    first = local.run(prompts, quiet)
    assert (first.outputs["chosen"]["rows"], first.outputs["chosen"]["path"]) == (2, "chosen")
    (worker,) = workers_of(os.getpid())
    assert local.run(prompts, quiet).outputs["chosen"]["digest"] == first.outputs["chosen"]["digest"]
    assert workers_of(os.getpid()) == [worker]
    assert "libtorch" not in Path(f"/proc/{worker}/maps").read_text()
    environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert {b"PYTHONSAFEPATH=1", b"WORLD_SIZE=1", b"RANK=0"} <= set(environment)
    local.close()
    assert gone([worker], 1)


def test_users_errors_keep_their_class_and_the_next_request_works(
    local: Launcher, prompts: StageRequest, tmp_path: Path
) -> None:
    lost = prompts.model_copy(update={"config": {"path": str(tmp_path / "missing.txt")}})
    with pytest.raises(InputError, match=r"missing\.txt") as caught:
        local.run(lost, quiet)
    assert "Traceback" not in str(caught.value)
    assert local.run(prompts, quiet).outputs["chosen"]["rows"] == 2


def test_other_errors_come_with_rank_and_traceback(local: Launcher, prompts: StageRequest) -> None:
    wrong = prompts.model_copy(update={"config": {"pth": "x"}})
    with pytest.raises(StageFailed, match=r"(?s)prompts failed on rank 0.*pth.*Traceback.*light-rank0\.log"):
        local.run(wrong, quiet)


def test_a_killed_worker_is_lost(local: Launcher, prompts: StageRequest, tmp_path: Path) -> None:
    request = long_request(tmp_path, local, prompts, 200_000)

    def kill(done: int, total: int, unit: str) -> None:
        for pid in workers_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(WorkerLost, match=r"render lost its worker: rank 0 was killed by SIGKILL"):
        local.run(request, kill)
    assert local.run(prompts, quiet).outputs["chosen"]["rows"] == 2


def test_a_lost_worker_is_worth_another_try(tmp_path: Path, prompts: StageRequest) -> None:
    workers = launcher(Resources(), tmp_path / "logs", retries=1)
    try:
        request = long_request(tmp_path, workers, prompts, 200)
        said: list[str] = []

        def kill_once(done: int, total: int, unit: str) -> None:
            if not total:
                said.append(unit)
            elif not said and done < total:
                for pid in workers_of(os.getpid()):
                    os.kill(pid, signal.SIGKILL)

        assert workers.run(request, kill_once).outputs["samples"]["rows"] == 400
        assert len(said) == 1
        assert "trying again on fresh workers" in said[0]
    finally:
        workers.close()


def test_silence_beyond_the_timeout_counts_as_lost(tmp_path: Path, prompts: StageRequest) -> None:
    workers = launcher(Resources(timeout=0.01), tmp_path / "logs", retries=0)
    try:
        with pytest.raises(WorkerLost, match=r"no progress for 0\.01 s \(resources\.timeout\)"):
            workers.run(prompts, quiet)
        assert workers_of(os.getpid()) == []
    finally:
        workers.close()


def test_close_ends_a_worker_amid_a_request(local: Launcher, prompts: StageRequest, tmp_path: Path) -> None:
    request = long_request(tmp_path, local, prompts, 200_000)
    pids = workers_of(os.getpid())
    with pytest.raises(RunError, match="render was stopped") as caught:
        local.run(request, lambda done, total, unit: local.close())
    assert not isinstance(caught.value, WorkerLost)  # that would be worth another try
    assert gone(pids, 1)


def test_workers_die_with_their_killed_parent(tmp_path: Path, prompts: StageRequest) -> None:
    code = """
import sys
from pathlib import Path
from pipelines.launch import launcher
from schemas.engine import Resources
from schemas.record import StageRequest
request = StageRequest.model_validate_json(Path(sys.argv[1]).read_text())
workers = launcher(Resources(), Path(sys.argv[2]), 0)
chosen = workers.run(request, lambda *_: None).outputs["chosen"]
located = {**chosen, "path": request.directory + "/" + chosen["path"]}
many = {"stage": "render", "config": {"per_prompt": 200000}, "inputs": {"prompts": located}}
request = request.model_copy(update=many)
workers.run(request, lambda *_: print("working", flush=True))
"""
    file = tmp_path / "request.json"
    file.write_text(prompts.model_dump_json())
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "logs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "working\n"
        pids = workers_of(parent.pid)
        assert len(pids) == 1
        parent.kill()
        parent.wait()
    assert gone(pids)


def test_inline_runs_here(tmp_path: Path, prompts: StageRequest) -> None:
    inline = launcher(Resources(launcher="inline"), tmp_path / "logs", 0)
    assert inline.run(prompts, quiet).outputs["chosen"]["rows"] == 2
    assert workers_of(os.getpid()) == []
    inline.close()


def alone(file: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stages", str(file)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_stage_runs_alone_from_its_request(prompts: StageRequest, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(prompts.model_dump_json())
    done = alone(file)
    assert done.returncode == 0, done.stderr
    assert (Path(prompts.directory) / "outputs.json").read_text() == done.stdout
    file.write_text(prompts.model_copy(update={"config": {"path": "/missing.txt"}}).model_dump_json())
    done = alone(file)
    assert done.returncode == 2
    assert "missing.txt" in done.stderr
    assert "Traceback" not in done.stderr
    assert alone(tmp_path / "no.json").returncode == 2
