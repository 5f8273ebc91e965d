"""The grammar of flows.yaml. A node's own fields belong to its stage's contract and are checked by the compiler."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.engine import Resources
from schemas.models import ModelConfig
from schemas.strict import Strict
from schemas.trackers import TrackerConfig

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
RawNode = dict[str, Any]


class Carry(Strict):
    """A value that goes from one iteration to the next."""

    start: str = Field(description="`model` for the base model, or an edge to a stage before the loop.")
    next: str = Field(description="The edge of the body that the next iteration starts from.")


class Guard(Strict):
    """Ends the loop when a metric falls below its best by a margin."""

    metric: str = Field(description="node.metric of a score stage in the body.")
    falls: float = Field(gt=0, description="Margin below the best value so far.")
    action: Literal["finish", "fail"] = Field(
        default="finish",
        description="finish: leave the loop and run `after`, which may read loop.best; fail: end the run.",
    )


class Loop(Strict):
    """The body runs `times` times; raising `times` extends a finished run."""

    times: int = Field(ge=1)
    carry: dict[Name, Carry] = Field(default_factory=dict)
    body: dict[Name, RawNode] = Field(min_length=1)
    stop: dict[Name, Guard] = Field(default_factory=dict)


class Keep(Strict):
    """Which iterations keep their heavy outputs: trajectories, samples, embeddings of the loop, and policies.

    What the loop's end or another run still needs is kept too, and the records of all.
    """

    last: int = Field(default=2, ge=1, description="The newest iterations.")
    every: int | None = Field(default=None, ge=1, description="And every N-th, with the policy it began from.")


class Schedule(Strict):
    """When the flow starts by itself once it is deployed."""

    cron: str
    timezone: str = "UTC"


class NodeOptions(Strict):
    """Fields of a node that are not its stage's: how and when it runs."""

    stage: str = Field(default="", description="Name of the stage; the node's own name when left out.")
    every: int | None = Field(
        default=None, ge=1, description="In the body: before the first update, every N, and last."
    )
    when: str | None = Field(default=None, description="Edge to a metric; the node is skipped when it is 0.")


class Flow(Strict):
    """One pipeline: stages before the loop, the loop, stages after it."""

    description: str
    seed: int = Field(default=0, ge=0)
    model: ModelConfig | None = Field(default=None, description="Given to every stage that has a model and names none.")
    stages: dict[Name, RawNode] = Field(default_factory=dict)
    loop: Loop | None = None
    after: dict[Name, RawNode] = Field(default_factory=dict)
    resources: Resources = Resources()
    keep: Keep | None = Field(default=None, description="Retention of heavy outputs; everything is kept when none.")
    trackers: dict[Name, TrackerConfig] = Field(
        default_factory=dict, description="Experiment trackers that the run directory is mirrored to."
    )
    schedule: Schedule | None = None
    tags: tuple[str, ...] = ()


class External(Strict):
    """A user's own code: `target` is imported by workers only, `config` must import without torch."""

    target: str = Field(pattern=r"^[\w.]+:\w+$", description="package.module:Name")
    config: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$", description="Its pydantic config class.")


class FlowFile(Strict):
    """The whole file."""

    python_path: tuple[str, ...] = Field(default=(), description="Folders appended to sys.path, relative to the file.")
    external: dict[Name, External] = Field(default_factory=dict)
    flows: dict[Name, Flow] = Field(min_length=1)
