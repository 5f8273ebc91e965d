"""Pictures in a folder. Only files that the folder's digest covers count: none that is hidden or lies elsewhere.

Their prompts stand in metadata.jsonl or metadata.csv, or in a .txt file beside each, or are the sub-folders' names.
"""

import csv
import io
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from schemas.errors import InputError, closest
from schemas.imports import ImportSamplesConfig
from stages.pictures.entries import Entry, Found, entry, filled
from stages.store import texts

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"))
_METADATA = ("metadata.jsonl", "metadata.csv")
_FILE_NAME = "file_name"


def in_folder(config: ImportSamplesConfig) -> Found:
    """The pictures, in the order of the metadata file, else of their names."""
    folder = Path(config.path)
    names = _files(folder)
    files = set(names)
    pictures = [name for name in names if Path(name).suffix.lower() in SUFFIXES]
    if not pictures:
        kinds = ", ".join(sorted(SUFFIXES))
        raise InputError(f"`path` {config.path!r} holds no pictures ({kinds}); put them there, or name another folder")
    metadata = _metadata_file(folder, names)
    captions = {name: _caption(name) for name in pictures if _caption(name) in files}
    if metadata is not None:
        entries = _listed(config, metadata, files)
        used = {metadata, *(one.file for one in entries)}
    elif captions:
        entries = [_captioned(folder, name, captions) for name in pictures]
        used = {*pictures, *captions.values()}
    else:
        entries = [_named(folder, name) for name in pictures]
        used = set(pictures)
    return Found(entries, lambda number: (folder / str(entries[number].file)).read_bytes(), len(files - used))


def _files(folder: Path) -> list[str]:
    """Names within the folder, as its digest sees them."""
    names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    return [name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def _metadata_file(folder: Path, files: list[str]) -> str | None:
    """The metadata file at the top of the folder, if there is one."""
    named = [name for name in files if Path(name).name in _METADATA]
    below = [name for name in named if "/" in name]
    if below:
        raise InputError(f"{str(folder / below[0])!r} lies in a sub-folder; name that sub-folder as `path`")
    if len(named) > 1:
        raise InputError(f"`path` {str(folder)!r} holds both {' and '.join(_METADATA)}; take one of them away")
    return named[0] if named else None


def _listed(config: ImportSamplesConfig, metadata: str, files: set[str]) -> list[Entry]:
    """One entry a row of the metadata file."""
    folder = Path(config.path)
    shown = repr(str(folder / metadata))
    rows = _json_rows if metadata.endswith(".jsonl") else _csv_rows
    entries = []
    for place, row in rows(folder / metadata, shown):
        if _FILE_NAME not in row:
            raise InputError(f"{place}: no column {_FILE_NAME!r}, the picture's name. {closest(_FILE_NAME, row)}")
        name = posixpath.normpath(str(row[_FILE_NAME]))
        if name not in files:
            where = "pictures lie in this folder or its sub-folders, not above it and not hidden or behind a link"
            raise InputError(f"{place}: no picture {row[_FILE_NAME]!r}; mend `file_name` ({where})")
        rest = {column: value for column, value in row.items() if column != _FILE_NAME}
        entries.append(entry(rest, config, name, repr(str(folder / name)), place))
    if not entries:
        raise InputError(f"{shown} lists no pictures; write one row a picture, or take the file away")
    return entries


def _json_rows(path: Path, shown: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((place, row) for place, row in texts.objects(path, shown) if row is not None)


def _csv_rows(path: Path, shown: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(texts.text(path, shown), newline=""), strict=True)
    try:
        for row in reader:
            place = f"{shown}, line {reader.line_num}"
            if None in row or None in row.values():
                num = len(reader.fieldnames or ())
                raise InputError(f"{place}: wants {num} fields, as the first line has; put quotes round a comma")
            yield place, row
    except csv.Error as error:
        raise InputError(f"{shown}, line {reader.reader.line_num}: no CSV ({error}); mend the line") from error


def _caption(name: str) -> str:
    return Path(name).with_suffix(".txt").as_posix()


def _captioned(folder: Path, name: str, captions: Mapping[str, str]) -> Entry:
    """A picture whose prompt is the whole text of the file beside it."""
    if name not in captions:
        raise InputError(
            f"picture {str(folder / name)!r} has no prompt, others have one beside them; "
            f"write it into {str(folder / _caption(name))!r}"
        )
    shown = repr(str(folder / captions[name]))
    prompt = filled(texts.text(folder / captions[name], shown), shown)
    return Entry(name, repr(str(folder / name)), prompt, "{}")


def _named(folder: Path, name: str) -> Entry:
    """A picture whose sub-folder is named like its prompt."""
    *above, _ = name.split("/")
    if not above:
        raise InputError(
            f"picture {str(folder / name)!r} has no prompt; write it into {str(folder / _caption(name))!r}, or into "
            "metadata.jsonl, or put the pictures of each prompt into a sub-folder of that name"
        )
    if len(above) > 1:
        raise InputError(
            f"picture {str(folder / name)!r} lies more than one sub-folder deep, so no folder is its prompt; "
            f"name {str(folder / above[0])!r} as `path`, or write metadata.jsonl"
        )
    prompt = filled(above[0].replace("_", " "), repr(str(folder / above[0])))
    return Entry(name, repr(str(folder / name)), prompt, "{}")
