"""What a stage is told besides its config and inputs: where, as which rank, with what at hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from schemas.engine import Resources


@dataclass(frozen=True)
class StageContext:
    """One stage run on one rank. Results must not depend on rank, world size, micro-batch or warmth.

    `directory` is the stage's own; every rank writes there. Finished shards found in it are kept.
    `residents` lives as long as the process: a warm model is kept there under a name.
    `progress(done, total, unit)` counts this rank's share.
    """

    directory: Path
    node: str
    seed: int
    iteration: int | None
    resources: Resources
    micro_batch: int
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    residents: dict[str, object] = field(default_factory=dict)
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None

    @property
    def place(self) -> str:
        """Node and iteration for messages, as in `sample[3]`."""
        return self.node if self.iteration is None else f"{self.node}[{self.iteration}]"
