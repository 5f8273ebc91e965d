"""Digests of what lies outside the run directory, kept in run.json so that an unchanged folder is not hashed again."""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from schemas.assets import digest_of
from schemas.errors import InputError


@dataclass
class AssetDigests:
    """Digest by path. `known` is ``{path: {digest, stat}}``; `stat` covers names, sizes and times of all files."""

    known: dict[str, dict[str, str]] = field(default_factory=dict)
    changed: Callable[[], None] = lambda: None
    _fresh: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, path: str) -> str:
        """The digest of a file's or folder's content; a hub id stands for itself (the config has its revision)."""
        with self._lock:
            if path not in self._fresh:
                self._fresh[path] = self._digest(path)
            return self._fresh[path]

    def _digest(self, path: str) -> str:
        place = Path(path)
        if not place.is_absolute():
            return path
        if not place.exists():
            raise InputError(f"{path} is gone; it was there when the flow was checked")
        stat = _stat(place)
        entry = self.known.get(path)
        if entry is None or entry.get("stat") != stat:
            entry = {"digest": digest_of(place), "stat": stat}
            self.known[path] = entry
            self.changed()
        return entry["digest"]


def _stat(path: Path) -> str:
    total = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        facts = file.stat()
        total.update(f"{file.relative_to(path)}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return total.hexdigest()
