"""What a record tells about the machine and the code: never identity."""

import os
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from schemas.engine import Resources
from schemas.record import Volatile

_PACKAGES = ("rewardflow", "torch", "diffusers", "peft", "transformers", "prefect", "pyarrow", "pydantic")
_CODE = Path(__file__).resolve().parents[1]


def volatile(started: str, seconds: float, resources: Resources, ranks: int, measured: Mapping[str, float]) -> Volatile:
    """The part of a record that may differ between equal runs."""
    return Volatile(
        started=started,
        seconds=round(seconds, 3),
        host=socket.gethostname(),
        process=os.getpid(),
        resources=resources,
        versions=versions(),
        git=git(),
        ranks=ranks,
        measured={name: float(f"{value:.6g}") for name, value in measured.items()},
    )


@cache
def versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a clone that is not installed
            continue
    return found


@cache
def git() -> str:
    """Commit of this code, with a hash of what is not committed; empty when it is no clone."""
    if not (_CODE / ".git").exists():
        return ""
    commit, changes = _git("rev-parse", "HEAD").strip(), _git("diff", "HEAD")
    if not changes:
        return commit
    blob = _git("hash-object", "--stdin", given=changes).strip()
    return f"{commit}+{blob[:12]}"


def _git(*words: str, given: str | None = None) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_CODE), *words], input=given, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here: the record says nothing about the code
        return ""
    return done.stdout if done.returncode == 0 else ""
