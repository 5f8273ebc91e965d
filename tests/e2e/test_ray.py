"""Ranks as actors of a real two-node cluster: equal results, and nothing left however a run ends.

Ray lives in other processes only: a script holds the cluster, commands and scripts are its drivers.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.two_ranks import ROOT, amid_sample, environment, finished, lasting, started, stopped
from tests.processes import gone, marked

pytestmark = pytest.mark.slow

# One process, so that Ray is started once: each part prints a line.
ERRORS = """
import os, signal, sys
from pathlib import Path
from pipelines.launch import launcher
from schemas.engine import Resources
from schemas.record import StageRequest

def attempt(name, request, **more):
    ray = {"address": sys.argv[1], "placement": "STRICT_SPREAD"}
    settings = {"launcher": "ray", "processes": 2, "threads": 1, "ray": ray, **more}
    resources = Resources.model_validate(settings)
    workers = launcher(resources, Path(sys.argv[2]), 0)
    def ticked(done, total, unit):
        print("told", name, unit, flush=True)
    try:
        workers.run(request, ticked)
    except Exception as error:
        print(f"<{name}>{type(error).__name__}: {error}</{name}>", flush=True)
    workers.close()

wrong = StageRequest(stage="encode", node="encode", config={"pth": "x"}, inputs={}, directory=sys.argv[2])
attempt("wrong", wrong)
attempt("many", wrong, processes=3, start_timeout=2)
attempt("unknown", wrong, ray={"address": "127.0.0.1:1"})
"""


class Cluster:
    """Two nodes of one core each."""

    def __init__(self, home: Path) -> None:
        self.mark = str(home)
        with (home / "cluster.txt").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(home),
                text=True,
            )
        assert self.process.stdout is not None
        self.address = next(line.strip() for line in self.process.stdout if line[0].isdigit() and ":" in line)

    def do(self, word: str) -> None:
        """`kill` or `add` a node."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        next(line for line in self.process.stdout if line.strip() == word)

    def actors(self) -> list[int]:
        """Live worker processes of ours."""
        return [pid for pid in marked(self.mark) if b"Actor" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def settings(self) -> tuple[str, ...]:
        """A rank on each node."""
        return (
            "resources.launcher=ray",
            f"resources.ray={{address: '{self.address}', placement: STRICT_SPREAD}}",
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    everything = marked(cluster.mark)
    cluster.process.communicate(timeout=60)
    assert gone(everything, 30)


def test_a_run_over_two_nodes_equals_a_local_one(
    cluster: Cluster, local_records: dict[str, Any], tmp_path: Path
) -> None:
    command = started(tmp_path, *cluster.settings())
    amid_sample(tmp_path, command)
    actors = cluster.actors()
    assert len(actors) == 2
    finished(tmp_path, command)
    assert lasting(tmp_path) == local_records
    for rank in range(2):
        assert f"rank {rank}" in (tmp_path / f"runs/small/logs/compute-rank{rank}.log").read_text()
    assert gone(actors, 20)
    assert marked(str(tmp_path)) == []


def test_a_lost_node_costs_a_retry_and_changes_nothing(
    cluster: Cluster, local_records: dict[str, Any], tmp_path: Path
) -> None:
    command = started(tmp_path, *cluster.settings())
    amid_sample(tmp_path, command)
    cluster.do("kill")
    cluster.do("add")
    said = finished(tmp_path, command)
    assert said.count("sample[0] lost its worker: rank 1") + said.count("sample[0] lost its worker: rank 0") == 1
    assert said.count("trying again on fresh workers") == 1
    assert lasting(tmp_path) == local_records


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_no_actor_outlives_its_run(cluster: Cluster, tmp_path: Path, sent: signal.Signals) -> None:
    command = started(tmp_path, *cluster.settings())
    amid_sample(tmp_path, command)
    actors, others = cluster.actors(), marked(str(tmp_path))
    assert len(actors) == 2
    stopped(tmp_path, command, sent)
    assert gone([*actors, *others], 30)


def test_a_local_ray_ends_with_its_killed_run(tmp_path: Path) -> None:
    command = started(tmp_path, "resources.launcher=ray")
    amid_sample(tmp_path, command)
    everything = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(str(tmp_path))}
    assert sum(b"Actor" in title for title in everything.values()) == 2
    # Ray's own agents try for 60 s, a constant of Ray's, to tell a dead server that their node is gone.
    agents = [
        pid for pid, title in everything.items() if title.startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))
    ]
    stopped(tmp_path, command, signal.SIGKILL)
    assert gone([pid for pid in everything if pid not in agents], 30)
    assert gone(agents, 120)


def test_errors_reach_the_user_once(cluster: Cluster, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    words = [sys.executable, "-c", ERRORS, cluster.address, str(logs)]
    done = subprocess.run(words, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    def told(name: str) -> str:
        return done.stdout.partition(f"<{name}>")[2].partition(f"</{name}>")[0]

    wrong = told("wrong")
    assert wrong.startswith("StageFailed: encode failed on rank ")
    assert wrong.count("Traceback") == 1
    assert "pth" in wrong
    assert str(logs / "compute-rank") in wrong
    assert "Traceback" not in done.stdout.replace(wrong, "") + done.stderr
    assert told("many").startswith("UserError: resources.ray: wanted 3 workers of 1 CPU each (STRICT_SPREAD)")
    assert "The cluster has 2 nodes (1 CPU, 0 GPU; 1 CPU, 0 GPU)" in told("many")
    assert told("unknown").startswith("UserError: resources.ray.address: no Ray cluster answers at '127.0.0.1:1'")
    assert cluster.actors() == []


def test_users_folders_that_would_hide_ours_are_refused(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    command = started(tmp_path, "resources.launcher=ray")
    assert command.wait(60) == 2
    assert f"{tmp_path / 'stages'} would hide our own" in (tmp_path / "out.txt").read_text()
    assert os.fspath(ROOT) not in (tmp_path / "out.txt").read_text()
