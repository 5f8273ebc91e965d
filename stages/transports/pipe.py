"""A worker of the local launcher: requests are JSON lines on stdin, replies go to a pipe of their own.

It dies with its parent: the end of stdin, or the kernel's signal, ends it amid whatever it does.
"""

import ctypes
import importlib
import os
import queue
import signal
import sys
import threading

from stages.transports.logs import begin_log
from stages.transports.serving import Perform, beat, replies, serve

_PR_SET_PDEATHSIG = 1


def run(perform: Perform, handle: int, parent: int, every: float, loads: str | None) -> None:
    """Serves until stdin ends. `handle`: of the reply pipe; `parent`: its process; `every`: seconds between beats.

    `loads` names a module that is loaded while there is no request yet.
    """
    die_with(parent)
    os.set_inheritable(handle, False)
    begin_log()
    with open(handle, "w", encoding="utf-8") as stream:

        def write(line: str) -> None:
            stream.write(line)
            stream.flush()

        reply = replies(write)
        beat(reply, every)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_watch, args=(_private_stdin(), lines), daemon=True).start()
        if loads:
            importlib.import_module(loads)
        serve(perform, reply, iter(lines.get, ""))


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def _private_stdin() -> int:
    """The request pipe under a number that no child inherits; stdin itself becomes empty."""
    pipe = os.dup(0)  # not inheritable
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return pipe


def _watch(pipe: int, lines: "queue.Queue[str]") -> None:
    with open(pipe, encoding="utf-8") as stream:
        for line in stream:
            lines.put(line)
    os._exit(0)  # the parent is gone, or has no more work
