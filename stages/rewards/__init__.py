"""Rewards: each is one function that scores pictures.

``score(config, pictures, prompts, metadata) -> list[float | None]``: pictures are uint8 (height, width, 3), one prompt
and one metadata mapping for each; None means that a picture has no score. A user's own reward has the same form, with
its settings as `config`.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InputError
from schemas.rewards import ExternalReward, RewardConfig

Scores = Sequence[float | None]
Reward = Callable[[Any, Sequence[NDArray[np.uint8]], Sequence[str], Sequence[dict[str, Any]]], Scores]

# Named, not imported: a run loads only the rewards it uses.
REWARDS: dict[str, str] = {
    "shapes": "stages.rewards.shapes:shapes",
    "jpeg_size": "stages.rewards.jpeg_size:jpeg_size",
}


def reward(config: RewardConfig) -> tuple[Reward, Any]:
    """The function of a reward and what it takes as its config."""
    if isinstance(config, ExternalReward):
        return _imported(config.target, f"external reward {config.name!r}"), config.settings
    return _imported(REWARDS[config.kind], f"reward {config.kind!r}"), config


def _imported(target: str, what: str) -> Reward:
    module, _, name = target.partition(":")
    try:
        found = vars(importlib.import_module(module)).get(name)
    except ImportError as error:
        remedy = "install its package or name its folder in `python_path`"
        raise InputError(f"cannot import {module!r} of {what}: {error}; {remedy}") from error
    except Exception as error:  # whatever a module does when it is imported
        problem = f"{type(error).__name__}: {error}"
        raise InputError(f"cannot import {module!r} of {what}: {problem}; mend the module") from error
    if not callable(found):
        raise InputError(f"{what}: module {module!r} has no function {name!r}; mend `target`")
    return cast(Reward, found)
