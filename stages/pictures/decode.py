"""A picture file of any common format to plain RGB."""

import io

import numpy as np
from PIL import Image, ImageOps

from schemas.errors import InputError

_DEEP = ("I", "F")  # more than 8 bits a channel: a conversion would clip them


def rgb(content: bytes, place: str, resolution: int | None) -> np.ndarray:
    """Pixels (height, width, 3) uint8, upright as its EXIF says, alpha over white; of several frames the first.

    With a `resolution` the largest centred square is scaled to it (Lanczos). InputError begins with `place`.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            upright = ImageOps.exif_transpose(image)
    except Exception as error:  # decoders raise whatever they stumble over
        raise InputError(
            f"picture {place} does not decode ({type(error).__name__}: {error}); replace it, or leave it out"
        ) from error
    if upright.mode.startswith(_DEEP):
        raise InputError(f"picture {place} has more than 8 bits a channel (mode {upright.mode}); save it with 8")
    flat = _over_white(upright) if upright.has_transparency_data else upright.convert("RGB")
    return np.asarray(flat if resolution is None else _square(flat, resolution))


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _square(image: Image.Image, size: int) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS)
