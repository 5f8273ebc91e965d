"""A group of worker processes that work on one request together, and stay warm for the next.

JSON lines go to a worker's stdin and come back on a pipe of their own; what it prints goes to a log file.
An error ends the whole group: other ranks may hang in a collective, and weights in memory may be half changed.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from schemas.engine import Resources
from schemas.errors import (
    Collapsed,
    DiskFull,
    FlowFileError,
    InputError,
    NonFinite,
    RewardflowError,
    RunError,
    StageFailed,
    StaleRecord,
    UserError,
    WorkerLost,
)
from schemas.record import Answer, StageRequest

ROOT = Path(__file__).resolve().parents[1]
_KINDS = (
    UserError,
    FlowFileError,
    InputError,
    StaleRecord,
    RunError,
    NonFinite,
    StageFailed,
    WorkerLost,
    Collapsed,
    DiskFull,
)
ERRORS: dict[str, type[RewardflowError]] = {kind.__name__: kind for kind in _KINDS}
_AFTERMATH = 1.5  # seconds in which the death that made other ranks fail shows itself
_FAREWELL = 5.0
_PEAK = "memory/peak_bytes"


class Size(NamedTuple):
    """Ranks, threads a rank, device."""

    ranks: int
    threads: int
    device: str

    @classmethod
    def of(cls, resources: Resources) -> "Size":
        """Without a word on threads the cores are shared out."""
        cores = len(os.sched_getaffinity(0))
        return cls(resources.processes, resources.threads or max(1, cores // resources.processes), resources.device)


@dataclass(frozen=True)
class Reply:
    """A line from a rank; no message when its pipe has ended."""

    rank: int
    message: dict[str, Any] | None


@dataclass(frozen=True)
class Rank:
    """One worker process."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path

    def send(self, line: bytes) -> None:
        """Hands over a request; a worker that is gone is noticed by the end of its replies."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def ending(self) -> str:
        """How it died, for people."""
        code = self.process.wait(_FAREWELL)
        if code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-code).name}{memory}"
        return f"left with exit code {code}"


class Group:
    """One request at a time; `run` starts the workers when there are none."""

    def __init__(self, name: str, size: Size, logs: Path, timeout: float, starter: ThreadPoolExecutor) -> None:
        self.name, self.size, self.logs, self.timeout = name, size, logs, timeout
        self.closed = False
        self._starter = starter
        self._busy = threading.Lock()
        self._ranks: list[Rank] = []
        self._replies: queue.Queue[Reply] = queue.Queue()

    def run(
        self, request: StageRequest, progress: Callable[[int, int, str], None], begun: Callable[[], None]
    ) -> Answer:
        """Rank 0's answer, with the most memory that any rank held."""
        with self._busy:
            begun()
            if self.closed:
                raise RunError(f"{_place(request)} was stopped")
            if not self._ranks:
                self._ranks = self._starter.submit(self._start).result()
                if self.closed:  # meanwhile
                    self._end(grace=0)
                    raise RunError(f"{_place(request)} was stopped")
            line = (request.model_dump_json() + "\n").encode()
            for rank in self._ranks:
                rank.send(line)
            try:
                return self._collect(request, list(self._ranks), progress)
            except BaseException:
                self._end(grace=0)
                if self.closed:
                    raise RunError(f"{_place(request)} was stopped") from None
                raise

    def close(self) -> None:
        """Ends the workers, also amid a request, which then raises RunError."""
        self.closed = True
        self._end(grace=_FAREWELL)

    def _collect(self, request: StageRequest, ranks: list[Rank], progress: Callable[[int, int, str], None]) -> Answer:
        answers: dict[int, Answer] = {}
        shares: dict[int, tuple[int, int]] = {}
        while len(answers) < len(ranks):
            try:
                reply = self._replies.get(timeout=self.timeout)
            except queue.Empty:
                raise _lost(request, ranks[0], f"no progress for {self.timeout:g} s (resources.timeout)") from None
            message = reply.message
            if message is None:
                raise _lost(request, ranks[reply.rank])
            match message["kind"]:
                case "progress":
                    shares[reply.rank] = (message["done"], message["total"])
                    progress(sum(d for d, _ in shares.values()), sum(t for _, t in shares.values()), message["unit"])
                case "done":
                    answers[reply.rank] = Answer(message["outputs"], message["measured"])
                case _:
                    raise self._error(request, ranks, reply.rank, message)
        outputs, measured = answers[0]
        largest = max(answer.measured[_PEAK] for answer in answers.values())
        return Answer(outputs, {**measured, _PEAK: largest})

    def _error(self, request: StageRequest, ranks: list[Rank], rank: int, message: dict[str, Any]) -> RewardflowError:
        """The stage's own error. When a rank died, the others' failed collectives are its consequence."""
        kind = ERRORS.get(message["type"])
        if kind is not None:
            # What a user's own code raised is told in full in the log.
            log = f"; log: {ranks[rank].log}" if kind is RunError else ""
            return kind(message["message"] + log)
        dead = self._died_beside(ranks, rank)
        if dead is not None:
            return _lost(request, dead)
        what = f"{_place(request)} failed on rank {rank}: {message['type']}: {message['message']}"
        return StageFailed(f"{what}\n{message['traceback'].rstrip()}\nlog: {ranks[rank].log}")

    def _died_beside(self, ranks: list[Rank], rank: int) -> Rank | None:
        end = time.monotonic() + _AFTERMATH
        while len(ranks) > 1 and (left := end - time.monotonic()) > 0:
            try:
                reply = self._replies.get(timeout=left)
            except queue.Empty:
                return None
            if reply.message is None and reply.rank != rank:
                return ranks[reply.rank]
        return None

    def _start(self) -> list[Rank]:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._replies = queue.Queue()
        port = free_port()
        return [self._spawn(rank, port) for rank in range(self.size.ranks)]

    def _spawn(self, rank: int, port: int) -> Rank:
        read, write = os.pipe()
        log = self.logs / f"{self.name}-rank{rank}.log"
        words = [sys.executable, "-m", "stages.worker", "--replies", str(write), "--parent", str(os.getpid())]
        with log.open("ab") as stream:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=_environment(self.size, rank, port),
            )
        os.close(write)
        threading.Thread(target=_forward, args=(read, rank, self._replies), daemon=True).start()
        return Rank(rank, process, log)

    def _end(self, grace: float) -> None:
        """End of input first, which a worker heeds at once; then SIGKILL."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            assert rank.process.stdin is not None
            if grace == 0:
                rank.process.kill()
            with contextlib.suppress(BrokenPipeError):  # it left with a request unread
                rank.process.stdin.close()
        for rank in ranks:
            try:
                rank.process.wait(grace or _FAREWELL)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()


def _lost(request: StageRequest, rank: Rank, what: str = "") -> WorkerLost:
    what = what or f"rank {rank.rank} {rank.ending()}"
    return WorkerLost(f"{_place(request)} lost its worker: {what}; log: {rank.log}")


def _place(request: StageRequest) -> str:
    return request.node if request.iteration is None else f"{request.node}[{request.iteration}]"


def _forward(read: int, rank: int, replies: "queue.Queue[Reply]") -> None:
    with open(read, encoding="utf-8") as stream:
        for line in stream:
            try:
                replies.put(Reply(rank, json.loads(line)))
            except ValueError:  # killed amid a line
                break
    replies.put(Reply(rank, None))


def _environment(size: Size, rank: int, port: int) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(size.threads),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
