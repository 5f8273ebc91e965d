"""One process at a time works on a run directory. The kernel frees the lock when its holder dies, by kill -9 too."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from schemas.errors import UserError

PATIENCE = 15.0  # seconds: a stopped process needs a moment to let go


@contextmanager
def locked(directory: Path, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
    """Holds the directory's lock; refuses after `patience` seconds and tells who has it."""
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(handle, directory, say, patience)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat("T", "seconds"),
        }
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode(), 0)
        yield
    finally:
        os.close(handle)


def _take(handle: int, directory: Path, say: Callable[[str], None], patience: float) -> None:
    end = time.monotonic() + patience
    waiting = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(handle)
        if time.monotonic() > end:
            raise UserError(
                f"the run {directory} is in use by {holder}; "
                "wait for it, stop it, or give this run another name with --as"
            )
        if not waiting:
            say(f"the run {directory} is in use by {holder}; waiting up to {patience:.0f} s")
            waiting = True
        time.sleep(0.2)


def _holder(handle: int) -> str:
    try:
        facts = json.loads(os.pread(handle, 4096, 0))
    except ValueError:  # the holder has just taken it and not yet written its name
        return "another process"
    return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
