"""Pictures as lossless PNG in the struct that `datasets` decodes as Image. No torch here."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from schemas.errors import InputError, NonFinite


def png(pixels: np.ndarray) -> dict[str, Any]:
    """Table value of a picture (height, width, 3) uint8."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"wanted (height, width, 3) uint8, got {pixels.shape} {pixels.dtype}")
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}


def pixels(value: Mapping[str, Any], sample_id: str = "") -> np.ndarray:
    """Picture (height, width, 3) uint8 of a table value. Raises InputError, which names the sample, if it is none."""
    try:
        with Image.open(io.BytesIO(value["bytes"])) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, TypeError, SyntaxError) as error:
        raise InputError(
            f"the picture of sample {sample_id!r} does not decode ({error}); run the stage that made it again"
        ) from error


def to_uint8(pictures: Any) -> np.ndarray:
    """Pictures (batch, height, width, 3) uint8 of (batch, 3, height, width) in [0, 1], rounded as diffusers does.

    Takes arrays and CPU tensors. Raises NonFinite for NaN, which would become black silently.
    """
    values = np.asarray(pictures, dtype=np.float32)
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        raise NonFinite(f"a decoded picture has NaN or infinity (number {int(bad.argmax())} of its batch)")
    return (values.clip(0, 1).transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
