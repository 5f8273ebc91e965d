"""samples and report on a real run of pictures that were scored and judged."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipelines.cli import main
from pipelines.prune import PRUNED
from pipelines.saved import saved
from pipelines.views.charts import lines, moving_mean, stacked
from pipelines.views.gallery import Gallery, Group, Picture, evenly, gallery, spread
from pipelines.views.samples import ends, thumbnail
from schemas.errors import InputError
from tests.pipelines.bench import Say, saying

FLOWS = """\
flows:
  own:
    description: "Pictures <b>of one's own</b> & more"
    seed: 1
    stages:
      pictures: {stage: import_samples, path: pictures}
      again: {stage: import_samples, path: pictures}
      score: {samples: pictures.samples, rewards: {small: {kind: jpeg_size}, wide: {kind: jpeg_size, prefer: large}}}
      advantage: {rewards: score.rewards}
"""
PROMPTS = {"<script>alert(1)</script> $x_1$": 7, "两只红色的猫": 3, 'a "quoted" word': 1}


def noise(generator: np.random.Generator, spread: int) -> Image.Image:
    """The more it spreads, the larger is its JPEG."""
    return Image.fromarray(generator.integers(128 - spread, 128 + spread, (80, 96, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `own`; of each prompt the first picture is the smallest file."""
    folder = tmp_path_factory.mktemp("views")
    generator, entries = np.random.default_rng(0), []
    (folder / "pictures").mkdir()
    for prompt, number in PROMPTS.items():
        for index in range(number):
            noise(generator, 8 + 16 * index).save(folder / "pictures" / f"{len(entries):02}.png")
            entries.append(json.dumps({"file_name": f"{len(entries):02}.png", "prompt": prompt}))
    (folder / "pictures" / "metadata.jsonl").write_text("\n".join(entries), encoding="utf-8")
    text = FLOWS.replace("path: pictures", f"path: {folder / 'pictures'}")
    (folder / "flows.yaml").write_text(text.replace("wide: {", "wide: {weight: 0, "))
    words = ("run", "own", "--plain", "--file", str(folder / "flows.yaml"), "--runs", str(folder / "runs"))
    assert main(words) == 0
    return folder / "runs"


