"""A strict check of pictures against their scenes, in the manner of GenEval (arXiv 2310.11513), without a network.

Objects are connected components of what differs from the background. Each gets a colour (the nearest of the palette)
and a shape (the best of three ideal outlines of the object's own place and area, by soft intersection over union, so
that soft edges do not count against a picture). The check knows nothing of how a picture came about.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from stages.shapes.render import BACKGROUND, PALETTE
from stages.shapes.scenes import COLOURS, SHAPES, Scene

Floats = NDArray[np.floating]  # float32: the sums are short and pictures are many

_INK = 100.0  # RGB distance from the background at which a pixel belongs to an object
_SPECK = 6  # pixels: smaller components are no objects
_COLOUR = 60.0  # greatest RGB distance of an object from its colour
_LIKENESS = 0.80  # least intersection over union with the ideal outline
_GRADED = (0.60, 0.90)  # likeness that earns nothing and everything in the partial score

_PALETTE: Floats = np.array([PALETTE[colour] for colour in COLOURS], dtype=np.float32)
_BACKGROUND: Floats = np.array(BACKGROUND, dtype=np.float32)
_CONTRAST: Floats = np.linalg.norm(_PALETTE - _BACKGROUND, axis=1)
_IN_PLANE = np.array([[[0] * 3] * 3, [[0, 1, 0], [1, 1, 1], [0, 1, 0]], [[0] * 3] * 3])  # never from picture to picture


class Verdict(NamedTuple):
    """Per picture: `strict` (pictures,) all right or not; `partial` (pictures,) in [0, 1]."""

    strict: NDArray[np.bool_]
    partial: Floats


class Objects(NamedTuple):
    """What was found, one row an object."""

    picture: NDArray[np.intp]  # (objects,) index of its picture
    distance: Floats  # (objects, colours) RGB distance to each of COLOURS
    likeness: Floats  # (objects, shapes) intersection over union with each of SHAPES


def check(images: NDArray[np.uint8], scenes: Sequence[Scene]) -> Verdict:
    """Whether each picture (pictures, height, width, 3) shows its scene and nothing else.

    The partial score is the mean worth of the wanted objects, where an object's worth falls with its distance from the
    wanted colour and outline; an object too many costs as much as one that is missing.
    """
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or len(images) != len(scenes):
        raise ValueError(f"want {len(scenes)} uint8 RGB pictures, got {images.dtype} of shape {images.shape}")
    objects = find(images)
    strict, partial = np.zeros(len(scenes), dtype=bool), np.zeros(len(scenes), dtype=np.float32)
    starts = np.searchsorted(objects.picture, np.arange(len(scenes) + 1))
    for i, scene in enumerate(scenes):
        rows = slice(starts[i], starts[i + 1])
        distance, likeness = objects.distance[rows], objects.likeness[rows]
        strict[i] = len(distance) == scene.number and bool(_right(scene, distance, likeness).all())
        worth = np.sort(_worth(scene, distance, likeness))[::-1]
        partial[i] = worth[: scene.number].sum() / max(scene.number, len(worth))
    return Verdict(strict, partial)


def find(images: NDArray[np.uint8]) -> Objects:
    """The objects in the pictures (pictures, height, width, 3), in order of picture."""
    ink = np.linalg.norm(images - _BACKGROUND, axis=-1)
    labels = np.zeros(ink.shape, dtype=np.int32)
    ndimage.label(ink > _INK, structure=_IN_PLANE, output=labels)
    sizes = np.bincount(labels.ravel())
    kept = np.flatnonzero(sizes >= _SPECK)
    kept = kept[kept > 0]
    if not len(kept):
        return Objects(
            np.zeros(0, dtype=np.intp), np.zeros((0, len(COLOURS)), np.float32), np.zeros((0, len(SHAPES)), np.float32)
        )
    values, where = np.unique(labels, return_index=True)
    first = where[np.searchsorted(values, kept)]  # label 0 is absent where all is ink
    picture = first // ink[0].size
    # An object's soft edge lies just outside its component.
    grown = np.where(labels > 0, labels, ndimage.grey_dilation(labels, size=(1, 3, 3)))
    member = grown[picture] == kept[:, None, None]
    colour = _colours(images[picture], np.where(member, ink[picture], 0.0))
    distance = np.linalg.norm(colour[:, None] - _PALETTE, axis=-1)
    contrast = _CONTRAST[distance.argmin(axis=1)][:, None, None]
    cover = np.where(member, np.clip(ink[picture] / contrast, 0.0, 1.0), 0.0)
    return Objects(picture, distance, _likeness(cover))


def _right(scene: Scene, distance: Floats, likeness: Floats) -> NDArray[np.bool_]:
    colour, shape = COLOURS.index(scene.colour), SHAPES.index(scene.shape)
    right_colour = (distance.argmin(axis=1) == colour) & (distance[:, colour] <= _COLOUR)
    return right_colour & (likeness.argmax(axis=1) == shape) & (likeness[:, shape] >= _LIKENESS)


def _worth(scene: Scene, distance: Floats, likeness: Floats) -> Floats:
    """Worth of each object (objects,) in [0, 1]."""
    low, high = _GRADED
    colour = np.clip(1.0 - distance[:, COLOURS.index(scene.colour)] / (2 * _COLOUR), 0.0, 1.0)
    shape = np.clip((likeness[:, SHAPES.index(scene.shape)] - low) / (high - low), 0.0, 1.0)
    return np.sqrt(colour) * shape


def _colours(images: NDArray[np.uint8], ink: Floats) -> Floats:
    """Mean colour (objects, 3) of each object's inner pixels, those with at least 80 % of its strongest ink."""
    inner = ink >= 0.8 * ink.max(axis=(1, 2), keepdims=True)
    return (images * inner[..., None]).sum(axis=(1, 2)) / inner.sum(axis=(1, 2))[:, None]


