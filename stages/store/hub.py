"""One split of a `datasets` dataset: saved in a folder, or from the hub."""

from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import InputError, closest

if TYPE_CHECKING:
    from datasets import Dataset

_SAVED = ("dataset_info.json", "dataset_dict.json")


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((path / name).is_file() for name in _SAVED)


def opened(path: str, split: str, revision: str | None = None) -> "Dataset":
    """The rows of one split, memory-mapped. InputError names `path` or `split`."""
    from datasets import DatasetDict, load_dataset, load_from_disk  # 2.5 s to import

    try:
        found = load_from_disk(path) if is_saved(Path(path)) else load_dataset(path, split=split, revision=revision)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read `path` {path!r}, split {split!r}: {error}") from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise InputError(f"no `split` {split!r} in `path` {path!r}. {closest(split, map(str, found))}")
        found = found[split]
    return found
