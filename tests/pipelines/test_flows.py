"""Flows under a real Prefect server: what it shows of a run, and how a run ends. Stages are real and load no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.prefect_server import Server, environment, running_server
from tests.processes import MARK, gone, marked

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

FLOWS = """\
python_path: [.]
external: {own: {target: "own_reward:score"}}
flows:
  pictures:
    description: Draw and score.
    stages:
      prompts: {path: prompts.txt}
      extra: {stage: prompts, path: prompts.txt, when: prompts.blank}
    loop:
      times: 2
      body:
        chosen: {stage: prompts, path: prompts.txt, choose: 2}
        render: {prompts: chosen.chosen, per_prompt: 2}
        own: {stage: score, samples: render.samples, rewards: {own: {kind: external, name: own}}}
        size: {stage: score, samples: render.samples, rewards: {size: {kind: jpeg_size}}}
    resources: {preflight: false}
"""
PREFLIGHT = ("--set", "resources.preflight=true")
TASKS = {"prompts", "extra", *(f"{node}[{i}]" for node in ("chosen", "render", "own", "size") for i in (0, 1))}
SLOWLY = "time.sleep(0.5)"
DIE_ONCE = "if not Path('died').exists():\n        Path('died').touch()\n        os.kill(os.getpid(), 9)"
FOR_EVER = "Path('started').touch()\n    time.sleep(600)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("prefect")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("one red circle\ntwo blue squares\nthree green triangles\n")
    (tmp_path / "flows.yaml").write_text(FLOWS)
    reward(tmp_path, SLOWLY)
    return tmp_path


def reward(folder: Path, body: str) -> None:
    """The user's own reward; workers run in the folder."""
    head = "import os, time\nfrom pathlib import Path\n\ndef score(settings, pictures, prompts, metadata):\n    "
    (folder / "own_reward.py").write_text(f"{head}{body}\n    return [float(len(p)) for p in prompts]\n")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pipelines.cli", "run", "pictures", *words]


