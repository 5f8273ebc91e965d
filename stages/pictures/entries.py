"""A picture that was found with its prompt, before it is read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schemas.errors import InputError, closest
from schemas.imports import ImportSamplesConfig
from stages.prompts import metadata_json


class Entry(NamedTuple):
    """A picture that is there and not read yet. `file` is its name within the folder; `place` is for messages."""

    file: str | None
    place: str
    prompt: str
    metadata: str


class Found(NamedTuple):
    """All pictures in a stable order, how to read one by its number, and how many files were of no use."""

    entries: list[Entry]
    content: Callable[[int], bytes]
    unused: int


def entry(row: Mapping[str, Any], config: ImportSamplesConfig, file: str | None, place: str, source: str) -> Entry:
    """A picture whose prompt stands in a row, at `source`; the columns that are left are its metadata."""
    column = config.prompt_column
    if column not in row:
        raise InputError(f"{source}: no column {column!r}; set `prompt_column`. {closest(column, row)}")
    if not isinstance(row[column], str):
        raise InputError(f"{source}: `prompt_column` {column!r} wants text, got {row[column]!r}")
    other = {name: value for name, value in row.items() if name != column}
    return Entry(file, place, filled(row[column], source), metadata_json(other))


def filled(prompt: str, source: str) -> str:
    """The prompt without blanks around it; InputError when nothing is left."""
    if not prompt.strip():
        raise InputError(f"{source}: the prompt is empty; write one, or leave the picture out")
    return prompt.strip()
