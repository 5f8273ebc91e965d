"""Errors a user can mend. Each says what was wanted, what was got and what to do.

RewardflowError
├── UserError            the user's input is wrong: exit code 2, no traceback
│   ├── FlowFileError    flows.yaml or --set: has line, column and field
│   ├── InputError       a file, folder or table that a stage reads is missing, empty or broken
│   └── StaleRecord      a committed stage was made by another recipe: shows the field diff
└── RunError             the run cannot go on: exit code 1
    ├── NonFinite        NaN or infinity: names stage, iteration and sample
    ├── StageFailed      a stage raised; carries rank and traceback of the worker
    ├── WorkerLost       a worker died or went silent: worth a retry on fresh workers
    ├── DiskFull         what was finished stays; the same command goes on after space is made
    ├── Collapsed        a guard of the loop stopped the run
    └── ServerLost       Prefect's server went away
"""

import difflib
from collections.abc import Iterable

_SPACE = "make space, and the same command goes on: nothing that was finished is lost"


class RewardflowError(Exception):
    """Base of all errors raised on purpose."""


class UserError(RewardflowError):
    """The user's input is wrong and the message says how to mend it."""


class FlowFileError(UserError):
    """A mistake in flows.yaml or in a --set, with its place."""

    def __init__(self, message: str, *, file: str = "", line: int = 0, column: int = 0, field: str = "") -> None:
        self.file, self.line, self.column, self.field = file, line, column, field
        place = f"{file}:{line}:{column}: " if line else (f"{file}: " if file else "")
        super().__init__(f"{place}{field + ': ' if field else ''}{message}")


class InputError(UserError):
    """Something a stage reads is missing, empty or broken."""


class StaleRecord(UserError):
    """A committed stage was made by another recipe than the one wanted now."""


class RunError(RewardflowError):
    """The run cannot go on; what was committed stays."""


class NonFinite(RunError):
    """A NaN or an infinity where a number was due."""


class StageFailed(RunError):
    """A stage raised in a worker."""


class WorkerLost(RunError):
    """A worker died or went silent."""


class DiskFull(RunError):
    """There was no space left to write to."""

    def __init__(self, message: str) -> None:
        super().__init__(message if _SPACE in message else f"{message}; {_SPACE}")

    @staticmethod
    def is_why(error: BaseException) -> bool:
        """Whether an error came of it; libraries say so in words only."""
        return any(words in str(error) for words in ("No space left on device", "Disk quota exceeded"))


class Collapsed(RunError):
    """A guard of the loop stopped the run."""


class ServerLost(RunError):
    """Prefect's server went away."""


def closest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known ones and the nearest of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Known: {', '.join(names) or 'none'}.{hint}"
