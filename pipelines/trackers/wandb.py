"""Weights & Biases. Curves are drawn over `iteration`: wandb's own step only ever grows."""

import uuid

from pipelines.trackers.base import Spot
from schemas.trackers import WandbConfig

_PATIENCE = 10.0  # seconds for the last upload, also when Python ends; the rest is sent by `wandb sync`


class WandbTracker:
    """One wandb run; a resumed run has the same id."""

    def __init__(self, config: WandbConfig, spot: Spot) -> None:
        import wandb

        self.id = spot.id or uuid.uuid4().hex[:12]
        settings = wandb.Settings(silent=True, console="off", save_code=False, finish_timeout=_PATIENCE)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=spot.name,
            id=self.id,
            resume="allow",
            reinit="create_new",
            mode=config.mode,
            dir=str(spot.directory),
            config=dict(spot.about),
            settings=settings,
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """A row. Rows of one iteration become one, unless wandb has closed that step already."""
        self._run.log({"iteration": step, **metrics}, step=max(step, self._run.step))

    def close(self) -> None:
        """Uploads, or ends the offline file."""
        self._run.finish()
