"""A rank's log: each line that Python writes begins with its time, so that the logs of all ranks can be merged."""

import faulthandler
import io
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

_OUT, _ERR = 1, 2


def begin_log(path: Path | None = None) -> None:
    """Turns output to this file, also that of C code; without a path output stays where it goes.

    Then SIGUSR1, and a crash, write the Python stacks of all threads there.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(handle, _OUT)
        os.dup2(handle, _ERR)
        os.close(handle)
    sys.stdout, sys.stderr = Stamped(_OUT), Stamped(_ERR)
    faulthandler.enable(_ERR)
    faulthandler.register(signal.SIGUSR1, file=_ERR, all_threads=True)


def write_stacks() -> None:
    """The same stacks, without a signal."""
    faulthandler.dump_traceback(_ERR, all_threads=True)


class Stamped(io.TextIOBase):
    """Text whose lines begin with the time (UTC, as in 2026-01-31T08:30:00.123). Writes through."""

    def __init__(self, handle: int) -> None:
        self._stream = io.TextIOWrapper(io.FileIO(handle, "w", closefd=False), "utf-8", "backslashreplace")
        self._fresh = True  # the next character begins a line

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """For those who write below Python; their lines have no time."""
        return self._stream.fileno()

    def flush(self) -> None:
        """Nothing is held back."""
        self._stream.flush()

    def write(self, text: str) -> int:
        """Writes it at once."""
        if text:
            now = datetime.now(UTC).replace(tzinfo=None).isoformat("T", "milliseconds")
            lines = text.splitlines(keepends=True)
            first = f"{now} {lines[0]}" if self._fresh else lines[0]
            self._fresh = text.endswith("\n")
            self._stream.write("".join([first, *(f"{now} {line}" for line in lines[1:])]))
            self._stream.flush()
        return len(text)