@pytest.fixture
def say(own: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    return saying(own, capsys)


def column(own: Path, place: str, name: str) -> dict[str, float]:
    """Read without the code under test."""
    files = sorted((own / "own" / "before" / place).glob("shard-*.arrow"))
    table = pa.concat_tables([pa.ipc.open_stream(file.read_bytes()).read_all() for file in files])
    return dict(zip(table.column("sample_id").to_pylist(), table.column(name).to_pylist(), strict=True))


def test_groups_are_sorted_by_reward_and_say_what_they_earned(own: Path, say: Say) -> None:
    shown = json.loads(say("samples", "own", "before", "--json"))
    assert shown["samples"] == "own/before/pictures"  # not `again`, which nobody judged
    small, wide = (column(own, "score/rewards", name) for name in ("small", "wide"))
    advantages = column(own, "advantage/advantages", "advantage")
    assert {group["prompt"]: len(group["pictures"]) for group in shown["groups"]} == PROMPTS
    means = [group["mean"] for group in shown["groups"]]
    assert means == sorted(means, reverse=True)
    for group in shown["groups"]:
        ids = [picture["sample_id"] for picture in group["pictures"]]
        assert ids == sorted(ids, key=lambda key: -small[key])
        assert group["mean"] == pytest.approx(np.mean([small[key] for key in ids]))
        for picture in group["pictures"]:
            key = picture["sample_id"]
            assert (picture["rewards"], picture["score"]) == ({"small": small[key], "wide": wide[key]}, small[key])
            assert picture["advantage"] == advantages[key]
    with Image.open(shown["grid"]) as grid:
        grid.load()
        assert (grid.format, grid.size[0] > 1000) == ("PNG", True)


def test_the_grid_has_a_row_a_prompt(own: Path, say: Say, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "grid.png"
    heights = {}
    for rows in (1, 3):
        said = say("samples", "own", "before", "--prompts", str(rows), "--each", "2", "--out", str(path)).splitlines()
        assert said[-1] == str(path)
        with Image.open(path) as grid:
            heights[rows] = grid.size[1]
    assert heights[3] - heights[1] == pytest.approx(2 * 1.39 * 180, abs=2)
    said = say("samples", "own", "before", "--prompts", "1", "--out", str(path)).splitlines()
    assert said[-2] == "(2 prompts between are not shown; --prompts 0 shows all)"


def picture(score: float | None, index: int) -> Picture:
    return Picture(index, f"p/{index}", "p", "words", index, 0, {}, score, None)


def test_best_and_worst_share_no_picture() -> None:
    group = Group("p", "words", [picture(score, i) for i, score in enumerate([5.0, 4, 3, 2, 1, None])])
    best, worst = ends(group, 2)
    assert ([p.score for p in best], [p.score for p in worst]) == (
        [5, 4],
        [2, 1],
    )  # the one without a score is no worst
    best, worst = ends(group, 3)
    assert ([p.score for p in best], [p.score for p in worst]) == ([5, 4, 3], [2, 1, None])
    assert (group.mean, group.scores) == (3, [5, 4, 3, 2, 1])
    groups = [Group(str(i), "", []) for i in range(10)]
    assert [group.prompt_id for group in evenly(groups, 4)] == ["0", "3", "6", "9"]
    assert [group.prompt_id for group in evenly(groups, 1)] == ["0"]
    assert evenly(groups, 0) == groups


def test_spread_is_the_mean_over_groups(own: Path) -> None:
    run = saved(own, "own")
    address = next(address for address in run.records if address.node == "score")
    groups: dict[str, list[float]] = {}
    for key, value in column(own, "score/rewards", "small").items():
        groups.setdefault(key.partition("/")[0], []).append(value)
    found = spread(run, address)
    assert found is not None
    assert found.reach == pytest.approx(np.mean([max(values) - min(values) for values in groups.values()]))
    assert found.std == pytest.approx(np.mean([np.std(values) for values in groups.values()]))


class Page(HTMLParser):
    """Every element is closed, and what it names lies in the page itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [str(given["id"])] if "id" in given else []
        self.links += [str(given[key]) for key in ("href", "src", "xlink:href") if key in given]
        assert tag not in ("script", "link", "iframe")
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_needs_nothing_beside_it(own: Path, say: Say) -> None:
    out = say("report", "own")
    path = own / "own" / "views" / "report.html"
    assert re.fullmatch(rf"{re.escape(str(path))} \(\d+\.\d [kM]B\)\n", out)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("data:image/") or link[1:] in page.ids for link in page.links)
    assert not re.search(r"(?:href|src)=\"(?!#|data:)|url\((?!#)|@import", text)
    words = " ".join(page.words)
    assert all(prompt in words for prompt in PROMPTS)  # escaped, and so text again
    assert "Pictures <b>of one's own</b> & more" in words
    assert "pictures, again: the same noise" in words
    assert "Made on" in words
    assert [title for title in ("Time", "Settings", "Lineage") if title.lower() not in page.ids] == []


def test_ids_of_charts_do_not_meet() -> None:
    points = {i: float(i % 7) for i in range(100)}
    made = [lines("one", {"a": points}), lines("two", {"a": points}), stacked("three", {"a": points, "b": {3: 1.0}})]
    ids = [Page(svg).ids for svg in made]
    assert all(ids)
    assert not set(ids[0]) & set(ids[1])
    assert all("currentColor" in svg and "#010203" not in svg for svg in made)
    assert lines("one", {"a": points}) == made[0]
    assert moving_mean([1, 2, 6, 7], 1) == [1.5, 3, 5, 6.5]


def test_pictures_that_are_gone_are_told(own: Path, say: Say, tmp_path: Path) -> None:
    text = say("samples", "own", "before", "--stage", "picture", code=2)
    known = "Known: again, pictures. Did you mean 'pictures'?"
    assert text == f"rewardflow: --stage: own/before has no pictures of 'picture'. {known}\n"
    assert say("samples", "own", "3", code=2) == "rewardflow: own/0003 has no pictures; there are some in before\n"
    place = own / "own" / "before" / "again"
    (place / "samples").rename(tmp_path / "samples")
    (place / PRUNED).write_text(json.dumps({"samples": 3}))
    text = say("samples", "own", "before", "--stage", "again", code=2)
    assert text.startswith("rewardflow: the pictures of own/before/again were pruned (keep); rewards and metrics are")
    assert "report.html" in say("report", "own")
    (tmp_path / "samples").rename(place / "samples")
    (place / PRUNED).unlink()
    shard = place / "samples" / "shard-00000.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 3])
    assert str(shard) in say("samples", "own", "before", "--stage", "again", code=2)
    say("report", "own")
    assert f"{shard} cannot be read" in " ".join(Page((own / "own" / "views" / "report.html").read_text()).words)
    shard.write_bytes(whole)


def test_a_damaged_picture_is_named(own: Path) -> None:
    found = gallery(saved(own, "own"), "before", "pictures")
    first = found.pictures[0]
    assert Image.open(io.BytesIO(found.png(first))).size == (96, 80)
    assert thumbnail(found, first, 48).size == (48, 40)
    broken = Broken(found.run, found.address, found.place, found.ref)
    with pytest.raises(InputError, match=rf"own/before/pictures: the picture of sample '{first.sample_id}' does not"):
        thumbnail(broken, first)


class Broken(Gallery):
    def png(self, picture: Picture) -> bytes:
        return super().png(picture)[:200]
