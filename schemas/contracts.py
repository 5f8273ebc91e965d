"""The doors of every stage: Config, Inputs, Outputs and VERSION, without torch.

A node in flows.yaml names fields of its stage's Config and Inputs side by side; an input's value is an edge
such as ``sample.samples``. Raise `version` when a stage computes something else from the same request.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.artifacts import (
    AdvantagesTable,
    ConditioningTable,
    PipelineRef,
    PolicyRef,
    PromptsTable,
    RewardsTable,
    SamplesTable,
    TrajectoryTable,
)
from schemas.assets import Asset
from schemas.doors import Contract, StageConfig, StageInputs, StageOutputs, Varies
from schemas.imports import ImportSamplesConfig, ImportSamplesInputs, ImportSamplesOutputs
from schemas.losses import EmaConfig, KlConfig, LossConfig, OldPolicyConfig, OptimizerConfig, WeightSet
from schemas.models import ModelConfig
from schemas.results import (
    ExportConfig,
    ExportInputs,
    ExportOutputs,
    SummariseConfig,
    SummariseInputs,
    SummariseOutputs,
)
from schemas.rewards import RewardConfig
from schemas.sampling import SamplerConfig
from schemas.shapes import (
    FitAutoencoderConfig,
    FitAutoencoderInputs,
    FitAutoencoderOutputs,
    RenderConfig,
    RenderInputs,
    RenderOutputs,
)


class PromptsConfig(StageConfig):
    """Reads prompts from a text file (one a line), a JSONL file or a `datasets` dataset and chooses some."""

    path: Annotated[str, Asset()] = Field(description="File, folder of a saved dataset, hub id or package:MODULE/FILE.")
    column: str = Field(
        default="prompt", description="Column of the text in JSONL files and datasets; others become metadata."
    )
    split: str = Field(default="train", description="Split of a dataset.")
    choose: int | None = Field(default=None, ge=1, description="Prompts drawn for each iteration; all when none.")

    def varies(self) -> frozenset[Varies]:
        """A choice depends on seed and iteration."""
        return frozenset(("seed", "iteration")) if self.choose else frozenset()

    def least(self) -> Self:
        """One prompt."""
        return self.model_copy(update={"choose": 1})


class PromptsInputs(StageInputs):
    """Nothing."""


class PromptsOutputs(StageOutputs):
    """The chosen prompts."""

    chosen: PromptsTable


class EncodeConfig(StageConfig):
    """Encodes prompts with the model's text encoders, which leave memory afterwards."""

    model: ModelConfig
    negative_prompt: str = Field(default="", description="Prompt of the negative branch of guidance.")


class EncodeInputs(StageInputs):
    """Prompts, and the pipeline when it was made in this run."""

    prompts: PromptsTable
    pipeline: PipelineRef | None = None


class EncodeOutputs(StageOutputs):
    """Embeddings."""

    embeddings: ConditioningTable


class EncodeImagesConfig(StageConfig):
    """Encodes pictures into final latents with the model's autoencoder."""

    model: ModelConfig


class EncodeImagesInputs(StageInputs):
    """Pictures."""

    samples: SamplesTable
    pipeline: PipelineRef | None = None


class EncodeImagesOutputs(StageOutputs):
    """Final latents, without steps."""

    trajectory: TrajectoryTable


class SampleConfig(StageConfig):
    """Draws `per_prompt` pictures for each prompt from the policy."""

    model: ModelConfig
    per_prompt: int = Field(default=8, ge=1, description="Pictures for each prompt: the size of a group.")
    sampler: SamplerConfig
    weights: WeightSet = Field(default="raw", description="Which of the policy's weights: raw, old or ema.")
    fixed_noise: bool = Field(default=False, description="The same noise in every iteration: for evaluations.")

    def varies(self) -> frozenset[Varies]:
        """Noise comes from seed and iteration."""
        return frozenset(("seed",)) if self.fixed_noise else frozenset(("seed", "iteration"))

    def least(self) -> Self:
        """The smallest group that has a spread."""
        return self.model_copy(update={"per_prompt": min(self.per_prompt, 2)})


class SampleInputs(StageInputs):
    """Prompts, their embeddings and the policy; without a policy the base model draws."""

    prompts: PromptsTable
    conditioning: ConditioningTable
    policy: PolicyRef | None = None
    pipeline: PipelineRef | None = None


class SampleOutputs(StageOutputs):
    """Pictures, and the trajectories that led to them."""

    samples: SamplesTable
    trajectory: TrajectoryTable


