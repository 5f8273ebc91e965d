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
from stages.store import hub, texts
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
        metadata = metadata_json(other)
        key = json.dumps([text, metadata, seen[text, metadata]])
        seen[text, metadata] += 1
        prompts.append(Prompt(hashlib.sha256(key.encode()).hexdigest()[:16], text, metadata))
    return prompts


def metadata_json(other: Mapping[str, Any]) -> str:
    """The other columns of a row as canonical JSON."""
    return json.dumps(other, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def read(config: PromptsConfig) -> Source:
    """Texts and other columns; blank prompts are left out and counted. InputError names `path` or `column`."""
    path = Path(config.path)
    if path.is_file():
        rows = _jsonl(config) if path.suffix in (".jsonl", ".json") else _plain(path)
    elif path.is_dir() or is_hub_id(config.path):
        rows = _dataset(config)
    else:
        raise InputError(f"`path` {config.path!r} is no file, folder or hub id; write the prompts there, one a line")
    kept = [(text.strip(), other) for text, other in rows if text.strip()]
    return Source(kept, len(rows) - len(kept))


def _plain(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(line, {}) for line in texts.lines(path, f"`path` {str(path)!r}")]


def _jsonl(config: PromptsConfig) -> list[tuple[str, dict[str, Any]]]:
    found = texts.objects(Path(config.path), f"`path` {config.path!r}")
    return [("", {}) if row is None else _split(row, config.column, place) for place, row in found]


def _dataset(config: PromptsConfig) -> list[tuple[str, dict[str, Any]]]:
    return [
        _split(dict(row), config.column, f"`path` {config.path!r}") for row in hub.opened(config.path, config.split)
    ]


def _split(row: Mapping[str, Any], column: str, place: str) -> tuple[str, dict[str, Any]]:
    if column not in row:
        raise InputError(f"{place}: no column {column!r}; set `column`. {closest(column, row)}")
    if not isinstance(row[column], str):
        raise InputError(f"{place}: `column` {column!r} wants text, got {row[column]!r}")
    return row[column], {name: value for name, value in row.items() if name != column}
