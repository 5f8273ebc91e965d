"""What a stage is told besides its config and inputs: where, as which rank, with what at hand."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from schemas.engine import Resources
from stages.clock import Clock


@dataclass(frozen=True)
class StageContext:
    """One stage run on one rank. Results must not depend on rank, world size, micro-batch or warmth.

    `directory` is the stage's own; every rank writes there. Finished shards found in it are kept.
    `residents` lives as long as the process: a warm model is kept there under a name.
    `progress(done, total, unit)` counts this rank's share. `measured` goes into the record beside the outputs: numbers
    that differ between equal runs; the worker adds the `clock`'s parts as `time/...` in seconds.
    """

    directory: Path
    node: str
    seed: int
    iteration: int | None
    resources: Resources
    micro_batch: int
    rank: int = 0
    world_size: int = 1
    rehearsal: bool = False
    gathered: bool | None = None
    device: str = "cpu"
    residents: dict[str, object] = field(default_factory=dict)
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None
    measured: dict[str, float] = field(default_factory=dict)
    clock: Clock = field(default_factory=lambda: Clock("cpu"))

    @property
    def place(self) -> str:
        """Node and iteration for messages, as in `sample[3]`."""
        return self.node if self.iteration is None else f"{self.node}[{self.iteration}]"

    @property
    def lanes(self) -> int:
        """Groups of ranks that make their model calls together; each rank is a lane unless tokens are shared."""
        return self.world_size // self._lane_ranks

    @property
    def lane(self) -> int:
        """This rank's lane."""
        return self.rank // self._lane_ranks

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its lane: the others hold the same numbers."""
        return self.rank % self._lane_ranks == 0

    @property
    def _lane_ranks(self) -> int:
        return self.resources.context_parallel if self.world_size > 1 else 1

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Adds the seconds that its body takes to `time/NAME`, what is timed inside left out."""
        return self.clock.timed(name)
