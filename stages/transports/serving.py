"""What workers do however requests reach them: perform one after the other, reply, give signs of life."""

import contextlib
import json
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from schemas.record import Answer, StageRequest

_REPORT_EVERY = 0.5  # seconds

Progress = Callable[[int, int, str], None]
Perform = Callable[[StageRequest, Progress], Answer]


class Reply(Protocol):
    """Sends a message of a kind: hello, heartbeat, progress, done, error."""

    def __call__(self, kind: str, **message: Any) -> None:
        """Called from several threads."""
        ...


def replies(write: Callable[[str], None]) -> Reply:
    """Messages as JSON lines, one at a time."""
    lock = threading.Lock()

    def reply(kind: str, **message: Any) -> None:
        line = json.dumps({"kind": kind, **message}) + "\n"
        with lock:
            write(line)

    return reply


def serve(perform: Perform, reply: Reply, requests: Iterator[str]) -> None:
    """Performs requests until there are no more."""
    for line in requests:
        try:
            answer = perform(StageRequest.model_validate_json(line), _sparse(reply))
            reply("done", **answer._asdict())
        except Exception as error:  # the launcher raises it again, where the user is
            reply("error", type=type(error).__name__, message=str(error), traceback=traceback.format_exc())
            with contextlib.suppress(OSError):  # the log's disk may be full
                traceback.print_exc()


def beat(reply: Reply, every: float) -> None:
    """Signs of life from a thread of their own, every so many seconds: the first at once, the others for ever."""
    reply("hello")
    threading.Thread(target=_beats, args=(reply, every), name="heartbeat", daemon=True).start()


def free_port(host: str = "") -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _beats(reply: Reply, every: float) -> None:
    while True:
        time.sleep(every)
        with contextlib.suppress(OSError):  # a full disk, or a launcher that is gone: what follows is not ours to do
            reply("heartbeat")


def _sparse(reply: Reply) -> Progress:
    last = 0.0

    def progress(done: int, total: int, unit: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_EVERY:
            last = time.monotonic()
            reply("progress", done=done, total=total, unit=unit)

    return progress
