"""A real Prefect server for tests, asked over its REST API."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.crews.local import free_port
from pipelines.server import server_command

_PATIENCE = 180.0  # seconds, on a busy machine
_TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def environment(home: Path, **more: str) -> dict[str, str]:
    """The caller's, with Prefect's own folder and no server named."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**inherited, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", **more}


@dataclass(frozen=True)
class Server:
    """One that runs. `url` is its API's."""

    url: str
    home: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request."""
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)) as out:
            return json.load(out)

    def flow_runs(self, name: str) -> list[dict[str, Any]]:
        """Oldest first."""
        return self.post("/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC"})

    def task_runs(self, flow_run: dict[str, Any], count: int) -> dict[str, dict[str, Any]]:
        """By name, once `count` of them have ended: the server writes them down some time after the run."""
        end = time.monotonic() + 30
        while True:
            found = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})
            if sum(run["state"]["type"] in _TERMINAL for run in found) >= count or time.monotonic() > end:
                return {run["name"]: run for run in found}
            time.sleep(0.2)

    def log(self, flow_run: dict[str, Any]) -> str:
        """What the flow run said."""
        chosen = {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(line["message"] for line in self.post("/logs/filter", chosen))


@contextmanager
def running_server(home: Path) -> Iterator[Server]:
    """Starts one on a free port and ends it."""
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = home / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            server_command(port),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(home),
        )
    try:
        server = Server(f"http://127.0.0.1:{port}/api", home)
        end = time.monotonic() + _PATIENCE
        while not _answers(server.url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True
