from collections import Counter
from importlib.resources import files

import pytest

from stages.shapes import scenes
from stages.shapes.scenes import Scene, parse, prompt

NAMES = ("train", "validation", "heldout", "all")
SPLITS = {name: files("stages.shapes").joinpath(f"prompts/{name}.txt").read_text().splitlines() for name in NAMES}


def test_every_prompt_is_read_back() -> None:
    assert len(set(scenes.ALL)) == 36
    assert [prompt(parse(text)) for text in scenes.ALL] == list(scenes.ALL)
    assert parse("Two red circles") == Scene(2, "red", "circle")
    assert prompt(Scene(1, "blue", "square")) == "one blue square"


@pytest.mark.parametrize(
    "text", ["", "four red circles", "two pink circles", "two red stars", "two red", "a two red circles"]
)
def test_other_words_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"three.*yellow.*triangle") as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_splits_share_nothing_and_leave_nothing_out() -> None:
    assert [len(SPLITS[name]) for name in ("train", "validation", "heldout")] == [24, 6, 6]
    assert sorted(SPLITS["train"] + SPLITS["validation"] + SPLITS["heldout"]) == sorted(scenes.ALL)
    assert SPLITS["all"] == list(scenes.ALL)


@pytest.mark.parametrize("name", ["validation", "heldout"])
def test_splits_are_balanced(name: str) -> None:
    chosen = [parse(text) for text in SPLITS[name]]
    assert set(Counter(scene.number for scene in chosen).values()) == {2}
    assert set(Counter(scene.shape for scene in chosen).values()) == {2}
    assert sorted(Counter(scene.colour for scene in chosen).values()) == [1, 1, 2, 2]
