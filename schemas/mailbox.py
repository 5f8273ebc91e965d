"""How the foreman and workers that torchrun started meet in a folder on a shared file system.

    MAILBOX/foreman.json             the foreman: its session, its sign of life, what it wants of whom
    MAILBOX/SESSION/order-NUMBER.json   one order, to the workers named in it
    MAILBOX/SESSION/NAME.replies     what the worker NAME says: JSON lines, the first is its Hello
    MAILBOX/SESSION/agent-HOST-PID   a torchrun agent whose workers have met this session

Files are written under a temporary name and renamed, or appended to by one writer that closes them after each line.
"""

import os
from pathlib import Path
from typing import Any

from pydantic import Field

from schemas.strict import Strict

FOREMAN = "foreman.json"
REPLIES = ".replies"
LEFT = 75  # exit code of a worker that wants to be started anew


class Foreman(Strict):
    """What workers read every moment."""

    session: str
    beat: int = Field(description="Grows as long as the foreman lives.")
    open: bool = Field(description="False: goodbye, all workers leave.")
    processes: int
    threads: int | None
    heartbeat: float = Field(description="Seconds without a sign of the foreman after which workers leave.")
    logs: str
    dismissed: tuple[str, ...] = Field(description="Workers that are to leave and be started anew.")
    stacks: tuple[str, ...] = Field(description="Workers that are to write their Python stacks into their logs.")


class Hello(Strict):
    """A worker's first line."""

    kind: str = "hello"
    rank: int
    world_size: int
    host: str
    process: int
    address: str = Field(description="Where other ranks would reach this one.")
    port: int = Field(description="A free one there.")


class Order(Strict):
    """A request to a crew; rank 0 listens at address and port when the ranks join."""

    crew: tuple[str, ...] = Field(description="Names of the workers, by rank.")
    address: str
    port: int
    request: dict[str, Any]


def put(path: Path, text: str) -> None:
    """Replaces a file so that readers see the old one or the new one."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def foreman_of(mailbox: Path) -> Foreman | None:
    """What the foreman says, or nothing while there is none."""
    try:
        return Foreman.model_validate_json((mailbox / FOREMAN).read_bytes())
    except OSError:  # none yet, or replaced on another machine while we read
        return None
