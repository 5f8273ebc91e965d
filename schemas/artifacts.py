"""Typed pointers to what a stage left on disk: they are the edges of the DAG.

In a record a `path` is relative to the stage's directory, so that a run may be moved; in a request it is absolute.
`digest` covers content (names, types, shapes, bytes), not files: equal content has an equal digest.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel

from schemas.losses import WeightSet
from schemas.strict import Strict


class Ref(Strict):
    """A file or folder and the digest of its content."""

    path: str
    digest: str

    def under(self, directory: Path) -> Self:
        """The same pointer with an absolute path."""
        return self.model_copy(update={"path": str(directory / self.path)})


class Shard(Strict):
    """One Arrow file of a table; `digest` covers its columns."""

    file: str
    rows: int
    digest: str


class TableRef(Ref):
    """A folder of Arrow shards, in the order of their rows."""

    rows: int
    shards: tuple[Shard, ...]


class PromptsTable(TableRef):
    """Prompts chosen for an iteration or an evaluation."""


class ConditioningTable(TableRef):
    """Text embeddings by prompt id. `names` are the tensors' columns."""

    names: tuple[str, ...]


class SamplesTable(TableRef):
    """Finished pictures."""


class TrajectoryTable(TableRef):
    """Final latents and, when `num_steps` > 0, the states and log-probs of stochastic steps."""

    latent_shape: tuple[int, ...]
    num_steps: int
    sampler: dict[str, Any]  # the sampler's config; empty for encoded images
    policy: str  # digest of the weights that sampled; empty for the base or for encoded images
    weights: WeightSet | Literal["none"]


class RewardsTable(TableRef):
    """Scores by sample. `weights` are those of the rewards, for the advantage."""

    weights: dict[str, float]


class AdvantagesTable(TableRef):
    """Advantages by sample."""


class PolicyRef(Ref):
    """Trainable weights as safetensors, one file a set, with the optimizer's state."""

    trainable: Literal["lora", "full"]
    sets: tuple[WeightSet, ...]
    updates: int  # optimizer steps since the base


class PipelineRef(Ref):
    """A diffusers pipeline folder."""


class FileRef(Ref):
    """One file: a picture, a report, an adapter."""


class HistoryRef(Strict):
    """A metric over the loop's iterations, oldest first."""

    points: tuple[tuple[int, float], ...]


def refs(value: Any) -> list[Ref]:
    """All Refs in inputs or outputs, also in optional and mapping fields."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, BaseModel):
        return [ref for _, item in value for ref in refs(item)]
    if isinstance(value, Mapping):
        return [ref for item in value.values() for ref in refs(item)]
    return []
