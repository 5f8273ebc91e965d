"""Prefect's own server for one command. It ends with the command, however that ends."""

import atexit
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from pipelines.crews.local import free_port
from schemas.errors import RunError

_PATIENCE = 120.0  # seconds; Prefect's own 20 are too few on a busy machine
_FAREWELL = 10.0
# Becomes the server. What it leaves behind waits for the end of a pipe that the kernel closes with our process.
_KEEPER = 'exec 3<&0 </dev/null; (read -r _ <&3; kill "$$") & exec "$@" 3<&-'


def server_command(port: int) -> list[str]:
    """Starts Prefect's server on a port of this machine."""
    return [sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--host", "127.0.0.1", "--port", str(port)]


def begin_server(log: Path) -> str:
    """Starts a server and gives the address of its API. It writes to `log`."""
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        server = subprocess.Popen(
            ["sh", "-c", _KEEPER, "sh", *server_command(port)],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING"},
            # Ctrl-C must not reach it: the run has yet to tell it how it ended.
            start_new_session=True,
        )
    # Runs after Prefect's client threads, which Python joins before, have handed over their last events.
    atexit.register(_end, server)
    url = f"http://127.0.0.1:{port}/api"
    _wait(server, url, log)
    return url


def _wait(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and server.poll() is None:
        try:
            direct.open(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
    how = f"did not answer within {_PATIENCE:.0f} s" if server.poll() is None else "ended while it started"
    raise RunError(f"Prefect's server {how}, see {log}; --plain runs without it")


def _end(server: "subprocess.Popen[bytes]") -> None:
    assert server.stdin is not None
    server.stdin.close()
    try:
        server.wait(_FAREWELL)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