def run(folder: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    env = {**env, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command(*words), cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def served(server: Server) -> dict[str, str]:
    return environment(server.home, PREFECT_API_URL=server.url)


def test_stage_runs_are_tasks_and_a_second_run_reuses_them(server: Server, folder: Path) -> None:
    first = run(folder, served(server), "--as", "twice", *PREFLIGHT)
    assert (first.returncode, first.stderr) == (0, "")
    again = run(folder, served(server), "--as", "twice")
    assert (again.returncode, again.stderr) == (0, "")
    assert "reused 10 finished stages" in again.stdout

    one, two = server.flow_runs("twice")
    assert (one["state"]["name"], two["state"]["name"]) == ("Completed", "Completed")
    tasks = server.task_runs(one, len(TASKS))
    states = {name: task["state"]["name"] for name, task in tasks.items()}
    assert states == {name: "Skipped" if name == "extra" else "Completed" for name in TASKS}
    assert "blank of prompts is 0" in tasks["extra"]["state"]["message"]
    assert {name: t["state"]["name"] for name, t in server.task_runs(two, len(TASKS)).items()} == dict.fromkeys(
        TASKS, "Reused"
    )
    # Branches run side by side, and after what they read.
    own, size, render = tasks["own[1]"], tasks["size[1]"], tasks["render[1]"]
    assert max(own["start_time"], size["start_time"]) < min(own["end_time"], size["end_time"])
    assert render["end_time"] <= min(own["start_time"], size["start_time"])
    assert [read["id"] for read in own["task_inputs"]["wait_for"]] == [render["id"]]
    # They share a worker, but waiting for it is no work.
    record = json.loads((folder / "runs" / "twice" / "0001" / "size" / "record.json").read_text())
    assert record["volatile"]["seconds"] < 0.4
    log = server.log(one)
    assert "[1]      own" in log
    assert "is complete" in log
    key = {"artifacts": {"flow_run_id": {"any_": [one["id"]]}}}
    assert [found["key"] for found in server.post("/artifacts/filter", key)] == ["pictures-summary"]


def test_a_lost_worker_is_tried_again(server: Server, folder: Path) -> None:
    reward(folder, DIE_ONCE)
    result = run(folder, served(server), "--as", "lost", "--set", "times=1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "preflight" not in result.stdout
    assert "own[0] lost its worker: rank 0 was killed by SIGKILL" in result.stdout
    assert "trying again on fresh workers" in result.stdout
    tasks = server.task_runs(server.flow_runs("lost")[0], 6)
    assert tasks["own[0]"]["state"]["name"] == "Completed"
    assert {name: task["run_count"] for name, task in tasks.items() if task["run_count"] != 1} == {"own[0]": 2}


def test_a_worker_lost_in_the_preflight_is_tried_again(server: Server, folder: Path) -> None:
    reward(folder, DIE_ONCE)
    result = run(folder, served(server), "--as", "early", "--set", "times=1", *PREFLIGHT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.index("own[0] lost its worker") < result.stdout.index("preflight passed")


def test_the_users_mistake_is_one_message_and_is_not_tried_again(server: Server, folder: Path) -> None:
    assert run(folder, served(server), "--as", "changed", "--set", "times=1").returncode == 0
    result = run(folder, served(server), "--as", "changed", "--set", "times=1", "--set", "render.per_prompt=3")
    assert result.returncode == 2
    assert result.stderr.startswith("rewardflow: render[0] was made by another recipe")
    assert "Traceback" not in result.stderr
    assert result.stdout == "reused 3 finished stages (before, iteration 0)\n"
    _, failed = server.flow_runs("changed")
    task = server.task_runs(failed, 4)["render[0]"]
    assert (failed["state"]["name"], task["state"]["name"], task["run_count"]) == ("Failed", "Failed", 1)


def test_a_server_that_does_not_answer(folder: Path) -> None:
    result = run(folder, environment(folder / "prefect", PREFECT_API_URL="http://127.0.0.1:9/api"))
    assert result.returncode == 2
    assert "no Prefect server answers at http://127.0.0.1:9/api (PREFECT_API_URL)" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "runs").exists()


def test_a_server_that_goes_away(folder: Path) -> None:
    reward(folder, "Path('started').touch()\n    time.sleep(4)")
    with running_server(folder / "prefect") as server:
        # Prefect's own five retries take three minutes.
        env = {**served(server), "PREFECT_CLIENT_MAX_RETRIES": "1"}
        process = begun(folder, env, "--as", "alone")
        waited_for(folder / "started", process)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stdout + stderr
    assert "Traceback" not in stderr
    assert f"rewardflow: Prefect's server at {server.url} failed" in stderr


def test_entries_of_the_file_are_flows_of_the_module(server: Server, folder: Path) -> None:
    code = """
from prefect.flows import load_flow_from_entrypoint
import pipelines.flows
flow = load_flow_from_entrypoint("pipelines.flows.pictures")
assert flow.name == "pictures" and flow.description == "Draw and score."
assert set(flow.parameters.properties) == {"run", "sets"}
assert not hasattr(pipelines.flows, "picture")
print(flow(run="direct", sets=["times=1"]))
"""
    env = {**served(server), "PYTHONPATH": str(ROOT), "REWARDFLOW_FILE": str(folder / "flows.yaml")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder / 'runs' / 'direct'}\n"
    assert (folder / "runs" / "direct" / "0000" / "own" / "record.json").is_file()


def begun(folder: Path, env: dict[str, str], *words: str) -> "subprocess.Popen[str]":
    """The command in a process group of its own, as a terminal starts it."""
    env = {**env, "PYTHONPATH": str(ROOT), MARK: str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command(*words), cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def waited_for(path: Path, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_and_then_to_the_end_with_a_server_of_its_own(server: Server, folder: Path) -> None:
    reward(folder, FOR_EVER)
    env = environment(server.home)
    process = begun(folder, env, "--as", "own")
    waited_for(folder / "started", process)
    assert len(marked(str(folder))) >= 3  # the command, its server and a worker
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    stdout, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 130
    assert stderr == "rewardflow: stopped; the same command goes on from the last finished stage\n"
    assert "trying again" not in stdout
    assert marked(str(folder)) == []

    reward(folder, SLOWLY)
    process = begun(folder, env, "--as", "own")
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (0, "")
    assert "starting Prefect" in stdout
    assert marked(str(folder)) == []
    # Its server kept the book that any other server of this home reads.
    stopped, ended = server.flow_runs("own")
    assert (stopped["state"]["name"], ended["state"]["name"]) == ("Crashed", "Completed")
    states = {name: task["state"]["name"] for name, task in server.task_runs(ended, len(TASKS)).items()}
    assert states.keys() == TASKS
    assert (states["render[0]"], states["own[0]"]) == ("Reused", "Completed")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_nothing(server: Server, folder: Path, sent: signal.Signals) -> None:
    reward(folder, FOR_EVER)
    process = begun(folder, environment(server.home), "--as", "killed")
    waited_for(folder / "started", process)
    left = marked(str(folder))
    os.kill(process.pid, sent)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGTERM else -signal.SIGKILL)
    assert "Traceback" not in stderr
    assert gone(left, 20)
