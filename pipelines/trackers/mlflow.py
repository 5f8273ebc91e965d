"""MLflow, by its client alone: nothing of its global state is used."""

import logging
import os
import time

from pipelines.trackers.base import Spot
from schemas.trackers import MlflowConfig

_BATCH = 1000  # metrics in one call, MLflow's own limit


class MlflowTracker:
    """One MLflow run; a resumed run has the same id. The default store is SQLite in the run directory."""

    def __init__(self, config: MlflowConfig, spot: Spot) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=config.uri or f"sqlite:///{spot.directory / 'mlflow.db'}")
        if spot.id:
            self.id = spot.id
            self._client.update_run(self.id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(config.experiment)
        # Without a place of their own, artifacts of a local store would go to ./mlruns.
        artifacts = None if config.uri else (spot.directory / "mlflow").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(config.experiment, artifacts)
        run = self._client.create_run(experiment, run_name=spot.name, tags=dict(spot.about))
        self.id = run.info.run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Stored when this returns."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(name, value, now, step) for name, value in metrics.items()]
        for begin in range(0, len(points), _BATCH):
            self._client.log_batch(self.id, metrics=points[begin : begin + _BATCH])

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self.id)
