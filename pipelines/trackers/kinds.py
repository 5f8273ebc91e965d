"""The kinds of trackers there are, and whether what they need is installed."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from pipelines.trackers.base import Spot, Tracker
from pipelines.trackers.mlflow import MlflowTracker
from pipelines.trackers.tensorboard import TensorboardTracker
from pipelines.trackers.trackio import TrackioTracker
from pipelines.trackers.wandb import WandbTracker
from schemas.errors import UserError
from schemas.trackers import TrackerConfig

# A kind, the extra of pyproject.toml and the module it brings bear the same name.
OPENERS: dict[str, Callable[[Any, Spot], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def check_installed(trackers: Mapping[str, TrackerConfig]) -> None:
    """UserError that names the extra of a tracker whose package is not there. Nothing is imported."""
    for name, config in trackers.items():
        spec = importlib.util.find_spec(config.kind)
        if spec is None or spec.origin is None:  # without an origin it is a folder of that name, such as wandb's own
            message = f"trackers.{name}: the package of {config.kind!r} is not installed"
            raise UserError(f"{message}; pip install 'rewardflow[{config.kind}]', or leave the tracker out")
