"""Reward `shapes`: the built-in example's check of number, colour and shape."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.rewards import ShapesReward
from stages.shapes.check import check
from stages.shapes.scenes import parse


def shapes(
    config: ShapesReward,
    pictures: Sequence[NDArray[np.uint8]],
    prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]],
) -> list[float | None]:
    """Strict: 1 when all is right, else 0. Partial: graded in [0, 1]."""
    verdict = check(np.stack(pictures), [parse(prompt) for prompt in prompts])
    scores = verdict.strict if config.score == "strict" else verdict.partial
    return [float(score) for score in scores]
