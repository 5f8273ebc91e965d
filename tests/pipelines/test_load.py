import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.load import load, read
from schemas.errors import FlowFileError

Write = Callable[..., Path]


def place(path: Path, text: str) -> str:
    """Line and column, from 1, where a text first stands in a file."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if text in line:
            return f"{path}:{number}:{line.index(text) + 1}: "
    raise AssertionError(f"{text!r} is not in {path}")


def refused(path: Path, sets: tuple[str, ...] = ()) -> str:
    with pytest.raises(FlowFileError) as error:
        load(path, "small", sets)
    return str(error.value)


def test_numbers_and_words_are_yaml_1_2(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("a: 1e-4\nb: on\nc: yes\nd: 012\ne: 2.5\nf: null\ng: [1, -1e3]\nh: true\n")
    tree = read(file).tree
    assert tree == {"a": 1e-4, "b": "on", "c": "yes", "d": 12, "e": 2.5, "f": None, "g": [1, -1000.0], "h": True}
    assert [type(tree[key]) for key in "abde"] == [float, str, int, float]


def test_anchors_and_merges(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("base: &b {x: 1, y: 2}\nmore: {<<: *b, y: 3}\nsame: *b\n")
    assert read(file).tree == {"base": {"x": 1, "y": 2}, "more": {"x": 1, "y": 3}, "same": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flows: {}\nflows: {}\n", r":2:1: not valid YAML: .*duplicate key"),
        ("flows: [1\n", r"f.yaml:\d+:\d+: not valid YAML"),
        ("flows:\n  a: 2024-01-01\n", r":2:6: a date is no value"),
        ("flows:\n  a: !!python/name:os.system x\n", r":2:6: a tagged value is no value"),
        ("1: x\n", r":1:1: the key 1 is not a text"),
        ("a: " + "[" * 60 + "]" * 60 + "\n", "nested more than"),
        ("", "wants a mapping with the key `flows`"),
        ("- a\n", "wants a mapping with the key `flows`"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: \x07\n", "not valid YAML"),
    ],
)
def test_what_is_no_flow_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(FlowFileError) as error:
        read(file)
    assert str(error.value).startswith(str(file))
    assert re.search(words, str(error.value)), str(error.value)


def test_other_encoding_and_missing_file(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes("a: ü".encode("latin-1"))
    with pytest.raises(FlowFileError, match="not UTF-8"):
        read(file)
    with pytest.raises(FlowFileError, match="--file"):
        read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("old", "new", "at", "words"),
    [
        (
            "times: 4",
            "tmes: 4",
            "tmes",
            "loop.tmes: unknown field 'tmes'. Known: body, carry, stop, times. Did you mean 'times'?",
        ),
        ("times: 4", "times: four", "four", "loop.times: wanted a valid integer, got 'four'"),
        ("times: 4", "times: '4'", "'4'", "wanted a valid integer, got '4'"),
        ("times: 4", "times: true", "true", "wanted a valid integer, got True"),
        ("times: 4", "times: 0", "0", "wanted greater than or equal to 1, got 0"),
        ("seed: 3", "Seed: 3", "Seed", "flows.small.Seed: unknown field"),
        ("kind: sd3, path", "kind: sdxl, path", "sdxl", "model.kind: unknown value 'sdxl'. Known: sd3."),
        ("falls: 0.1", "falls: 0.1, action: stop", "stop}", "unknown value 'stop'. Known: fail, finish."),
        ("falls: 0.1", "fals: 0.1", "fals", "Did you mean 'falls'?"),
        ("micro_batch: {sample: 3}", "micro_batch: {sample: 3.5}", "3.5", "micro_batch.sample: wanted a valid integer"),
        ("      encode: {", "      Encode: {", "Encode", "a name has lower-case letters"),
    ],
)
def test_outline_mistakes_have_their_place(flow_file: Write, old: str, new: str, at: str, words: str) -> None:
    file = flow_file((old, new))
    message = refused(file)
    assert place(file, at) in message
    assert words in message


def test_a_missing_field_is_told_with_its_meaning(flow_file: Write) -> None:
    file = flow_file(("{start: model, next: update.policy}", "{start: model}"))
    message = refused(file)
    assert place(file, "policy: {start") in message
    assert "policy.next: is missing: The edge of the body" in message


def test_all_mistakes_are_told_at_once(flow_file: Write) -> None:
    file = flow_file(("times: 4", "times: 0"), ("seed: 3", "sed: 3"))
    assert len(refused(file).splitlines()) == 2


def test_set_overrides_by_full_and_short_path(flow_file: Write) -> None:
    file = flow_file()
    sets = ("times=7", "sample.per_prompt=16", "loop.body.sample.sampler.eta=1e-1", "model.lora={rank: 2}", "seed=9")
    flow = load(file, "small", sets).spec.flows["small"]
    assert flow.loop is not None
    assert flow.model is not None
    assert flow.model.lora is not None
    assert (flow.loop.times, flow.seed, flow.model.lora.rank) == (7, 9, 2)
    assert flow.loop.body["sample"]["per_prompt"] == 16
    assert flow.loop.body["sample"]["sampler"] == {"kind": "flow_sde", "steps": 6, "eta": 0.1}
    assert load(file).spec.flows["small"].seed == 3


def test_set_later_wins_and_reaches_resources(flow_file: Write) -> None:
    flow = load(flow_file(), "small", ("seed=5", "seed=6", "resources.processes=2")).spec.flows["small"]
    assert (flow.seed, flow.resources.processes) == (6, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tims=3", "Did you mean 'times'?"),
        ("sampel.per_prompt=3", "Did you mean 'sample'?"),
        ("loop.body.sampel.per_prompt=3", "no node 'sampel' in loop.body. Known: advantage, eval"),
        ("sample.per_prompt.x=3", "loop.body.sample.per_prompt is 4 and has no fields"),
        ("times=abc", "flows.small.loop.times: wanted a valid integer, got 'abc'"),
        ("times='3'", "wanted a valid integer, got '3'"),
        ("times=", "wanted a valid integer, got None"),
        ("times", "wants PATH=VALUE"),
        ("=3", "wants PATH=VALUE"),
        ("seed={a: 1, a: 2}", "duplicate key"),
        ("external.mine.target=os:system", "'external' names code"),
        ("python_path=[.]", "'python_path' names code"),
        ("score.rewards.size.target=os:system", "'target' names code"),
    ],
)
def test_set_refused(flow_file: Write, text: str, words: str) -> None:
    message = refused(flow_file(), (text,))
    assert message.startswith(f"--set {text}")
    assert words in message


def test_set_for_an_unknown_flow(flow_file: Write) -> None:
    with pytest.raises(FlowFileError, match=r"no flow 'smal'.*Did you mean 'small'"):
        load(flow_file(), "smal", ("times=3",))
