"""The doors of the built-in example's own stages: data for its pretraining, and its autoencoder."""

from typing import Self

from pydantic import Field

from schemas.artifacts import PipelineRef, PromptsTable, SamplesTable
from schemas.doors import StageConfig, StageInputs, StageOutputs, Varies


class RenderConfig(StageConfig):
    """Draws pictures of the built-in example's prompts: data for pretraining, and for testing its checker."""

    per_prompt: int = Field(default=8, ge=1, description="Pictures for each prompt.")

    def varies(self) -> frozenset[Varies]:
        """Every iteration draws others."""
        return frozenset(("seed", "iteration"))

    def least(self) -> Self:
        """One picture."""
        return self.model_copy(update={"per_prompt": 1})


class RenderInputs(StageInputs):
    """Prompts of the example."""

    prompts: PromptsTable


class RenderOutputs(StageOutputs):
    """Pictures."""

    samples: SamplesTable


class FitAutoencoderConfig(StageConfig):
    """Makes the example's pipeline from a seed and fits its autoencoder to pictures."""

    steps: int = Field(default=2000, ge=1)

    def varies(self) -> frozenset[Varies]:
        """Weights and order come from the seed."""
        return frozenset(("seed",))

    def least(self) -> Self:
        """One step."""
        return self.model_copy(update={"steps": 1})


class FitAutoencoderInputs(StageInputs):
    """Pictures."""

    samples: SamplesTable


class FitAutoencoderOutputs(StageOutputs):
    """A pipeline whose transformer knows nothing yet."""

    pipeline: PipelineRef
