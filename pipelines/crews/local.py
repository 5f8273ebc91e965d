"""Ranks as processes on this machine. JSON lines go to stdin and come back on a pipe; what they print goes to a log."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipelines.crews.crew import Inbox
from schemas.engine import Resources
from schemas.errors import WorkerLost
from schemas.pulse import interval

ROOT = Path(__file__).resolve().parents[2]
_FAREWELL = 5.0
_STACKS = 1.0  # seconds to write them
_PIPE = 1 << 20  # bytes; a long request must not wait for a worker that does not read


class Size(NamedTuple):
    """Ranks, threads a rank, seconds between signs of life."""

    ranks: int
    threads: int
    every: float

    @classmethod
    def of(cls, resources: Resources) -> "Size":
        """Without a word on threads the cores are shared out."""
        cores = len(os.sched_getaffinity(0))
        threads = resources.threads or max(1, cores // resources.processes)
        return cls(resources.processes, threads, interval(resources.heartbeat))


class LocalCrews:
    """Crews called `name`. A worker asks the kernel to die with the thread that made it, so one thread makes all.

    `loads` names a module that they load before any request comes.
    """

    def __init__(self, name: str, size: Size, logs: Path, loads: str = "") -> None:
        self._name, self._size, self._logs, self._loads = name, size, logs, loads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="crew")

    def begin(self) -> "LocalCrew":
        """Starts the processes."""
        return self._thread.submit(LocalCrew, self._name, self._size, self._logs, self._loads).result()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True)


@dataclass(frozen=True)
class Rank:
    """One worker process."""

    process: subprocess.Popen[bytes]
    log: Path


class LocalCrew:
    """A Crew."""

    def __init__(self, name: str, size: Size, logs: Path, loads: str) -> None:
        self._loads = loads
        logs.mkdir(parents=True, exist_ok=True)
        self.inbox = Inbox(size.ranks)
        port = free_port()
        self._ranks = [self._spawn(rank, logs / f"{name}-rank{rank}.log", size, port) for rank in range(size.ranks)]

    def missing(self) -> str:
        """Ranks that still load their code."""
        unheard = self.inbox.unheard()
        return f"workers of rank {', '.join(map(str, unheard))}" if unheard else ""

    def late(self, missing: str, seconds: float) -> WorkerLost:
        """Worth another try."""
        return WorkerLost(f"{missing} did not start within {seconds:g} s (resources.start_timeout)")

    def send(self, request: str) -> None:
        """To each rank's stdin."""
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.write(f"{request}\n".encode())
                rank.process.stdin.flush()

    def log(self, rank: int) -> Path:
        """Of a rank."""
        return self._ranks[rank].log

    def ending(self, rank: int) -> str:
        """By its exit code."""
        try:
            code = self._ranks[rank].process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-code).name}{memory}"
        return f"left with exit code {code}"

    def write_stacks(self) -> None:
        """A signal, which works also while C code does not return."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS)

    def end(self, grace: float) -> None:
        """End of input first, which a worker heeds at once; then SIGKILL."""
        for rank in self._ranks:
            assert rank.process.stdin is not None
            if grace == 0:
                rank.process.kill()
            with contextlib.suppress(BrokenPipeError):  # it left with a request unread
                rank.process.stdin.close()
        for rank in self._ranks:
            try:
                rank.process.wait(grace or _FAREWELL)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def _spawn(self, rank: int, log: Path, size: Size, port: int) -> Rank:
        read, write = os.pipe()
        words = [sys.executable, "-m", "stages.worker", "--replies", str(write), "--parent", str(os.getpid())]
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [*words, "--every", str(size.every), *(["--loads", self._loads] if self._loads else [])],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                pipesize=_PIPE,
                env={
                    **os.environ,
                    **environment(rank, size.ranks, size.threads),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
        os.close(write)
        threading.Thread(target=_forward, args=(read, rank, self.inbox), daemon=True).start()
        return Rank(process, log)


def environment(rank: int, ranks: int, threads: int) -> dict[str, str]:
    """What a rank's process is started with, wherever it is."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _forward(read: int, rank: int, inbox: Inbox) -> None:
    with open(read, encoding="utf-8") as stream:
        for line in stream:
            try:
                inbox.put(rank, json.loads(line))
            except ValueError:  # killed amid a line
                break
    inbox.put(rank, None)
