"""Prompts from files and datasets, their identity, and the choice of an iteration."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from schemas.contracts import PromptsConfig, PromptsInputs, PromptsOutputs
from schemas.engine import Resources
from schemas.errors import InputError
from stages.context import StageContext
from stages.prompts import choose, identified, read, run
from stages.store import tables


def context(directory: Path, iteration: int | None = None, seed: int = 0) -> StageContext:
    return StageContext(directory, "prompts", seed, iteration, Resources(), 8)


def done(tmp_path: Path, config: PromptsConfig, iteration: int | None = None) -> tuple[PromptsOutputs, list[dict]]:
    outputs = run(config, PromptsInputs(), context(tmp_path, iteration))
    return outputs, tables.read(outputs.chosen.under(tmp_path)).to_pylist()


def test_text_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufefftwo red circles\r\n\r\n one café \u2028 here\r\ntwo red circles\r\n  \r\n".encode())
    outputs, rows = done(tmp_path, PromptsConfig(path=str(file)))
    assert [row["prompt"] for row in rows] == ["two red circles", "one café \u2028 here", "two red circles"]
    assert [row["metadata"] for row in rows] == ["{}"] * 3
    assert outputs.metrics == {"prompts": 3, "chosen": 3, "blank": 2}
    assert len({row["prompt_id"] for row in rows}) == 3
    assert outputs.chosen.path == "chosen"


def test_ids_do_not_depend_on_place_or_neighbours() -> None:
    some = identified([("a", {}), ("b", {}), ("a", {}), ("a", {"n": 1})])
    more = identified([("c", {}), ("a", {"n": 1}), ("a", {}), ("b", {}), ("a", {})])
    assert {p.prompt_id for p in some} < {p.prompt_id for p in more}
    assert len({p.prompt_id for p in more}) == 5
    assert all(len(p.prompt_id) == 16 for p in more)


def test_jsonl_keeps_other_columns_as_metadata(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a", "b": 2, "a": [1]}\n\n{"text": "c"}\n')
    outputs, rows = done(tmp_path, PromptsConfig(path=str(file), column="text"))
    assert [(row["prompt"], row["metadata"]) for row in rows] == [("a", '{"a":[1],"b":2}'), ("c", "{}")]
    assert outputs.metrics["blank"] == 1


def test_saved_datasets(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["x", "", "y"], "count": [1, 2, 3]})
    data.save_to_disk(tmp_path / "one")
    DatasetDict({"test": data}).save_to_disk(tmp_path / "many")
    for config in (
        PromptsConfig(path=str(tmp_path / "one")),
        PromptsConfig(path=str(tmp_path / "many"), split="test"),
    ):
        source = read(config)
        assert source.rows == [("x", {"count": 1}), ("y", {"count": 3})]
        assert source.blank == 1
    with pytest.raises(InputError, match=r"'tst'.*Did you mean 'test'"):
        read(PromptsConfig(path=str(tmp_path / "many"), split="tst"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.txt", None, r"path.*none\.txt.*one a line"),
        ("empty.txt", b"", r"path.*empty\.txt.*no prompts"),
        ("blank.txt", b"\n \n", r"path.*blank\.txt.*no prompts"),
        ("latin.txt", "café".encode("latin-1"), r"latin\.txt.*byte 3.*UTF-8"),
        ("a.jsonl", b'{"promt": "x"}', r"line 1.*no column 'prompt'.*`column`.*Did you mean 'promt'"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"', r"line 2: no JSON"),
        ("a.jsonl", b"[1]", r"line 1: wants an object"),
        ("a.jsonl", b'{"prompt": 3}', r"`column` 'prompt' wants text, got 3"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        run(PromptsConfig(path=str(file)), PromptsInputs(), context(tmp_path))


def test_choosing_more_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    with pytest.raises(InputError, match=r"`choose` is 3.*2 prompts"):
        done(tmp_path, PromptsConfig(path=str(tmp_path / "p.txt"), choose=3), 0)


@pytest.mark.parametrize(("num", "size"), [(24, 12), (10, 4), (7, 7), (5, 3), (1, 1)])
def test_choice_uses_all_prompts_evenly(num: int, size: int) -> None:
    count: Counter[int] = Counter()
    for iteration in range(50):
        picks = choose(num, size, 3, iteration)
        assert len(set(picks)) == size
        count.update(picks)
        used = [count[i] for i in range(num)]
        assert max(used) - min(used) <= 1
    assert choose(num, size, 3, 49) == choose(num, size, 3, 49)


def test_choice_depends_on_seed_and_iteration(tmp_path: Path) -> None:
    assert choose(100, 10, 0, 0) != choose(100, 10, 1, 0)
    assert not set(choose(100, 10, 0, 0)) & set(choose(100, 10, 0, 1))
    (tmp_path / "p.txt").write_text("\n".join(f"prompt {i}" for i in range(20)))
    config = PromptsConfig(path=str(tmp_path / "p.txt"), choose=5)
    outputs, rows = done(tmp_path, config, 2)
    again, same = done(tmp_path, config, 2)
    assert outputs == again
    assert rows == same
    assert outputs.metrics == {"prompts": 20, "chosen": 5, "blank": 0}
    assert json.loads(rows[0]["metadata"]) == {}


def test_light_stages_load_no_torch() -> None:
    code = (
        "import sys; import stages.prompts, stages.score, stages.render, stages.summarise, stages.rewards.shapes, "
        "stages.rewards.jpeg_size; assert not {'torch', 'datasets', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
