"""One row of the benchmark, and how two ways of doing the same work are timed against each other."""

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stages.context import StageContext


@dataclass(frozen=True)
class Row:
    """A figure and its bound. `values` are one a repetition, in `unit` ("x" for a ratio).

    `absolute` are medians of both sides, `parts` where the first side's time went; both in seconds unless named.
    """

    name: str
    compared: str
    values: Sequence[float]
    bound: float
    unit: str = "x"
    absolute: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    checked: str = ""  # what was found equal on both sides

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def within(self) -> bool:
        return self.median <= self.bound

    def as_json(self) -> dict[str, object]:
        quartiles = statistics.quantiles(self.values, n=4, method="inclusive") if len(self.values) > 1 else None
        return {
            "name": self.name,
            "compared": self.compared,
            "unit": self.unit,
            "median": self.median,
            "least": min(self.values),
            "most": max(self.values),
            "quartiles": quartiles,
            "values": list(self.values),
            "bound": self.bound,
            "within": self.within,
            "absolute": dict(self.absolute),
            "parts": dict(self.parts),
            "checked": self.checked,
        }


@dataclass(frozen=True)
class Scale:
    """How much is measured. `sets` are overrides for the flows of flows.yaml."""

    repetitions: int = 7
    sets: tuple[str, ...] = ()
    iterations: int = 500  # of the long run
    threads: int = 1


Work = Callable[[int], object]  # told the number of the repetition; -1 warms up


class Times(NamedTuple):
    """Seconds of both sides by repetition: of the clock, and of the processor in this process."""

    wall: tuple[list[float], list[float]]
    cpu: tuple[list[float], list[float]]


def interleaved(first: Work, second: Work, repetitions: int) -> Times:
    """A B A B ..., so that the machine's noise meets both alike."""
    first(-1)
    second(-1)
    times = Times(([], []), ([], []))
    for number in range(repetitions):
        for work, wall, cpu in zip((first, second), *times, strict=True):
            gc.collect()
            begun = time.perf_counter(), time.process_time()
            work(number)
            wall.append(time.perf_counter() - begun[0])
            cpu.append(time.process_time() - begun[1])
    return times


def compared(
    name: str,
    what: str,
    bound: float,
    sides: tuple[str, str],
    times: Times,
    parts: Mapping[str, float] | None = None,
    checked: str = "",
) -> Row:
    """The row of two interleaved works: ratios of the clock's seconds, pair by pair."""
    ratios, cpu = ([a / b for a, b in zip(*taken, strict=True)] for taken in times)
    absolute = {side: statistics.median(taken) for side, taken in zip(sides, times.wall, strict=True)}
    absolute["ratio of CPU time"] = statistics.median(cpu)
    return Row(name, what, ratios, bound, absolute=absolute, parts=parts or {}, checked=checked)


def medians(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each `time/...` that stages told, by name."""
    names = {name for one in measured for name in one if name.startswith("time/")}
    return {
        name.removeprefix("time/"): statistics.median(one.get(name, 0.0) for one in measured) for name in sorted(names)
    }


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now (Linux)."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [x.partition(":")[2].strip() for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def parts_of(ctx: StageContext) -> dict[str, float]:
    """What a stage measured of itself; the rest of its time is not known any more once it has ended."""
    return {name: value for name, value in {**ctx.measured, **ctx.clock.parts()}.items() if name != "time/other"}
