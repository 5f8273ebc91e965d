"""What every tracker is: opened with a Spot, given metrics step by step, closed."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol


class Spot(NamedTuple):
    """The run that is mirrored, for the tracker that is opened."""

    directory: Path  # absolute
    about: Mapping[str, str]  # flow, seed and --set, to find the run by
    id: str  # what the tracker called this run when it was first opened; empty when it is new

    @property
    def name(self) -> str:
        """The run's name."""
        return self.directory.name


class Tracker(Protocol):
    """One run in one tracker. Both methods may raise and may take long: they are called in a thread of their own."""

    @property
    def id(self) -> str:
        """By which a resumed run finds it again."""
        ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of one step, which is the iteration."""
        ...

    def close(self) -> None:
        """Sends what is still unsent."""
        ...
