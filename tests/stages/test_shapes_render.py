import numpy as np
import pytest

from stages.shapes.render import BACKGROUND, PALETTE, SIZE, place, render, render_all
from stages.shapes.scenes import ALL, COLOURS, SHAPES, Scene, parse

# Of the bounding box, what the shape covers.
FILLED = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5}


def test_a_generator_decides_the_picture() -> None:
    scene = parse("three green triangles")
    first, second = (render(scene, np.random.default_rng(seed)) for seed in (3, 4))
    assert np.array_equal(first, render(scene, np.random.default_rng(3)))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_fills_its_part_of_the_box(shape: str) -> None:
    background = np.array(BACKGROUND, dtype=float)
    for seed in range(20):
        [(left, _, right, _)] = place(1, np.random.default_rng(seed))
        image = render(Scene(1, "blue", shape), np.random.default_rng(seed))
        away = np.linalg.norm(np.array(PALETTE["blue"]) - background)
        covered = (np.linalg.norm(image - background, axis=-1) / away).sum()
        assert covered == pytest.approx(FILLED[shape] * (right - left) ** 2, rel=0.08)


@pytest.mark.parametrize("colour", COLOURS)
def test_pictures_hold_background_colour_and_mixtures_of_both(colour: str) -> None:
    image = render(Scene(3, colour, "circle"), np.random.default_rng(0)).reshape(-1, 3)
    low, high = np.minimum(PALETTE[colour], BACKGROUND), np.maximum(PALETTE[colour], BACKGROUND)
    assert ((image >= low) & (image <= high)).all()
    assert (image == PALETTE[colour]).all(axis=1).sum() > 100
    assert (image == BACKGROUND).all(axis=1).sum() > 400


def test_boxes_stay_inside_and_apart() -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        boxes = place(3, generator)
        assert min(min(box) for box in boxes) >= 1.0
        assert max(max(box) for box in boxes) <= SIZE - 1.0
        for i in range(3):
            for j in range(i):
                (l1, t1, r1, b1), (l2, t2, r2, b2) = boxes[i], boxes[j]
                assert max(l1 - r2, l2 - r1, t1 - b2, t2 - b1) >= 2.5


def test_render_all_makes_one_picture_a_scene() -> None:
    images = render_all([parse(text) for text in ALL], np.random.default_rng(0))
    assert images.shape == (36, SIZE, SIZE, 3)
    assert images.dtype == np.uint8
    assert len(np.unique(images.reshape(36, -1), axis=0)) == 36
