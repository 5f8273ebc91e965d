"""The lines a run prints: one for each stage when it ends, a few for one that takes long, one for all reused ones."""

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pipelines.rundir import Address
from pipelines.terminal import number

SPARSE = 5.0  # seconds between two lines of a stage at work
_MOST_METRICS = 4


class Clock:
    """When a stage began and for how long it has been at it, waiting for its turn left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """It begins now."""
        self.started = datetime.now(UTC).isoformat("T", "seconds")
        self._begun = time.monotonic()

    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun


class Lines:
    """Prints progress; called from several threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reused: list[Address] = []
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """A line of its own."""
        with self._lock:
            self._flush()
            self._say(text)

    def done(self, address: Address, seconds: float, metrics: Mapping[str, float]) -> None:
        """A stage has been computed."""
        shown = "  ".join(f"{name} {number(value)}" for name, value in main_metrics(metrics).items())
        self.note(f"{_where(address)} done {seconds:.1f} s{'  ' + shown if shown else ''}")

    def skipped(self, address: Address, why: str) -> None:
        """A stage has been skipped."""
        self.note(f"{_where(address)} skipped: {why}")

    def reused(self, address: Address) -> None:
        """A stage was there already; told with the next line."""
        with self._lock:
            self._reused.append(address)

    def flush(self) -> None:
        """Tells what is still untold."""
        with self._lock:
            self._flush()

    def ticker(self, address: Address, clock: Clock) -> Callable[[int, int, str], None]:
        """Progress of one stage: silent while it is quick."""
        told = time.monotonic()

        def tick(done: int, total: int, unit: str) -> None:
            nonlocal told
            now = time.monotonic()
            if not total:  # a remark, not a count
                self.note(f"{_where(address)} {unit}")
            elif now - told >= SPARSE and done < total:
                told = now
                self.note(f"{_where(address)} {done}/{total} {unit}  {_pace(done, clock.seconds())}")

        return tick

    def _flush(self) -> None:
        if not self._reused:
            return
        loops = sorted({a.iteration for a in self._reused if a.iteration is not None})
        others = sorted({a.section for a in self._reused if a.iteration is None}, reverse=True)
        span = f"iterations {loops[0]} to {loops[-1]}" if len(loops) > 1 else f"iteration {loops[0]}" if loops else ""
        places = [*(name for name in others if name == "before"), *([span] if span else [])]
        places += [name for name in others if name == "after"]
        self._say(f"reused {len(self._reused)} finished stages ({', '.join(places)})")
        self._reused = []


def main_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The few that a line has room for: names without a slash first."""
    plain = [name for name in metrics if "/" not in name] or list(metrics)
    return {name: metrics[name] for name in plain[:_MOST_METRICS]}


def _pace(done: int, seconds: float) -> str:
    return f"{done / seconds:.1f}/s" if done >= seconds or not done else f"{seconds / done:.1f} s each"


def _where(address: Address) -> str:
    place = f"[{address.section if address.iteration is None else address.iteration}]"
    return f"{place:<8} {address.node:<20}"
