"""What is written beside the bytes: the order given to a stage, and the record of what came of it."""

from typing import Any, Literal, NamedTuple

from pydantic import Field

from schemas.engine import Resources
from schemas.strict import Strict


class StageRequest(Strict):
    """An order to a stage: the same JSON for every launcher and for ``python -m stages request.json``."""

    stage: str
    node: str
    config: dict[str, Any]
    inputs: dict[str, Any] = Field(description="Refs with absolute paths.")
    directory: str = Field(description="Where outputs go; finished shards in it are kept.")
    seed: int = 0
    iteration: int | None = None
    resources: Resources = Resources()
    python_path: tuple[str, ...] = ()
    rehearsal: bool = Field(default=False, description="Computes also what would change nothing: for the preflight.")


class Answer(NamedTuple):
    """What a stage gives back: its outputs as JSON, and what was measured on the way."""

    outputs: dict[str, Any]
    measured: dict[str, float]


class Volatile(Strict):
    """Parts of a record that may differ between equal runs."""

    started: str
    seconds: float
    host: str
    process: int
    resources: Resources
    versions: dict[str, str] = Field(default_factory=dict)
    git: str = ""
    ranks: int = 1
    measured: dict[str, float] = Field(
        default_factory=dict, description="Speed and cost: time/... in seconds, images_per_second, flops, mfu, memory."
    )


class StageRecord(Strict):
    """A committed stage. `payload` is its identity, `fingerprint` the payload's hash."""

    format: int = 1
    node: str
    stage: str
    iteration: int | None
    status: Literal["done", "skipped"]
    why: str = Field(
        default="", description="Why it was skipped, or on which older record of an `every` stage it stands."
    )
    payload: dict[str, Any]
    fingerprint: str
    sources: dict[str, Any] = Field(description="For each input the address it came from, e.g. 0003/sample.samples.")
    outputs: dict[str, Any] = Field(description="Refs with paths relative to the stage's directory.")
    volatile: Volatile


class Decision(Strict):
    """A guard's decision to end the loop, and the numbers it stands on."""

    guard: str
    iteration: int
    metric: str
    value: float
    best: float
    best_iteration: int
    action: Literal["finish", "fail"]
