"""Mirrors a run directory to its trackers, each in a thread of its own: none can slow, fail or change the run.

``trackers.json`` in the run directory says what each has got, so that a resumed run goes on where it stopped.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.plan import Plan, PlanNode
from pipelines.rundir import Address, write_text
from pipelines.trackers.base import Spot, Tracker
from pipelines.trackers.kinds import OPENERS
from pipelines.trackers.names import named
from pipelines.unroll import Unrolled
from schemas.strict import Strict
from schemas.trackers import TrackerConfig

DEADLINE = 10.0  # seconds that trackers together may take after the run's end
BOOK = "trackers.json"
_REST = "; `rewardflow track` mirrors what it has not got"
Say = Callable[[str], None]
Openers = Mapping[str, Callable[[Any, Spot], Tracker]]


class Mirrored(Strict):
    """What one tracker has got. With another config it is another tracker, which has got nothing."""

    config: dict[str, Any]
    id: str = ""
    before: bool = False
    iteration: int = -1  # the last one
    after: bool = False

    def has(self, part: "Part") -> bool:
        """Whether a part has been mirrored."""
        if part.iteration is not None:
            return part.iteration <= self.iteration
        return self.after if part.nodes[0].section == "after" else self.before

    def with_part(self, part: "Part") -> "Mirrored":
        """The same with a part more."""
        if part.iteration is not None:
            return self.model_copy(update={"iteration": max(self.iteration, part.iteration)})
        return self.model_copy(update={part.nodes[0].section: True})


class Part(NamedTuple):
    """A finished section outside the loop, or an iteration. `made` are the nodes computed just now."""

    world: Unrolled
    nodes: Sequence[PlanNode]  # never empty
    iteration: int | None
    made: Collection[str]

    @property
    def step(self) -> int:
        """The iteration; 0 before the loop, and the last one after it."""
        if self.iteration is not None:
            return self.iteration
        return max((self.world.ended or 0) - 1, 0) if self.nodes[0].section == "after" else 0

    def metrics(self, names: Collection[str]) -> dict[str, float]:
        """From the records of some of its nodes; in a re-run of one stage others have none."""
        out: dict[str, float] = {}
        for node in self.nodes:
            place = self.world.run.stage(Address(node.section, node.name, self.iteration))
            record = place.record() if node.name in names else None
            if record is not None:
                out |= named(self.world.plan, record)
        return out


class Book:
    """trackers.json. A damaged one raises ValueError: mirroring from the start would show everything twice."""

    def __init__(self, directory: Path) -> None:
        self._file, self._lock = directory / BOOK, threading.Lock()
        text = self._file.read_bytes() if self._file.is_file() else b"{}"
        self._entries = {name: Mirrored.model_validate(entry) for name, entry in json.loads(text).items()}

    def entry(self, name: str, config: TrackerConfig) -> Mirrored:
        """What a tracker has got."""
        plain = config.model_dump(mode="json")
        known = self._entries.get(name)
        return known if known is not None and known.config == plain else Mirrored(config=plain)

    def write(self, name: str, entry: Mirrored) -> None:
        """Notes it on disk."""
        with self._lock:
            self._entries[name] = entry
            plain = {name: entry.model_dump(mode="json") for name, entry in self._entries.items()}
            write_text(self._file, json.dumps(plain, indent=2) + "\n")


class Mirror:
    """All trackers of a run. Every method returns at once, but for `close`, which has a deadline."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        trackers: Mapping[str, TrackerConfig],
        say: Say,
        openers: Openers = OPENERS,
    ) -> None:
        self._say, self._lines = say, list[_Line]()
        if not trackers:
            return
        about = {"flow": plan.flow, "seed": str(plan.seed), "set": " ".join(plan.sets)}
        try:
            book = Book(directory)
        except (ValueError, AttributeError) as error:
            file = directory / BOOK
            say(f"warning: {file} cannot be read ({error}), so nothing goes to trackers; move it away to begin anew")
            return
        for name, config in trackers.items():
            spot = Spot(directory.resolve(), about, book.entry(name, config).id)
            self._lines.append(_Line(name, config, spot, book, openers[config.kind], say))

    def add(self, world: Unrolled, nodes: Sequence[PlanNode], iteration: int | None, made: Collection[str]) -> None:
        """Hands over a finished section or iteration: all of it when it is new, else what was computed just now."""
        if nodes:
            for line in self._lines:
                line.parts.put(Part(world, nodes, iteration, made))

    def close(self, deadline: float | None = DEADLINE) -> list[str]:
        """Waits for the trackers, at most so many seconds in all; gives the names of those that have not got all."""
        for line in self._lines:
            line.parts.put(None)
        end = None if deadline is None else time.monotonic() + deadline
        for line in self._lines:
            line.thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if line.thread.is_alive():
                line.failed = True
                self._say(f"warning: the tracker {line.name!r} was not ready {deadline:.0f} s after the end{_REST}")
        return [line.name for line in self._lines if line.failed]


class _Line:
    """One tracker and its thread, which ends with the process if it must."""

    def __init__(
        self,
        name: str,
        config: TrackerConfig,
        spot: Spot,
        book: Book,
        opener: Callable[[Any, Spot], Tracker],
        say: Say,
    ) -> None:
        self.name, self.failed = name, False
        self.parts: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._config, self._spot, self._book, self._opener, self._say = config, spot, book, opener, say
        self.thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._mirror()
        except (Exception, SystemExit) as error:
            if not self.failed:  # else it was given up at the deadline, and told then
                self.failed = True
                text = f"{type(error).__name__}: {error}"
                self._say(f"warning: the tracker {self.name!r} failed and is left out from here on: {text}{_REST}")

    def _mirror(self) -> None:
        """Opens the tracker with the first part it has not got."""
        entry = self._book.entry(self.name, self._config)
        tracker: Tracker | None = None
        with ExitStack() as stack:
            while (part := self.parts.get()) is not None:
                names = part.made if entry.has(part) else {node.name for node in part.nodes}
                if not names:
                    continue
                if tracker is None:
                    tracker = stack.enter_context(closing(self._opener(self._config, self._spot)))
                    entry = self._noted(entry.model_copy(update={"id": tracker.id}))
                metrics = part.metrics(names)
                if metrics:
                    tracker.log(part.step, metrics)
                entry = self._noted(entry.with_part(part))

    def _noted(self, entry: Mirrored) -> Mirrored:
        if not self.failed:  # after it was given up, another process may be at the run directory
            self._book.write(self.name, entry)
        return entry
