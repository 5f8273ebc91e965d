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
    scores: list[float | None] = [None] * len(pictures)
    for shape in {picture.shape for picture in pictures}:  # pictures that were taken in may be of many sizes
        rows = [row for row, picture in enumerate(pictures) if picture.shape == shape]
        verdict = check(np.stack([pictures[row] for row in rows]), [parse(prompts[row]) for row in rows])
        for row, score in zip(rows, verdict.strict if config.score == "strict" else verdict.partial, strict=True):
            scores[row] = float(score)
    return scores
