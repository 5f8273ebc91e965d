"""TensorBoard, by the event writer of its own package: no torch, no TensorFlow."""

import importlib
import time
from typing import Any

from pipelines.trackers.base import Spot
from schemas.trackers import TensorboardConfig


class TensorboardTracker:
    """Event files in one folder; a resumed run adds a file."""

    id = ""

    def __init__(self, config: TensorboardConfig, spot: Spot) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = spot.directory / config.folder
        self._writer = EventFileWriter(str(folder if folder.is_relative_to(spot.directory) else folder / spot.name))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One event, on disk when this returns."""
        # Generated protobuf modules: type checkers find no names in them.
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        values = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = events.Event(wall_time=time.time(), step=step, summary=summaries.Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
