"""Objectives: what one model call of an update trains on. `trajectory` replays stochastic steps; `terminal` draws
times and noise on final latents. Both hand velocities to a loss of `stages/losses`.
"""

from schemas.contracts import UpdateConfig, UpdateInputs
from stages.context import StageContext
from stages.engine.policy import Engine
from stages.objectives.rows import Rows
from stages.objectives.terminal import Terminal
from stages.objectives.trajectory import Trajectory
from stages.objectives.units import Objective


def objective(config: UpdateConfig, inputs: UpdateInputs, ctx: StageContext, engine: Engine) -> Objective:
    """The objective that the loss needs."""
    rows = Rows(config.loss, inputs, ctx, engine.device)
    return (Trajectory if config.loss.needs.states else Terminal)(config, rows, ctx, engine)