def _likeness(cover: Floats) -> Floats:
    """Soft intersection over union (objects, shapes) of covers (objects, height, width) with ideal outlines."""
    area = cover.sum(axis=(1, 2), keepdims=True)
    rows, columns = (np.arange(n, dtype=np.float32) + 0.5 for n in cover.shape[1:])
    y = rows[:, None] - (cover * rows[:, None]).sum(axis=(1, 2), keepdims=True) / area
    x = columns - (cover * columns).sum(axis=(1, 2), keepdims=True) / area
    outlines = {"circle": _circle, "square": _square, "triangle": _triangle}
    ideals = (outlines[shape](x, y, area) for shape in SHAPES)
    return np.stack(
        [np.minimum(cover, o).sum(axis=(1, 2)) / np.maximum(cover, o).sum(axis=(1, 2)) for o in ideals], axis=1
    )


# Ideal outlines of a given area about their centre of mass: how much of each pixel they cover, in [0, 1].


def _circle(x: Floats, y: Floats, area: Floats) -> Floats:
    return np.clip(np.sqrt(area / np.pi) - np.hypot(x, y) + 0.5, 0.0, 1.0)


def _square(x: Floats, y: Floats, area: Floats) -> Floats:
    half = np.sqrt(area) / 2
    return np.clip(half - np.abs(x) + 0.5, 0.0, 1.0) * np.clip(half - np.abs(y) + 0.5, 0.0, 1.0)


def _triangle(x: Floats, y: Floats, area: Floats) -> Floats:
    """As high as wide, upright; the centre of mass lies a third of the height above the base."""
    height = np.sqrt(2 * area)
    from_base = height / 3 - y
    from_side = ((y + 2 * height / 3) / 2 - np.abs(x)) * (2 / np.sqrt(5.0))
    return np.clip(from_base + 0.5, 0.0, 1.0) * np.clip(from_side + 0.5, 0.0, 1.0)
