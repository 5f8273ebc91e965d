import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from stages.shapes.check import check, find
from stages.shapes.render import BACKGROUND, PALETTE, render, render_all
from stages.shapes.scenes import ALL, COLOURS, SHAPES, Scene, parse

SCENES = [parse(text) for text in ALL]


def drawn(*objects: tuple[str, tuple[int, int, int, int], str]) -> NDArray[np.uint8]:
    """A picture (1, 32, 32, 3) of boxes and ellipses: (kind, box, colour)."""
    image = Image.new("RGB", (32, 32), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for kind, box, colour in objects:
        (draw.rectangle if kind == "square" else draw.ellipse)(box, fill=PALETTE[colour])
    return np.asarray(image)[None]


def test_fresh_pictures_pass() -> None:
    scenes = SCENES * 10
    verdict = check(render_all(scenes, np.random.default_rng(0)), scenes)
    assert verdict.strict.mean() >= 0.99
    assert verdict.partial.min() > 0.9


def test_blurred_pictures_pass() -> None:
    images = render_all(SCENES, np.random.default_rng(1))
    soft = np.stack([np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(0.6))) for image in images])
    assert check(soft, SCENES).strict.mean() >= 0.97


def test_every_other_scene_is_refused() -> None:
    images = render_all(SCENES, np.random.default_rng(2))
    for i, scene in enumerate(SCENES):
        verdict = check(images, [scene] * len(SCENES))
        assert np.flatnonzero(verdict.strict).tolist() == [i]
        assert verdict.partial.argmax() == i


def test_blank_and_noise_show_nothing() -> None:
    blank = np.broadcast_to(np.array(BACKGROUND, dtype=np.uint8), (1, 32, 32, 3))
    noise = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    assert check(blank, [Scene(1, "red", "circle")]) == (np.array([False]), np.array([0.0]))
    for scene in SCENES:
        verdict = check(noise, [scene])
        assert not verdict.strict[0]
        assert verdict.partial[0] < 0.2


def test_an_object_too_many_and_one_missing_cost_the_same() -> None:
    left, right = ("square", (3, 3, 13, 13), "red"), ("square", (18, 18, 28, 28), "red")
    exact = check(drawn(left, right), [Scene(2, "red", "square")])
    more = check(drawn(left, right), [Scene(1, "red", "square")])
    fewer = check(drawn(left), [Scene(2, "red", "square")])
    assert exact.strict[0]
    assert not more.strict[0]
    assert not fewer.strict[0]
    assert more.partial[0] == pytest.approx(fewer.partial[0], abs=0.01)
    assert exact.partial[0] == pytest.approx(2 * fewer.partial[0], abs=0.01)


def test_one_object_of_another_colour_or_shape_is_refused() -> None:
    scene = Scene(2, "red", "square")
    colour = check(drawn(("square", (3, 3, 13, 13), "red"), ("square", (18, 18, 28, 28), "blue")), [scene])
    shape = check(drawn(("square", (3, 3, 13, 13), "red"), ("circle", (18, 18, 28, 28), "red")), [scene])
    assert not colour.strict[0]
    assert not shape.strict[0]
    assert 0.4 < colour.partial[0] < 0.6
    assert 0.5 < shape.partial[0] < 0.95


def test_a_box_that_is_not_square_is_refused() -> None:
    assert not check(drawn(("square", (3, 3, 13, 26), "red")), [Scene(1, "red", "square")]).strict[0]


def test_touching_objects_are_one_and_specks_are_none() -> None:
    touching = drawn(("square", (3, 3, 13, 13), "red"), ("square", (14, 3, 24, 13), "red"))
    assert len(find(touching).picture) == 1
    speck = drawn(("square", (3, 3, 13, 13), "red"), ("square", (25, 25, 26, 26), "blue"))
    assert check(speck, [Scene(1, "red", "square")]).strict[0]
    blot = drawn(("square", (3, 3, 13, 13), "red"), ("square", (25, 25, 28, 28), "blue"))
    assert not check(blot, [Scene(1, "red", "square")]).strict[0]


def test_objects_are_named_by_nearest_colour_and_best_outline() -> None:
    generator = np.random.default_rng(5)
    for i, colour in enumerate(COLOURS):
        for j, shape in enumerate(SHAPES):
            objects = find(render(Scene(3, colour, shape), generator)[None])
            assert objects.picture.tolist() == [0, 0, 0]
            assert (objects.distance.argmin(axis=1) == i).all()
            assert (objects.likeness.argmax(axis=1) == j).all()
            assert objects.likeness[:, j].min() > 0.95


def test_a_picture_is_judged_alone() -> None:
    images = render_all(SCENES, np.random.default_rng(6))
    images[1] = 0  # one dark component that fills the picture
    together = check(images, SCENES).partial
    alone = [check(images[i : i + 1], [scene]).partial[0] for i, scene in enumerate(SCENES)]
    assert together.tolist() == alone


def test_other_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="want 2 uint8 RGB pictures, got float64"):
        check(np.zeros((2, 32, 32, 3)), SCENES[:2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="want 2 uint8"):
        check(np.zeros((3, 32, 32, 3), dtype=np.uint8), SCENES[:2])
