"""Text files of the user's: UTF-8 with or without a byte order mark, and whatever ends their lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.errors import InputError


def text(path: Path, name: str) -> str:
    """The whole file with line ends as newlines; InputError calls it `name`."""
    try:
        found = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    return found.replace("\r\n", "\n").replace("\r", "\n")


def lines(path: Path, name: str) -> list[str]:
    """The file's lines, without their ends."""
    # Not splitlines: a prompt may hold a form feed or a line separator.
    found = text(path, name).split("\n")
    return found[:-1] if found[-1] == "" else found


def objects(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The objects of a JSONL file, each with its place for messages; none for a blank line."""
    for number, line in enumerate(lines(path, name), start=1):
        place = f"{name}, line {number}"
        if not line.strip():
            yield place, None
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place}: no JSON ({error}); write one object a line") from error
        if not isinstance(row, dict):
            raise InputError(f"{place}: wants an object, got {line.strip()[:40]!r}")
        yield place, row
