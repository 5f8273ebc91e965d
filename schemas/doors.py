"""What the doors of every stage have in common: Config, Inputs and Outputs, and the contract that holds the three."""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field

from schemas.strict import Strict

Varies = Literal["seed", "iteration"]


class StageConfig(Strict):
    """Settings of a stage: identity. How it is computed is in Resources."""

    def varies(self) -> frozenset[Varies]:
        """What else the outputs depend on."""
        return frozenset()

    def least(self) -> Self:
        """The same recipe on as little as it works on: for the preflight."""
        return self

    def metric_names(self) -> tuple[str, ...] | None:
        """Names of the metrics of the output, or none when they are not known before the run."""
        return None


class StageInputs(Strict):
    """Pointers to outputs of other stages."""


class StageOutputs(Strict):
    """What a stage leaves behind; `metrics` are numbers by name."""

    metrics: dict[str, float] = Field(default_factory=dict)


@dataclass(frozen=True)
class Contract:
    """A stage's doors. `distributed`: all ranks work on it; else one process does, beside the others."""

    config: type[StageConfig]
    inputs: type[StageInputs]
    outputs: type[StageOutputs]
    version: int
    distributed: bool
