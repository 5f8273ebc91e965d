"""Reward `jpeg_size`: size of a picture as JPEG, the compressibility task of DDPO (arXiv 2305.13301)."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from schemas.rewards import JpegSizeReward


def jpeg_size(
    config: JpegSizeReward,
    pictures: Sequence[NDArray[np.uint8]],
    prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]],
) -> list[float | None]:
    """Kilobytes (1,000 bytes) of each picture; negative when small ones are preferred."""
    sign = -1.0 if config.prefer == "small" else 1.0
    return [sign * _kilobytes(picture, config.quality) for picture in pictures]


def _kilobytes(picture: NDArray[np.uint8], quality: int) -> float:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, format="JPEG", quality=quality)
    return stream.tell() / 1000
