"""A worker: one rank that runs stages and keeps warm what they need again. How requests come is a transport's.

A worker that gets no distributed stage never imports torch.
"""

import argparse
import importlib
import os
import resource
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from schemas.artifacts import TableRef, refs
from schemas.contracts import CONTRACTS
from schemas.doors import StageInputs
from schemas.errors import DiskFull, InputError, closest
from schemas.record import Answer, StageRequest
from stages.clock import Clock
from stages.context import StageContext
from stages.store import tables
from stages.transports import mailbox, pipe
from stages.transports.serving import Progress

_ABOUT = """\
A worker process. The local launcher starts its own; start these by torchrun, for Slurm and Kubernetes:

  on each node   torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d
                   --rdzv-endpoint HOST:29500 -m stages.worker --mailbox /shared/runs/NAME/mail
  once, anywhere rewardflow run FLOW --as NAME --runs /shared/runs
                   --set resources.launcher=torchrun --set resources.processes=16

Either may be started first. Runs, models and prompt files lie on a file system that all nodes see under the same
path. Ranks must be as many as resources.processes. Threads a rank: resources.threads, else OMP_NUM_THREADS, which
torchrun sets to 1. When a rank is lost, all leave, torchrun starts them again (--max-restarts, 0 by default), and the
stage is tried once more. Workers leave with exit code 0 when the run is over, and when the foreman gives no sign for
resources.heartbeat seconds; on NFS that must be longer than its attribute cache (actimeo).
"""


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
            with _traced(context, contract.distributed):
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


def _traced(ctx: StageContext, computes: bool) -> AbstractContextManager[None]:
    """Writes a trace of the iterations that the resources name."""
    wanted = ctx.resources.profile
    if wanted is None or not computes or ctx.iteration not in wanted.iterations or ctx.rehearsal:
        return nullcontext()
    return importlib.import_module("stages.engine.trace").traced(ctx.directory, ctx.rank, ctx.device)


def _peak_memory(device: str) -> float:
    """The most this process has held so far: of the device's memory, or of the machine's."""
    if device.startswith("cuda"):
        return float(importlib.import_module("torch").cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def main() -> None:
    """Chooses how requests come."""
    parser = argparse.ArgumentParser(
        prog="python -m stages.worker", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--mailbox", type=Path, metavar="DIR", help="folder where the foreman is met: RUN/mail")
    way.add_argument("--replies", type=int, metavar="FD", help="for the local launcher: descriptor of the reply pipe")
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="S", help="seconds to wait for the foreman (default: 600)"
    )
    parser.add_argument("--parent", type=int, metavar="PID", help="for the local launcher: process to die with")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="for the local launcher: seconds between signs of life"
    )
    parser.add_argument("--loads", metavar="MODULE", help="for the local launcher: what to load before any request")
    arguments = parser.parse_args()
    perform = Worker().perform
    if arguments.mailbox is not None:
        # `-m` puts the working folder first; there a user's file may have the name of any package.
        sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
        mailbox.run(perform, arguments.mailbox, arguments.wait)
    elif arguments.parent is None:
        parser.error("--replies wants --parent")
    else:
        # Ctrl-C reaches all processes of a terminal; the launcher alone decides what comes of it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.run(perform, arguments.replies, arguments.parent, arguments.every, arguments.loads)


if __name__ == "__main__":
    main()
