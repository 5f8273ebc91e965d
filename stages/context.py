"""What a stage is told besides its config and inputs: where, as which rank, with what at hand."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from schemas.engine import Resources


@dataclass(frozen=True)
class StageContext:
    """One stage run on one rank. Results must not depend on rank, world size, micro-batch or warmth.

    `directory` is the stage's own; every rank writes there. Finished shards found in it are kept.
    `residents` lives as long as the process: a warm model is kept there under a name.
    `progress(done, total, unit)` counts this rank's share. `measured` goes into the record beside the outputs: numbers
    that differ between equal runs, such as `time/denoise` in seconds.
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
    device: str = "cpu"
    residents: dict[str, object] = field(default_factory=dict)
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Node and iteration for messages, as in `sample[3]`."""
        return self.node if self.iteration is None else f"{self.node}[{self.iteration}]"

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that its body takes to `time/NAME`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}"
            self.measured[key] = self.measured.get(key, 0.0) + time.perf_counter() - begun
