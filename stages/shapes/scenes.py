"""The example's vocabulary: a prompt such as 'two red circles' names a number, a colour and a shape.

The splits lie beside this file in prompts/: RL trains on train.txt, the best policy is chosen on validation.txt and
reported on heldout.txt; these two hold every number and every shape twice.
"""

from itertools import product
from typing import NamedTuple

NUMBERS = ("one", "two", "three")
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")


class Scene(NamedTuple):
    """What a picture must show: `number` objects (1 to 3), all of one colour and one shape."""

    number: int
    colour: str
    shape: str


def prompt(scene: Scene) -> str:
    """The words for a scene: Scene(2, 'red', 'circle') is 'two red circles'."""
    plural = "" if scene.number == 1 else "s"
    return f"{NUMBERS[scene.number - 1]} {scene.colour} {scene.shape}{plural}"


def parse(text: str) -> Scene:
    """The scene that a prompt names; ValueError if it names none."""
    words = text.lower().split()
    if len(words) == 3:
        number, colour, shape = words[0], words[1], words[2].removesuffix("s")
        if number in NUMBERS and colour in COLOURS and shape in SHAPES:
            return Scene(NUMBERS.index(number) + 1, colour, shape)
    raise ValueError(
        f"prompt {text!r} is none of this example's: want NUMBER COLOUR SHAPE, such as 'two red circles', with "
        f"NUMBER one of {', '.join(NUMBERS)}; COLOUR one of {', '.join(COLOURS)}; SHAPE one of {', '.join(SHAPES)}"
    )


ALL = tuple(prompt(Scene(n, colour, shape)) for n, colour, shape in product((1, 2, 3), COLOURS, SHAPES))
