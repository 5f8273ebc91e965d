"""A crew: ranks that were started together and work on one request together. What all kinds share."""

import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from schemas.errors import RewardflowError
from schemas.pulse import Pulse

_SIGNS = ("hello", "heartbeat")


@dataclass(frozen=True)
class Reply:
    """A message from a rank; none when there will be no more."""

    rank: int
    message: dict[str, Any] | None


class Inbox:
    """What the ranks say. Signs of life are only noted; several threads may put."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._queue: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._pulses = [Pulse() for _ in range(ranks)]
        self._counts = [0] * ranks
        self._ended: list[int] = []
        self._lock = threading.Lock()

    def put(self, rank: int, message: dict[str, Any] | None) -> None:
        """A rank has said something, or has ended."""
        with self._lock:
            if message is None:
                self._ended.append(rank)
            else:
                self._pulses[rank].beat()
                self._counts[rank] += 1
        if message is None or message["kind"] not in _SIGNS:
            self._queue.put(Reply(rank, message))

    def get(self, seconds: float) -> Reply | None:
        """The next reply, or none within so many seconds."""
        try:
            return self._queue.get(timeout=seconds)
        except queue.Empty:
            return None

    def unheard(self) -> list[int]:
        """Ranks that have said nothing yet."""
        return [rank for rank, count in enumerate(self._counts) if not count]

    def heard(self) -> list[int]:
        """Messages so far, by rank."""
        return list(self._counts)

    def ended(self) -> list[int]:
        """Ranks that are no more, in the order in which that was noticed."""
        return list(self._ended)

    def silent(self, seconds: float) -> int | None:
        """A rank that has been silent for longer. Wants to be asked all the time, see Pulse."""
        silences = [pulse.silence() for pulse in self._pulses]
        return next((rank for rank, silence in enumerate(silences) if silence > seconds), None)


class Crew(Protocol):
    """Ranks. What they say comes into the inbox."""

    inbox: Inbox

    def missing(self) -> str:
        """What must still come before it can work, for people; empty when nothing. Returns within a second."""
        ...

    def late(self, missing: str, seconds: float) -> RewardflowError:
        """What to raise when it is still missing after so many seconds."""
        ...

    def send(self, request: str) -> None:
        """Hands a request to all ranks; a rank that is gone is noticed by the end of its replies."""
        ...

    def log(self, rank: int) -> Path:
        """What it prints."""
        ...

    def ending(self, rank: int) -> str:
        """How it died, for people: "was killed by SIGKILL"."""
        ...

    def write_stacks(self) -> None:
        """Has all ranks write their Python stacks into their logs, as far as they can, and waits a moment."""
        ...

    def end(self, grace: float) -> None:
        """Ends the ranks: at once when grace is 0, else they may take so many seconds."""
        ...


class Crews(Protocol):
    """One kind of crew."""

    def begin(self) -> Crew:
        """Starts the ranks, or asks for them; does not wait for them."""
        ...

    def close(self) -> None:
        """Gives back what it holds besides crews."""
        ...
