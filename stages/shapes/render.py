"""Draws scenes: plain pictures of 32 x 32 pixels, the example's training data."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from stages.shapes.scenes import Scene

SIZE = 32
BACKGROUND = (242, 242, 238)
PALETTE = {"red": (215, 45, 40), "green": (40, 150, 70), "blue": (45, 75, 210), "yellow": (240, 190, 25)}
_OVERSAMPLING = 4
_WIDTHS = (10.0, 13.0)  # of an object's bounding box, pixels: large enough for an autoencoder of factor 4
_GAP = 2.5  # between bounding boxes, pixels
_MARGIN = 1.0

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


def render(scene: Scene, generator: np.random.Generator) -> NDArray[np.uint8]:
    """One picture of the scene, anti-aliased: (32, 32, 3) RGB."""
    scale = _OVERSAMPLING
    image = Image.new("RGB", (SIZE * scale, SIZE * scale), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for left, top, right, bottom in place(scene.number, generator):
        # Pillow draws a box's last pixel too.
        box = (round(left * scale), round(top * scale), round(right * scale) - 1, round(bottom * scale) - 1)
        _draw(draw, scene.shape, box, PALETTE[scene.colour])
    return np.asarray(image.reduce(scale))


def render_all(scenes: Sequence[Scene], generator: np.random.Generator) -> NDArray[np.uint8]:
    """One picture a scene: (scenes, 32, 32, 3)."""
    return np.stack([render(scene, generator) for scene in scenes])


def place(number: int, generator: np.random.Generator) -> list[Box]:
    """Square boxes of random size and place that keep their distance; sizes are drawn anew if no place is found."""
    while True:
        widths = generator.uniform(*_WIDTHS, size=number)
        tries = _MARGIN + generator.random((64, number, 2)) * (SIZE - 2 * _MARGIN - widths[:, None])
        good = np.flatnonzero(_apart(tries, widths))
        if len(good):
            corners = tries[good[0]].tolist()
            return [(x, y, x + w, y + w) for (x, y), w in zip(corners, widths.tolist(), strict=True)]


def _apart(corners: NDArray[np.float64], widths: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of the placements (tries, objects, 2) keep the gap between all boxes."""
    apart = np.ones(len(corners), dtype=bool)
    for i, j in combinations(range(len(widths)), 2):
        delta = corners[:, i] - corners[:, j]  # (tries, 2)
        apart &= ((delta <= -widths[i] - _GAP) | (delta >= widths[j] + _GAP)).any(axis=1)
    return apart


def _draw(draw: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    match shape:
        case "circle":
            draw.ellipse(box, fill=colour)
        case "square":
            draw.rectangle(box, fill=colour)
        case "triangle":
            draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=colour)
        case _:
            raise ValueError(f"no drawing for shape {shape!r}")
