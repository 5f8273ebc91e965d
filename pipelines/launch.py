"""Where stages are computed: one seam, `Launcher`, and its two ends - this process, or warm worker processes here."""

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from pipelines.group import Group, Size
from schemas.contracts import CONTRACTS
from schemas.engine import Resources
from schemas.errors import WorkerLost
from schemas.record import Answer, StageRequest

Progress = Callable[[int, int, str], None]
Begun = Callable[[], None]


def unheard() -> None:
    """Nobody wants to know when the stage begins."""


class Launcher(Protocol):
    """Runs one stage and gives its answer; paths in it are relative to the request's directory."""

    def run(self, request: StageRequest, progress: Progress, begun: Begun = unheard) -> Answer:
        """Blocks until the stage is done. Errors of the stage are raised as they are or as StageFailed.

        `begun` is called when its turn comes: branches of a plan may share the workers.
        """
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...


def launcher(resources: Resources, logs: Path, retries: int) -> Launcher:
    """The launcher that a flow's resources name."""
    if resources.launcher == "inline":
        return InlineLauncher()
    return LocalLauncher(resources, logs, retries)


class InlineLauncher:
    """This process, one rank. For tests and for looking into a stage with a debugger."""

    def __init__(self) -> None:
        # By name: only this launcher brings torch into the foreman's process.
        self._worker = importlib.import_module("stages.worker").Worker()
        self._busy = threading.Lock()  # the worker's weights are one set, branches of the plan are many

    def run(self, request: StageRequest, progress: Progress, begun: Begun = unheard) -> Answer:
        """Calls the stage."""
        with self._busy:
            begun()
            return self._worker.perform(request, progress)

    def close(self) -> None:
        """Nothing was started."""


class LocalLauncher:
    """Worker processes on this machine: `compute`, the ranks that share the model, and `light`, one without torch.

    Both are started when first needed and stay warm. They are exec'd from one thread that lives as long as the
    launcher, because a worker asks the kernel to die with the thread that made it.
    """

    def __init__(self, resources: Resources, logs: Path, retries: int) -> None:
        self._retries = retries
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        sizes = {"compute": Size.of(resources), "light": Size(1, 1, resources.device)}
        self._groups = {name: Group(name, size, logs, resources.timeout, self._thread) for name, size in sizes.items()}

    def run(self, request: StageRequest, progress: Progress, begun: Begun = unheard) -> Answer:
        """Sends the stage to its group; a lost worker is worth a fresh group and another try."""
        group = self._groups["compute" if CONTRACTS[request.stage].distributed else "light"]
        for _ in range(self._retries):
            try:
                return group.run(request, progress, begun)
            except WorkerLost as error:
                progress(0, 0, f"{error}; trying again on fresh workers")
        return group.run(request, progress, begun)

    def close(self) -> None:
        """Ends all workers and waits for them."""
        for group in self._groups.values():
            group.close()
        self._thread.shutdown(wait=True)
