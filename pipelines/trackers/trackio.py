"""Trackio, on this machine: its store is SQLite, and nothing is sent anywhere."""

import importlib
import uuid
from typing import Any

from pipelines.trackers.base import Spot
from schemas.trackers import TrackioConfig


class TrackioTracker:
    """One Trackio run. Trackio resumes by name, so that the name gets a suffix: runs of other folders may share it."""

    def __init__(self, config: TrackioConfig, spot: Spot) -> None:
        trackio: Any = importlib.import_module("trackio")  # not in the pinned environment, so its types are unknown

        self.id = spot.id or f"{spot.name}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            project=config.project,
            name=self.id,
            resume="allow",
            config=dict(spot.about),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """A row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits until all rows are stored."""
        self._run.finish()
