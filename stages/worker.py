"""A worker process: takes requests as JSON lines on stdin, runs stages, replies on a pipe of its own.

It dies with its parent: the end of stdin, or the kernel's signal, ends it amid whatever it does.
A worker that gets no distributed stage never imports torch.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from schemas.artifacts import TableRef, refs
from schemas.contracts import CONTRACTS
from schemas.doors import StageInputs
from schemas.errors import DiskFull, InputError, closest
from schemas.record import Answer, StageRequest
from stages.clock import Clock
from stages.context import StageContext
from stages.store import tables

_PR_SET_PDEATHSIG = 1
_REPORT_EVERY = 0.5  # seconds

Progress = Callable[[int, int, str], None]


class Worker:
    """One rank. What is warm lives in `residents`."""

    def __init__(self) -> None:
        self._residents: dict[str, object] = {}
        self._verified: set[tuple[str, str]] = set()
        self._device: str | None = None

    def perform(self, request: StageRequest, progress: Progress) -> Answer:
        """Runs one stage."""
        if request.stage not in CONTRACTS:
            raise InputError(f"no stage {request.stage!r}. {closest(request.stage, CONTRACTS)}")
        contract = CONTRACTS[request.stage]
        config = contract.config.model_validate(request.config)
        inputs = contract.inputs.model_validate(request.inputs)
        # At the end, so that a user's folder hides nothing of ours.
        sys.path += [folder for folder in request.python_path if folder not in sys.path]
        device = self._joined(request.resources.device, request.resources.timeout) if contract.distributed else "cpu"
        context = StageContext(
            directory=Path(request.directory),
            node=request.node,
            seed=request.seed,
            iteration=request.iteration,
            resources=request.resources,
            micro_batch=request.resources.micro_batch_of(request.node, request.stage),
            rank=int(os.environ.get("RANK", "0")) if contract.distributed else 0,
            world_size=int(os.environ.get("WORLD_SIZE", "1")) if contract.distributed else 1,
            rehearsal=request.rehearsal,
            gathered=request.resources.gathered_in(request.node, request.stage),
            device=device,
            residents=self._residents,
            progress=progress,
            clock=Clock(device),
        )
        if context.rank == 0:
            self._verify(inputs)
        stage = importlib.import_module(f"stages.{request.stage}")
        try:
            outputs = stage.run(config, inputs, context).model_dump(mode="json")
        except Exception as error:
            if DiskFull.is_why(error):
                raise DiskFull(f"{context.place}: the disk of {request.directory} is full") from error
            raise
        return Answer(outputs, {**context.measured, **context.clock.parts(), "memory/peak_bytes": _peak_memory(device)})

    def _verify(self, inputs: StageInputs) -> None:
        """Compares every table that is read with its digests, once: a disk may have changed what was committed."""
        for ref in refs(inputs):
            if isinstance(ref, TableRef) and (ref.path, ref.digest) not in self._verified:
                tables.verify(ref)
                self._verified.add((ref.path, ref.digest))

    def _joined(self, wanted: str, timeout: float) -> str:
        """This rank's device, once it has met the others; without others it is a group of its own."""
        if self._device is None:
            torch = importlib.import_module("torch")
            cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
            if cuda and not torch.cuda.is_available():
                raise InputError("resources.device is 'cuda', but torch sees no CUDA device; write 'cpu' or 'auto'")
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
            importlib.import_module("stages.engine.mesh").join(device, timeout)
            self._device = device
        return self._device


def serve(replies: TextIO, requests: Iterator[str]) -> None:
    """Performs requests until there are no more."""
    worker = Worker()

    def reply(kind: str, **message: Any) -> None:
        replies.write(json.dumps({"kind": kind, **message}) + "\n")
        replies.flush()

    for line in requests:
        try:
            answer = worker.perform(StageRequest.model_validate_json(line), _sparse(reply))
            reply("done", **answer._asdict())
        except Exception as error:  # the launcher raises it again, where the user is
            reply("error", type=type(error).__name__, message=str(error), traceback=traceback.format_exc())
            with contextlib.suppress(OSError):  # the log's disk may be full
                traceback.print_exc()


def _peak_memory(device: str) -> float:
    """The most this process has held so far: of the device's memory, or of the machine's."""
    if device.startswith("cuda"):
        return float(importlib.import_module("torch").cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _sparse(reply: Callable[..., None]) -> Progress:
    last = 0.0

    def progress(done: int, total: int, unit: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_EVERY:
            last = time.monotonic()
            reply("progress", done=done, total=total, unit=unit)

    return progress


def main() -> None:
    """`python -m stages.worker --replies FD --parent PID`: started by a launcher, not by people."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--replies", type=int, required=True, help="file descriptor of the pipe for replies")
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    arguments = parser.parse_args()
    # Ctrl-C reaches all processes of a terminal; the launcher alone decides what comes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(arguments.parent)
    os.set_inheritable(arguments.replies, False)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_watch, args=(_private_stdin(), lines), daemon=True).start()
    with open(arguments.replies, "w", encoding="utf-8") as replies:
        serve(replies, iter(lines.get, ""))


def _die_with(parent: int) -> None:
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


if __name__ == "__main__":
    main()
