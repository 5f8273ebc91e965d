"""Stage `prompts`: reads prompts and, when asked, chooses some for this iteration. Loads no torch."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from schemas.artifacts import PromptsTable
from schemas.assets import is_hub_id
from schemas.contracts import PromptsConfig, PromptsInputs, PromptsOutputs
from schemas.errors import InputError, closest
from schemas.seeds import seed_of
from schemas.tables import prompts_schema
from stages.context import StageContext
from stages.store.tables import TableWriter


class Prompt(NamedTuple):
    """One prompt; `metadata` is canonical JSON of the other columns."""

    prompt_id: str
    text: str
    metadata: str


class Source(NamedTuple):
    """What was read: texts with their other columns, and the number of blank ones that were skipped."""

    rows: list[tuple[str, dict[str, Any]]]
    blank: int


def run(config: PromptsConfig, inputs: PromptsInputs, ctx: StageContext) -> PromptsOutputs:
    """Writes the table of prompts."""
    source = read(config)
    if not source.rows:
        raise InputError(f"`path` {config.path!r} holds no prompts; write one a line, or name another file")
    prompts = identified(source.rows)
    if config.choose is not None and config.choose > len(prompts):
        raise InputError(
            f"`choose` is {config.choose}, but `path` {config.path!r} holds {len(prompts)} prompts; lower `choose`"
        )
    if config.choose is None:
        chosen = prompts
    else:
        chosen = [prompts[i] for i in choose(len(prompts), config.choose, ctx.seed, ctx.iteration or 0)]
    writer = TableWriter(ctx.directory, "chosen", prompts_schema())
    ids, texts, metadata = zip(*chosen, strict=True)
    writer.write(0, {"prompt_id": list(ids), "prompt": list(texts), "metadata": list(metadata)})
    metrics = {"prompts": float(len(prompts)), "chosen": float(len(chosen)), "blank": float(source.blank)}
    return PromptsOutputs(chosen=writer.ref(PromptsTable, 1), metrics=metrics)


def choose(num: int, size: int, seed: int, iteration: int) -> list[int]:
    """Indices of `size` of `num` prompts for one iteration, without repetition.

    Iterations deal from one shuffled deck after another, so that all prompts are used evenly. Where a deck
    ends within an iteration, prompts that the iteration already has stay in the next deck.
    """
    deck: list[int] = []
    picks: list[int] = []
    decks = 0
    for _ in range(iteration + 1):
        picks, deck = deck[:size], deck[size:]
        if len(picks) < size:
            fresh = list(range(num))
            Random(seed_of(seed, "prompts", decks)).shuffle(fresh)
            decks += 1
            taken = set(picks)
            added = [i for i in fresh if i not in taken][: size - len(picks)]
            picks, taken = picks + added, set(added)
            deck = [i for i in fresh if i not in taken]
    return picks


def identified(rows: Iterable[tuple[str, dict[str, Any]]]) -> list[Prompt]:
    """Prompts with ids that hash text, metadata and, among equal ones, the occurrence: never the place in the file."""
    seen: Counter[tuple[str, str]] = Counter()
    prompts = []
    for text, other in rows:
        metadata = json.dumps(other, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
        key = json.dumps([text, metadata, seen[text, metadata]])
        seen[text, metadata] += 1
        prompts.append(Prompt(hashlib.sha256(key.encode()).hexdigest()[:16], text, metadata))
    return prompts


def read(config: PromptsConfig) -> Source:
    """Texts and other columns; blank prompts are left out and counted. InputError names `path` or `column`."""
    path = Path(config.path)
    if path.is_file():
        rows = _jsonl(config) if path.suffix in (".jsonl", ".json") else [(line, {}) for line in _lines(path)]
    elif path.is_dir() or is_hub_id(config.path):
        rows = _dataset(config)
    else:
        raise InputError(f"`path` {config.path!r} is no file, folder or hub id; write the prompts there, one a line")
    kept = [(text.strip(), other) for text, other in rows if text.strip()]
    return Source(kept, len(rows) - len(kept))


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"`path` {str(path)!r} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    # Not splitlines: a prompt may hold a form feed or a line separator.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _jsonl(config: PromptsConfig) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(_lines(Path(config.path)), start=1):
        if not line.strip():
            rows.append(("", {}))
            continue
        place = f"`path` {config.path!r}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place}: no JSON ({error}); write one object a line") from error
        if not isinstance(row, dict):
            raise InputError(f"{place}: wants an object, got {line.strip()[:40]!r}")
        rows.append(_split(row, config.column, place))
    return rows


def _dataset(config: PromptsConfig) -> list[tuple[str, dict[str, Any]]]:
    from datasets import DatasetDict, load_dataset, load_from_disk  # 2.5 s to import

    try:
        if (Path(config.path) / "dataset_info.json").is_file() or (Path(config.path) / "dataset_dict.json").is_file():
            found = load_from_disk(config.path)
        else:
            found = load_dataset(config.path, split=config.split)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read `path` {config.path!r}, split {config.split!r}: {error}") from error
    if isinstance(found, DatasetDict):
        if config.split not in found:
            raise InputError(
                f"no `split` {config.split!r} in `path` {config.path!r}. {closest(config.split, map(str, found))}"
            )
        found = found[config.split]
    return [_split(dict(row), config.column, f"`path` {config.path!r}") for row in found]


def _split(row: Mapping[str, Any], column: str, place: str) -> tuple[str, dict[str, Any]]:
    if column not in row:
        raise InputError(f"{place}: no column {column!r}; set `column`. {closest(column, row)}")
    if not isinstance(row[column], str):
        raise InputError(f"{place}: `column` {column!r} wants text, got {row[column]!r}")
    return row[column], {name: value for name, value in row.items() if name != column}
