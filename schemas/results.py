"""The doors of the stages that tell and hand over what came of a run."""

from typing import Literal

from pydantic import Field

from schemas.artifacts import FileRef, HistoryRef, PipelineRef, PolicyRef, RewardsTable, SamplesTable
from schemas.doors import StageConfig, StageInputs, StageOutputs
from schemas.losses import WeightSet
from schemas.models import ModelConfig


class SummariseConfig(StageConfig):
    """Compares evaluations and draws pictures of them."""

    metric: str = Field(description="Name of the reward that is compared.")
    pictures: int = Field(default=6, ge=1, description="Pictures for each prompt in the grid.")


class SummariseInputs(StageInputs):
    """Evaluations before and after by name (`train`, `heldout`), pictures of one of them, and a curve."""

    before: dict[str, RewardsTable]
    after: dict[str, RewardsTable]
    samples_before: SamplesTable | None = None
    samples_after: SamplesTable | None = None
    curves: dict[str, HistoryRef] = Field(default_factory=dict)


class SummariseOutputs(StageOutputs):
    """A table in Markdown and, where the inputs are there, two pictures."""

    summary: FileRef
    grid: FileRef | None = None
    curve: FileRef | None = None


class ExportConfig(StageConfig):
    """Writes a policy in the form that plain diffusers loads."""

    model: ModelConfig
    weights: WeightSet = "ema"
    format: Literal["lora", "pipeline"] = Field(
        default="pipeline", description="LoRA file, or a whole pipeline folder."
    )
    dtype: Literal["float32", "float16"] = Field(default="float32", description="Storage dtype of the export.")


class ExportInputs(StageInputs):
    """A policy."""

    policy: PolicyRef | None
    pipeline: PipelineRef | None = None


class ExportOutputs(StageOutputs):
    """The folder for `from_pretrained`, or for `load_lora_weights`."""

    folder: PipelineRef
