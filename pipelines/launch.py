"""Where stages are computed: one seam, `Launcher`, and its ends - this process, or a crew of warm workers somewhere."""

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipelines.crews.crew import Crews
from pipelines.crews.local import LocalCrews, Size
from pipelines.crews.ray import RayCrews
from pipelines.crews.torchrun import Mailbox
from pipelines.group import Group
from schemas.contracts import CONTRACTS
from schemas.engine import Resources
from schemas.errors import WorkerLost
from schemas.pulse import interval
from schemas.record import Answer, StageRequest

_HEAVY = "stages.sample"  # brings torch, diffusers and the engine
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

    def warm(self) -> None:
        """Starts what takes long to start; does not wait for it."""
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...


def launcher(resources: Resources, logs: Path, retries: int) -> Launcher:
    """The launcher that a flow's resources name. UserError for what it lacks here."""
    match resources.launcher:
        case "inline":
            return InlineLauncher()
        case "local":
            here = LocalCrews("compute", Size.of(resources), logs, _HEAVY)
            return GroupLauncher(here, resources, logs, retries)
        case "ray":
            return GroupLauncher(RayCrews(resources, logs), resources, logs, retries)
        case "torchrun":
            return GroupLauncher(Mailbox(resources, logs.parent / "mail", logs), resources, logs, retries)


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

    def warm(self) -> None:
        """This process is as warm as it is."""

    def close(self) -> None:
        """Nothing was started."""


class GroupLauncher:
    """Two groups of workers: `compute`, the ranks that share the model, and `light`, one process here without torch.

    Both are started when first needed, if not before, and stay warm.
    """

    def __init__(self, compute: Crews, resources: Resources, logs: Path, retries: int) -> None:
        self._retries = retries
        light = LocalCrews("light", Size(1, 1, interval(resources.heartbeat)), logs)
        self._groups = {"compute": Group(compute, resources), "light": Group(light, resources)}

    def run(self, request: StageRequest, progress: Progress, begun: Begun = unheard) -> Answer:
        """Sends the stage to its group; a lost worker is worth a fresh crew and another try."""
        group = self._groups["compute" if CONTRACTS[request.stage].distributed else "light"]
        for _ in range(self._retries):
            try:
                return group.run(request, progress, begun)
            except WorkerLost as error:
                progress(0, 0, f"{error}; trying again on fresh workers")
        return group.run(request, progress, begun)

    def warm(self) -> None:
        """Starts the ranks that share the model."""
        self._groups["compute"].warm()

    def close(self) -> None:
        """Ends all workers and waits for them."""
        for group in self._groups.values():
            group.close()
