"""Pictures of one's own: every form of folder, datasets, and what happens to pixels."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from PIL import Image

from schemas.assets import digest_of
from schemas.contracts import AdvantageConfig, AdvantageInputs, PromptsConfig, PromptsInputs, ScoreConfig, ScoreInputs
from schemas.errors import InputError
from schemas.imports import ImportSamplesConfig, ImportSamplesInputs
from stages import advantage, prompts, score
from stages.import_samples import run
from stages.shapes.render import render
from stages.shapes.scenes import parse
from stages.store import tables
from tests.stages.pictures import context, noise, pixels, save, taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_captions_beside_the_pictures(folder: Path, out: Path) -> None:
    files = {"b.png": "two red circles", "a.bmp": "a café", "more/c.PNG": "two red circles"}
    wanted = {}
    for seed, (name, text) in enumerate(files.items()):
        wanted[name] = save(folder / name, seed, height=5 + seed)
        (folder / name).with_suffix(".txt").write_bytes(f"\ufeff {text}\r\n".encode())
    (folder / "notes.md").write_text("of no use")
    (folder / ".hidden").mkdir()
    save(folder / ".hidden" / "d.png")
    outputs, rows, listed = taken(folder, out)
    assert [row["image"]["path"] for row in rows] == ["a.bmp", "b.png", "more/c.PNG"]
    assert [row["prompt"] for row in rows] == ["a café", "two red circles", "two red circles"]
    assert [row["index"] for row in rows] == [0, 0, 1]
    assert [row["sample_id"] for row in rows] == [f"{row['prompt_id']}/{row['index']}" for row in rows]
    assert {row["seed"] for row in rows} == {0}
    assert {row["metadata"] for row in rows} == {"{}"}
    for row, picture in zip(rows, pixels(rows), strict=True):
        np.testing.assert_array_equal(picture, wanted[row["image"]["path"]])  # of three sizes, to the last bit
    assert [row["prompt"] for row in listed] == ["a café", "two red circles"]
    assert outputs.metrics == {"pictures": 3, "prompts": 2, "unused": 1}


def test_a_prompt_has_the_id_that_the_stage_prompts_gives_it(folder: Path, out: Path, tmp_path: Path) -> None:
    save(folder / "one_blue_square" / "x.png")
    save(folder / "two red circles" / "x.png")
    _, rows, listed = taken(folder, out)
    (tmp_path / "prompts.txt").write_text("two red circles\none blue square\n")
    config = PromptsConfig(path=str(tmp_path / "prompts.txt"))
    chosen = prompts.run(config, PromptsInputs(), context(tmp_path / "p")).chosen.under(tmp_path / "p")
    ids = {row["prompt"]: row["prompt_id"] for row in tables.read(chosen).to_pylist()}
    assert {row["prompt"]: row["prompt_id"] for row in rows} == ids
    assert {row["prompt"]: row["prompt_id"] for row in listed} == ids


def test_a_sub_folder_a_prompt(folder: Path, out: Path) -> None:
    for name in ("b_cat/2.png", "b_cat/10.png", "a dog/1.jpg"):
        save(folder / name)
    _, rows, _ = taken(folder, out)
    shown = [(row["prompt"], row["index"], row["image"]["path"]) for row in rows]
    assert shown == [("a dog", 0, "a dog/1.jpg"), ("b cat", 0, "b_cat/10.png"), ("b cat", 1, "b_cat/2.png")]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_metadata_file(folder: Path, out: Path, kind: str) -> None:
    for seed, name in enumerate(("x.png", "sub/y.png", "left.png")):
        save(folder / name, seed)
    if kind == "jsonl":
        lines = [
            {"file_name": "./sub/y.png", "text": "a cat, asleep", "year": 1999, "tags": ["b", "a"]},
            {"file_name": "x.png", "text": "a cat, asleep", "year": 2001, "tags": []},
        ]
        (folder / "metadata.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    else:
        (folder / "metadata.csv").write_text(
            'year,file_name,text\n1999,sub/y.png,"a cat, asleep"\n2001,x.png,"a cat, asleep"'
        )
    outputs, rows, listed = taken(folder, out, prompt_column="text")
    assert [row["image"]["path"] for row in rows] == ["sub/y.png", "x.png"]  # in the order of the file
    assert [row["sample_id"] for row in rows] == [f"{listed[0]['prompt_id']}/{i}" for i in (0, 1)]  # one group
    wanted = ['{"tags":["b","a"],"year":1999}', '{"tags":[],"year":2001}']
    assert [row["metadata"] for row in rows] == (wanted if kind == "jsonl" else ['{"year":"1999"}', '{"year":"2001"}'])
    assert [(row["prompt"], row["metadata"]) for row in listed] == [("a cat, asleep", "{}")]
    assert outputs.metrics == {"pictures": 2, "prompts": 1, "unused": 1}


def test_saved_datasets(folder: Path, out: Path) -> None:
    pictures = [Image.fromarray(noise(seed, height=4 + seed)) for seed in range(3)]
    columns = {"picture": pictures, "other": pictures, "text": ["a", "b", "a"], "kind": [1, 0, 1]}
    features = Features(
        picture=ImageFeature(), other=ImageFeature(), text=Value("string"), kind=ClassLabel(names=["x", "y"])
    )
    data = Dataset.from_dict(columns, features=features)
    data.save_to_disk(folder / "one")
    DatasetDict({"test": data}).save_to_disk(folder / "many")
    named = {"prompt_column": "text", "image_column": "picture"}
    outputs, rows, listed = taken(folder / "one", out, **named)
    assert [(row["prompt"], row["index"], row["metadata"]) for row in rows] == [
        ("a", 0, '{"kind":1}'),
        ("b", 0, '{"kind":0}'),
        ("a", 1, '{"kind":1}'),
    ]
    for seed, picture in enumerate(pixels(rows)):
        np.testing.assert_array_equal(picture, noise(seed, height=4 + seed))
    assert [row["prompt"] for row in listed] == ["a", "b"]
    again, _, _ = taken(folder / "many", out.with_name("again"), split="test", **named)
    assert again.samples.digest == outputs.samples.digest
    for settings, words in (
        ({**named, "split": "tst"}, "'tst'.*Did you mean 'test'"),
        ({**named, "split": "test", "image_column": "pictur"}, "set `image_column`.*Did you mean 'picture'"),
        ({**named, "split": "test", "prompt_column": "txt"}, "set `prompt_column`.*Did you mean 'text'"),
        ({"split": "test", "image_column": "text", "prompt_column": "text"}, "is Value.*not an Image; name another"),
        ({**named, "split": "test", "prompt_column": "kind"}, "row 0: `prompt_column` 'kind' wants text, got 1"),
    ):
        with pytest.raises(InputError, match=words):
            taken(folder / "many", out, **settings)


def test_a_row_without_a_picture_is_refused(folder: Path, out: Path) -> None:
    features = Features(image=ImageFeature(), prompt=Value("string"))
    Dataset.from_dict({"image": [None], "prompt": ["b"]}, features=features).save_to_disk(folder / "none")
    with pytest.raises(InputError, match="row 0: `image_column` holds no picture; save the dataset with its pictures"):
        taken(folder / "none", out)


def test_alpha_lies_over_white(folder: Path, out: Path) -> None:
    rgba = noise(1, 6, 6, 4)
    rgba[0, :, 3], rgba[1, :, 3] = 0, 255
    (folder / "p").mkdir()
    Image.fromarray(rgba).save(folder / "p" / "a.png")
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.putpalette([9, 9, 9, 40, 50, 60])
    palette.save(folder / "p" / "b.png", transparency=0)
    _, rows, _ = taken(folder, out)
    first, second = pixels(rows)
    assert (first[0] == 255).all()
    np.testing.assert_array_equal(first[1], rgba[1, :, :3])
    share = rgba[2:, :, 3:] / 255
    np.testing.assert_allclose(first[2:], share * rgba[2:, :, :3] + (1 - share) * 255, atol=1)
    assert second.tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_grey_and_turned_pictures(folder: Path, out: Path) -> None:
    (folder / "p").mkdir()
    grey = noise(2)[..., 0]
    Image.fromarray(grey).save(folder / "p" / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(noise(3)).save(folder / "p" / "b.png", exif=exif)
    _, rows, _ = taken(folder, out)
    np.testing.assert_array_equal(pixels(rows)[0], np.repeat(grey[..., None], 3, axis=2))
    np.testing.assert_array_equal(pixels(rows)[1], np.rot90(noise(3), -1))


def test_resolution_crops_the_centre_and_scales(folder: Path, out: Path) -> None:
    (folder / "p").mkdir()
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = noise(4, 8, 8)
    Image.fromarray(wide).save(folder / "p" / "wide.png")
    Image.fromarray(wide.transpose(1, 0, 2)).save(folder / "p" / "tall.png")
    tall, same = pixels(taken(folder, out / "8", resolution=8)[1])
    np.testing.assert_array_equal(same, noise(4, 8, 8))  # already of that size: not a bit is changed
    np.testing.assert_array_equal(tall, noise(4, 8, 8).transpose(1, 0, 2))
    small = pixels(taken(folder, out / "4", resolution=4)[1])[1]
    scaled = Image.fromarray(noise(4, 8, 8)).resize((4, 4), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(small, np.asarray(scaled))


class Stop(Exception):
    pass


def test_a_restart_keeps_finished_shards(folder: Path, out: Path) -> None:
    for number in range(70):
        save(folder / "some_prompt" / f"{number:02}.png", number)
    config = ImportSamplesConfig(path=str(folder))
    told: list[tuple[int, int, str]] = []

    def stop(done: int, total: int, unit: str) -> None:
        told.append((done, total, unit))
        if done == 50:
            raise Stop

    with pytest.raises(Stop):
        run(config, ImportSamplesInputs(), context(out, progress=stop))
    assert told[-1] == (50, 70, "pictures")
    shard = out / "samples" / "shard-00000.arrow"
    assert [p.name for p in shard.parent.glob("*.arrow")] == [shard.name]
    before, damaged = shard.stat().st_mtime_ns, folder / "some_prompt" / "00.png"
    damaged.write_bytes(b"")  # not read again
    outputs, rows, _ = taken(folder, out)
    assert shard.stat().st_mtime_ns == before
    assert [shard.rows for shard in outputs.samples.shards] == [32, 32, 6]
    save(damaged, 0)
    assert taken(folder, out.with_name("whole"))[0] == outputs
    assert [row["index"] for row in rows] == list(range(70))
    np.testing.assert_array_equal(pixels(rows)[69], noise(69))


def test_identity_is_the_content_that_is_read(folder: Path) -> None:
    save(folder / "p" / "a.png", 1)
    before = digest_of(folder)
    (folder / ".thumbnails").mkdir()
    save(folder / ".thumbnails" / "a.png", 2)
    assert digest_of(folder) == before
    save(folder / "p" / "a.png", 3)
    assert digest_of(folder) != before


def test_ragged_groups_of_rendered_pictures_are_scored_and_compared(folder: Path, out: Path) -> None:
    """Right pictures get 1, wrong ones 0; a group of one has advantage 0."""
    shown = {
        "two_red_circles": ["two red circles"] * 3 + ["one blue square"],
        "one_blue_square": ["one blue square", "three red circles"],
        "one_red_circle": ["one red circle"],
    }
    generator = np.random.default_rng(0)
    for name, scenes in shown.items():
        (folder / name).mkdir()
        for number, scene in enumerate(scenes):
            Image.fromarray(render(parse(scene), generator)).save(folder / name / f"{number}.png")
    outputs, rows, _ = taken(folder, out)
    config = ScoreConfig.model_validate({"rewards": {"strict": {"kind": "shapes", "score": "strict"}}})
    inputs = ScoreInputs(samples=outputs.samples.under(out))
    scored = score.run(config, inputs, context(out / "score")).rewards.under(out / "score")
    right = [float(scene.replace(" ", "_") == name) for name in sorted(shown) for scene in shown[name]]
    assert tables.read(scored).column("strict").to_pylist() == right
    judged = advantage.run(AdvantageConfig(), AdvantageInputs(rewards=scored), context(out / "advantage"))
    values = tables.read(judged.advantages.under(out / "advantage")).column("advantage").to_pylist()
    for name in shown:
        group = [v for v, row in zip(values, rows, strict=True) if row["prompt"] == name.replace("_", " ")]
        given = np.array([float(scene == name.replace("_", " ")) for scene in shown[name]])
        np.testing.assert_allclose(group, (given - given.mean()) / (given.std() + 1e-4), atol=1e-9)


def test_it_loads_no_torch() -> None:
    code = "import sys, stages.import_samples; assert not {'torch', 'datasets', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
