"""A group of ranks that works on one request at a time, and stays warm for the next.

An error ends the whole crew: other ranks may hang in a collective, and weights in memory may be half changed.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from pipelines.crews.crew import Crew, Crews
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
from schemas.pulse import Pulse
from schemas.record import Answer, StageRequest

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
_AFTERMATH = 15.0  # seconds in which the death that made other ranks fail shows itself
_FAREWELL = 5.0
_LOOK = 0.5  # seconds between looks at who is silent
_TELL = 10.0  # seconds after which the user hears what is waited for
_PEAK = "memory/peak_bytes"

Progress = Callable[[int, int, str], None]


class Group:
    """One request at a time; `run` starts a crew when there is none."""

    def __init__(self, crews: Crews, resources: Resources) -> None:
        self.closed = False
        self._crews, self._resources = crews, resources
        self._busy = threading.Lock()
        self._crew: Crew | None = None

    def run(self, request: StageRequest, progress: Progress, begun: Callable[[], None]) -> Answer:
        """Rank 0's answer, with the most memory that any rank held."""
        with self._busy:
            begun()
            try:
                if self.closed:
                    raise RunError
                crew = self._crew = self._crew or self._crews.begin()
                self._wait(request, crew, progress)
                crew.send(request.model_dump_json())
                return self._collect(request, crew, progress)
            except BaseException:
                self._end(grace=0)
                if self.closed:
                    raise RunError(f"{_place(request)} was stopped") from None
                raise

    def warm(self) -> None:
        """Starts a crew that the first request will find."""
        with self._busy:
            self._crew = self._crew or self._crews.begin()

    def close(self) -> None:
        """Ends the ranks, also amid a request, which then raises RunError."""
        self.closed = True
        self._end(grace=_FAREWELL)
        self._crews.close()

    def _wait(self, request: StageRequest, crew: Crew, progress: Progress) -> None:
        waited, told = Pulse(), False
        while missing := crew.missing():
            if crew.inbox.ended():
                raise _lost(request, crew, crew.inbox.ended()[0])
            if (seconds := waited.silence()) > self._resources.start_timeout:
                raise crew.late(missing, self._resources.start_timeout)
            if seconds > _TELL and not told:
                told = True
                progress(0, 0, f"waits for {missing}")
            time.sleep(0.01)
            if self.closed:
                raise RunError

    def _collect(self, request: StageRequest, crew: Crew, progress: Progress) -> Answer:
        answers: dict[int, Answer] = {}
        shares: dict[int, tuple[int, int]] = {}
        stalled = Pulse()
        while len(answers) < crew.inbox.ranks:
            reply = crew.inbox.get(min(_LOOK, self._resources.timeout))
            if reply is None or reply.message is None or reply.message["kind"] == "progress":
                self._check(request, crew, stalled)
            if reply is None:
                continue
            message = reply.message
            if message is None:
                raise _lost(request, crew, reply.rank)
            stalled.beat()
            match message["kind"]:
                case "progress":
                    shares[reply.rank] = (message["done"], message["total"])
                    progress(sum(d for d, _ in shares.values()), sum(t for _, t in shares.values()), message["unit"])
                case "done":
                    answers[reply.rank] = Answer(message["outputs"], message["measured"])
                case _:
                    raise _error(request, crew, reply.rank, message)
        outputs, measured = answers[0]
        peaks = {rank: answer.measured[_PEAK] for rank, answer in sorted(answers.items())}
        apart = {f"{_PEAK}/rank{rank}": peak for rank, peak in peaks.items()} if len(peaks) > 1 else {}
        return Answer(outputs, {**measured, _PEAK: max(peaks.values()), **apart})

    def _check(self, request: StageRequest, crew: Crew, stalled: Pulse) -> None:
        """A rank without a sign of life is lost, and so are all when none gets on."""
        frozen = crew.inbox.silent(self._resources.heartbeat)
        if frozen is None and stalled.silence() <= self._resources.timeout:
            return
        crew.write_stacks()
        if frozen is None:
            what = f"no progress for {self._resources.timeout:g} s (resources.timeout)"
        else:
            what = f"no sign of life of rank {frozen} for {self._resources.heartbeat:g} s (resources.heartbeat)"
        where = "what all ranks were at, their Python stacks, is at the end of their logs"
        raise _lost(request, crew, frozen or 0, f"{what}; {where}")

    def _end(self, grace: float) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.end(grace)


def _error(request: StageRequest, crew: Crew, rank: int, message: dict[str, Any]) -> RewardflowError:
    """The stage's own error. When a rank died, the others' failed collectives are its consequence."""
    kind = ERRORS.get(message["type"])
    if kind is not None:
        # What a user's own code raised is told in full in the log.
        log = f"; log: {crew.log(rank)}" if kind is RunError else ""
        return kind(message["message"] + log)
    dead = _died_beside(crew, rank)
    if dead is not None:
        return _lost(request, crew, dead)
    what = f"{_place(request)} failed on rank {rank}: {message['type']}: {message['message']}"
    return StageFailed(f"{what}\n{message['traceback'].rstrip()}\nlog: {crew.log(rank)}")


def _died_beside(crew: Crew, rank: int) -> int | None:
    """Another rank that has ended, or gives no sign of life; far away that takes a while to show."""
    before, end = crew.inbox.heard(), time.monotonic() + _AFTERMATH
    waiting = [other for other in range(crew.inbox.ranks) if other != rank]
    while waiting:
        dead = next((other for other in crew.inbox.ended() if other != rank), None)
        if dead is not None or time.monotonic() > end:
            return waiting[0] if dead is None else dead
        now = crew.inbox.heard()
        # One sign may have been under way when it died.
        waiting = [other for other in waiting if now[other] < before[other] + 2]
        time.sleep(0.05)
    return None


def _lost(request: StageRequest, crew: Crew, rank: int, what: str = "") -> WorkerLost:
    what = what or f"rank {rank} {crew.ending(rank)}"
    return WorkerLost(f"{_place(request)} lost its worker: {what}; log: {crew.log(rank)}")


def _place(request: StageRequest) -> str:
    return request.node if request.iteration is None else f"{request.node}[{request.iteration}]"