class ScoreConfig(StageConfig):
    """Scores pictures with one or more rewards."""

    rewards: dict[str, RewardConfig] = Field(min_length=1, description="Rewards by column name.")

    def metric_names(self) -> tuple[str, ...]:
        """For each reward its mean by its own name, and std, zero_std_ratio and missing below it."""
        below = ("std", "zero_std_ratio", "missing")
        return tuple(n for name in self.rewards for n in (name, *(f"{name}/{b}" for b in below)))

    @model_validator(mode="after")
    def _free_names(self) -> "ScoreConfig":
        taken = {"sample_id", "prompt_id"} & set(self.rewards)
        if taken:
            raise ValueError(f"a reward cannot be called {sorted(taken)[0]!r}: the table has that column")
        strange = [name for name in self.rewards if not re.fullmatch(r"[A-Za-z][\w-]*", name)]
        if strange:
            raise ValueError(
                f"the reward's name {strange[0]!r} becomes a column and a metric: use letters, digits, _ and -"
            )
        return self


class ScoreInputs(StageInputs):
    """Pictures."""

    samples: SamplesTable


class ScoreOutputs(StageOutputs):
    """Scores."""

    rewards: RewardsTable


class AdvantageConfig(StageConfig):
    """Turns rewards into advantages: (r - mean) / (std + 1e-4), clamped."""

    kind: Literal["group", "global", "none"] = Field(
        default="group", description="std of each prompt's group; of all samples; or the reward minus its group's mean."
    )
    clamp: float = Field(default=5.0, gt=0, description="Advantages are clamped to [-clamp, clamp].")
    flat: float = Field(
        default=1e-6, ge=0, description="A group whose std is not above this has no spread: advantage 0."
    )

    def metric_names(self) -> tuple[str, ...]:
        """Statistics of the weighted reward and of the advantages."""
        return ("reward/mean", "reward/std", "reward/zero_std_ratio", "advantage/std", "advantage/dropped")


class AdvantageInputs(StageInputs):
    """Scores."""

    rewards: RewardsTable


class AdvantageOutputs(StageOutputs):
    """Advantages."""

    advantages: AdvantagesTable


class UpdateConfig(StageConfig):
    """Optimizer steps on the trainable weights."""

    model: ModelConfig
    loss: LossConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    steps: int = Field(
        default=1, ge=1, description="Optimizer steps an epoch; the samples are split evenly among them."
    )
    epochs: int = Field(default=1, ge=1, description="Passes over the samples.")
    kl: KlConfig | None = None
    old: OldPolicyConfig | None = Field(
        default=None, description="Schedule of the old policy, for losses that have one."
    )
    ema: EmaConfig | None = Field(default=None, description="Average of the weights for evaluation and export.")

    def varies(self) -> frozenset[Varies]:
        """Noise, order, learning rate and old policy depend on them."""
        return frozenset(("seed", "iteration"))

    def least(self) -> Self:
        """One optimizer step."""
        return self.model_copy(update={"steps": 1, "epochs": 1})


class UpdateInputs(StageInputs):
    """What was sampled, how good it was, and the policy to improve; without a policy the base is improved."""

    trajectory: TrajectoryTable
    conditioning: ConditioningTable
    advantages: AdvantagesTable | None = None
    policy: PolicyRef | None = None
    pipeline: PipelineRef | None = None


class UpdateOutputs(StageOutputs):
    """The better policy."""

    policy: PolicyRef


CONTRACTS: dict[str, Contract] = {
    "prompts": Contract(PromptsConfig, PromptsInputs, PromptsOutputs, 1, False),
    "import_samples": Contract(ImportSamplesConfig, ImportSamplesInputs, ImportSamplesOutputs, 1, False),
    "encode": Contract(EncodeConfig, EncodeInputs, EncodeOutputs, 1, True),
    "encode_images": Contract(EncodeImagesConfig, EncodeImagesInputs, EncodeImagesOutputs, 1, True),
    "sample": Contract(SampleConfig, SampleInputs, SampleOutputs, 1, True),
    "score": Contract(ScoreConfig, ScoreInputs, ScoreOutputs, 1, False),
    "advantage": Contract(AdvantageConfig, AdvantageInputs, AdvantageOutputs, 1, False),
    "update": Contract(UpdateConfig, UpdateInputs, UpdateOutputs, 1, True),
    "summarise": Contract(SummariseConfig, SummariseInputs, SummariseOutputs, 1, False),
    "export": Contract(ExportConfig, ExportInputs, ExportOutputs, 1, True),
    "render": Contract(RenderConfig, RenderInputs, RenderOutputs, 1, False),
    "fit_autoencoder": Contract(FitAutoencoderConfig, FitAutoencoderInputs, FitAutoencoderOutputs, 1, True),
}
