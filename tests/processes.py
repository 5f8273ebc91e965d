"""Processes as the kernel sees them, for tests of what a command leaves behind."""

import os
import time
from pathlib import Path

MARK = "REWARDFLOW_TEST_MARK"


def alive(pid: int) -> bool:
    """Zombies are dead."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether all of them end within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def marked(mark: str) -> list[int]:
    """Live processes that were started with MARK=mark, and all that these started, whoever their parent is now.

    One that writes its title over its environment, as Ray's helpers do, is known by its parent only.
    """
    found = {pid for pid in _pids() if f"{MARK}={mark}".encode() in _read(pid, "environ").split(b"\0")}
    while more := {pid for pid in _pids() if _parent(pid) in found} - found:
        found |= more
    return [pid for pid in sorted(found) if alive(pid)]


def workers_of(parent: int) -> list[int]:
    """Live worker processes of a process."""
    ours = f"PPid:\t{parent}\n".encode()
    return [p for p in _pids() if ours in _read(p, "status") and b"stages.worker" in _read(p, "cmdline") and alive(p)]


def _parent(pid: int) -> int:
    """0 when it ended meanwhile."""
    told = _read(pid, "status").partition(b"\nPPid:\t")[2]
    return int(told.split(b"\n")[0] or 0)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile, or is not ours
        return b""
