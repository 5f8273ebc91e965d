"""Things outside the run directory: a model folder, a prompt file. Their content is identity, their path is not."""

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import InputError

PACKAGE = "package:"


@dataclass(frozen=True)
class Asset:
    """Marks a config field that holds a path: ``Annotated[str, Asset()]``. Identity uses its content's digest."""


def resolve(path: str, base: Path) -> str:
    """The absolute local path of ``path``, or ``path`` itself when it is a hub id.

    ``package:MODULE/rest`` lies inside an installed package; other relative paths count from ``base`` (the
    folder of flows.yaml). A name that is not there and looks like ``owner/name`` is a hub id.
    """
    if path.startswith(PACKAGE):
        module, _, rest = path.removeprefix(PACKAGE).partition("/")
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise InputError(f"no package {module!r} for {path!r}; install it or name a folder instead")
        return str(Path(spec.submodule_search_locations[0]) / rest)
    local = Path(os.path.expanduser(path))
    local = local if local.is_absolute() else base / local
    return str(local.resolve()) if local.exists() or not is_hub_id(path) else path


def is_hub_id(path: str) -> bool:
    """Whether ``path`` has the form ``owner/name`` of a hub repository."""
    parts = path.split("/")
    return len(parts) == 2 and all(parts) and not path.startswith((".", "~", "/")) and "." not in parts[0]


def digest_of(path: Path) -> str:
    """SHA-256 of a file, or of a folder's relative names and contents in sorted order; hidden files left out."""
    total = hashlib.sha256()
    if path.is_file():
        return _file_digest(path)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path).as_posix()
        if not any(part.startswith(".") for part in name.split("/")):
            total.update(f"{name}\0{_file_digest(file)}\n".encode())
    return total.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
