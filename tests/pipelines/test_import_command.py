"""`rewardflow import-samples`: a folder becomes a run with a flow file of its own; nothing is taken over in silence."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.cli import main
from pipelines.load import read
from stages.shapes.render import render
from stages.shapes.scenes import parse

SCORED = ("--rewards", "strict=shapes", "--set", "score.rewards.strict.score=strict")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; 'my pictures: #1' in it has three right pictures of one prompt and one of another."""
    generator = np.random.default_rng(0)
    for prompt, number in (("two red circles", 3), ("one blue square", 1)):
        below = tmp_path / "my pictures: #1" / prompt.replace(" ", "_")
        below.mkdir(parents=True)
        for index in range(number):
            Image.fromarray(render(parse(prompt), generator)).save(below / f"{index}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main(words)
    said, errors = capfd.readouterr()
    return code, said, errors


def taken(capfd: pytest.CaptureFixture[str], *words: str, name: str = "mine") -> tuple[int, str, str]:
    return command(capfd, "import-samples", "my pictures: #1", "--as", name, *words)


def metrics(place: str) -> dict[str, float]:
    return json.loads(Path("runs", place, "record.json").read_bytes())["outputs"]["metrics"]


@pytest.mark.slow
def test_a_folder_becomes_a_run_that_is_scored_now_or_later(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said, errors = taken(capfd)
    assert (code, errors) == (0, "")
    assert "4 pictures of 2 prompts in runs/mine/before/import/samples\nits flow: runs/mine/flow.yaml\n" in said
    code, said, _ = taken(capfd, *SCORED)
    assert code == 0
    assert "reused 1 finished stages" in said
    assert metrics("mine/before/score")["strict"] == 1
    (nodes,) = (flow["stages"] for flow in read(Path("runs/mine/flow.yaml")).tree["flows"].values())
    assert nodes["import"]["path"] == str(folder / "my pictures: #1")

    own = ("--file", "runs/mine/flow.yaml")
    with_reward = "score.rewards={size: {kind: jpeg_size, prefer: large}}"
    words = ("rerun", "mine", "--from", "before/score", *own, "--as", "other", "--plain", "--set", with_reward)
    assert command(capfd, *words)[0] == 0
    assert metrics("other/before/score")["size"] > 0
    assert not Path("runs/other/before/import").exists()  # adopted
    assert "before/import  adopted" in command(capfd, "show", "other")[1]
    assert "would be reused" in command(capfd, "why", "mine/before/import", *own)[1]

    # One picture becomes another: everything that reads it says so.
    Image.new("RGB", (32, 32)).save(folder / "my pictures: #1" / "one_blue_square" / "0.png")
    _, said, _ = command(capfd, "why", "mine/before/import", *own)
    assert "was made by another recipe: --on-change decides\n  config config.path:" in said
    code, _, errors = taken(capfd, *SCORED)
    assert code == 2
    assert errors.startswith("rewardflow: import was made by another recipe than the one wanted now:\n    config.path:")
    assert taken(capfd, *SCORED, "--on-change", "rerun")[0] == 0
    assert metrics("mine/before/score")["strict"] == 0.75


@pytest.mark.slow
def test_a_first_try_is_mended_and_a_run_is_not_taken_over(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damaged = folder / "my pictures: #1" / "one_blue_square" / "0.png"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    code, _, errors = taken(capfd)
    assert code == 2
    assert re.match(rf"rewardflow: picture '{damaged}' \(sample '\w+/0'\) does not decode", errors)
    damaged.write_bytes(whole)
    assert taken(capfd, "--resolution", "16")[0] == 0  # other settings: nothing was there yet
    code, _, errors = taken(capfd, "--resolution", "8")
    assert code == 2
    remedy = (
        "choose another name, or run it as it is: rewardflow run import_samples --file runs/mine/flow.yaml --as mine"
    )
    assert errors == f"rewardflow: --as mine: runs/mine/flow.yaml says otherwise than this command; {remedy}\n"
    assert read(Path("runs/mine/flow.yaml")).tree["flows"]["import_samples"]["stages"]["import"]["resolution"] == 16
    (folder / "runs" / "two").mkdir()
    (folder / "runs" / "two" / "run.json").write_text('{"flow": "shapes"}')
    code, _, errors = taken(capfd, name="two")
    assert code == 2
    assert errors == "rewardflow: --as two: runs/two is a run of something else; choose another name\n"
    assert not (folder / "runs" / "two" / "flow.yaml").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--rewards", "strict=shape"), "--rewards strict=shape: no reward 'shape'. Known: .* Did you mean 'shapes'"),
        (("--rewards", "shapes"), "--rewards shapes: wants NAME=KIND, such as size=jpeg_size"),
        (("--rewards", "mine=external"), "code of your own is named in a flow file only; import without it, add"),
        (("--set", "score.rewards.a.kind=jpeg_size", "--set", "score.rewards.a.prefr=large"), "Did you mean 'prefer'"),
        (("--set", "import.promt_column=text"), "unknown field 'promt_column'.* Did you mean 'prompt_column'"),
        (("--resolution", "0"), "import.resolution: wanted greater than or equal to 1, got 0"),
        (("--as", "a/b"), "--as: a run's name has letters, digits"),
    ],
)
def test_mistakes_leave_nothing_behind(
    folder: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], error: str
) -> None:
    code, _, errors = taken(capfd, *words)
    assert code == 2
    assert re.search(error, errors), errors
    assert not Path("runs").exists()


def test_paths_that_hold_no_pictures(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, errors = command(capfd, "import-samples", "nowhere", "--as", "mine")
    assert code == 2
    assert f"PATH 'nowhere': no folder at {folder}/nowhere; name a folder of pictures" in errors
    file = "my pictures: #1/one_blue_square/0.png"
    code, _, errors = command(capfd, "import-samples", file, "--as", "mine")
    assert code == 2
    assert "0.png is a file; name the folder that holds the pictures" in errors
    code, _, errors = command(capfd, "import-samples", "my pictures: #1")
    assert (code, errors) == (2, "rewardflow: --as: the new run needs a name of its own\n")


def test_the_help_teaches_the_forms_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import-samples", "--help"])
    said = capsys.readouterr().out
    for words in (
        "metadata.jsonl",
        "metadata.csv",
        "1.png 1.txt",
        "two_red_circles/1.png",
        "save_to_disk",
        "examples:",
    ):
        assert words in said
