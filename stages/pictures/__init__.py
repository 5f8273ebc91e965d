"""Pictures that were not made here, with their prompts: in a folder, in a saved dataset, or on the hub."""

from pathlib import Path

from schemas.assets import is_hub_id
from schemas.errors import InputError
from schemas.imports import ImportSamplesConfig
from stages.pictures.dataset import in_dataset
from stages.pictures.entries import Found
from stages.pictures.folder import in_folder
from stages.store.hub import is_saved


def found(config: ImportSamplesConfig) -> Found:
    """What `path` holds; no picture is opened. InputError names the file or column that is wrong."""
    path = Path(config.path)
    if path.is_file():
        raise InputError(f"`path` {config.path!r} is a file; name the folder that holds the pictures")
    if path.is_dir() and config.revision is not None:
        raise InputError(f"`revision` is {config.revision!r}, but `path` {config.path!r} is a folder; leave it out")
    if path.is_dir() and not is_saved(path):
        return in_folder(config)
    if path.is_dir() or is_hub_id(config.path):
        return in_dataset(config)
    raise InputError(f"`path` {config.path!r} is no folder or hub id; name the folder that holds the pictures")
