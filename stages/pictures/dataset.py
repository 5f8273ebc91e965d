"""Pictures in a `datasets` dataset: a column of Image features and one of prompts. The rest becomes metadata."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import InputError, closest
from schemas.imports import ImportSamplesConfig
from stages.pictures.entries import Found, entry
from stages.store.hub import opened

if TYPE_CHECKING:
    from datasets import Dataset


def in_dataset(config: ImportSamplesConfig) -> Found:
    """The pictures in the order of the rows. Columns of other media are left out of the metadata."""
    from datasets import Image

    rows = opened(config.path, config.split, config.revision)
    _check(rows, config)
    encoded = rows.select_columns([config.image_column]).cast_column(config.image_column, Image(decode=False))
    plain = [name for name, feature in rows.features.items() if name == config.prompt_column or _plain(feature)]
    shown = f"`path` {config.path!r}"
    places = [f"{shown}, row {number}" for number in range(len(rows))]
    table = rows.select_columns(plain)
    entries = [entry(dict(row), config, None, place, place) for place, row in zip(places, table, strict=True)]

    def content(number: int) -> bytes:
        value = encoded[number][config.image_column]
        if value is not None and value["bytes"] is not None:
            return value["bytes"]
        # What lies outside a local dataset is not covered by its digest.
        if value is None or Path(config.path).is_dir():
            problem = "no picture" if value is None else f"only the path {value['path']!r} of a picture"
            raise InputError(f"{places[number]}: `image_column` holds {problem}; save the dataset with its pictures")
        return Path(value["path"]).read_bytes()

    return Found(entries, content, 0)


def _check(rows: "Dataset", config: ImportSamplesConfig) -> None:
    """Both columns are there, the dataset is not empty, and pictures are pictures."""
    from datasets import Image

    shown = f"`path` {config.path!r}"
    for field, column in (("image_column", config.image_column), ("prompt_column", config.prompt_column)):
        if column not in rows.features:
            raise InputError(f"{shown}: no column {column!r}; set `{field}`. {closest(column, rows.features)}")
    feature = rows.features[config.image_column]
    if not isinstance(feature, Image):
        raise InputError(
            f"{shown}: `image_column` {config.image_column!r} is {feature}, not an Image; name another column, or "
            f"save the dataset after cast_column({config.image_column!r}, Image())"
        )
    if not len(rows):
        raise InputError(f"{shown}, split {config.split!r}: holds no pictures; name another split")


def _plain(feature: Any) -> bool:
    """Whether a column's values can be written as JSON."""
    from datasets import ClassLabel, LargeList, List, Value

    if isinstance(feature, dict):
        return all(_plain(item) for item in feature.values())
    if isinstance(feature, List | LargeList):
        return _plain(feature.feature)
    return isinstance(feature, ClassLabel) or (isinstance(feature, Value) and "binary" not in feature.dtype)
