"""Experiment trackers that a run is mirrored to. Where results are shown is no stage's identity."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.strict import Strict


class TensorboardConfig(Strict):
    """TensorBoard event files."""

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = Field(
        default="tensorboard",
        min_length=1,
        description="In the run directory; below an absolute folder each run has one of its own.",
    )


class WandbConfig(Strict):
    """Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    project: str = Field(default="rewardflow", min_length=1)
    entity: str | None = Field(default=None, description="User or team; the key's own when none.")
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="What WANDB_MODE says, else online, when none; offline runs are sent by `wandb sync`."
    )


class MlflowConfig(Strict):
    """MLflow."""

    kind: Literal["mlflow"] = "mlflow"
    uri: str | None = Field(
        default=None, min_length=1, description="Tracking URI; mlflow.db (SQLite) in the run directory when none."
    )
    experiment: str = Field(default="rewardflow", min_length=1)


class TrackioConfig(Strict):
    """Trackio, on this machine: the folder is Trackio's own (TRACKIO_DIR)."""

    kind: Literal["trackio"] = "trackio"
    project: str = Field(default="rewardflow", min_length=1)


TrackerConfig = Annotated[TensorboardConfig | WandbConfig | MlflowConfig | TrackioConfig, Field(discriminator="kind")]
