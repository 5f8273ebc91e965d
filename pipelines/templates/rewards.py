"""Rewards of your own: plain functions, named in flows.yaml under `external`."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def mine(
    settings: dict[str, Any], pictures: Sequence[np.ndarray], prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
) -> list[float | None]:
    """How dark each picture is, from 0 to 1: replace it by what you want of yours.

    `pictures` are (height, width, 3) uint8, `metadata` the other columns of the prompts. None is a missing score.
    """
    return [1.0 - float(picture.mean()) / 255 for picture in pictures]
