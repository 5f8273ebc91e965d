"""A long run by the command: what its last iterations cost, in time and memory, against its first ones."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.ground import FLOWS, ROOT
from tests.bench.iteration import commits
from tests.bench.measure import Row, Scale, resident_bytes
from tests.pipelines.prefect_server import environment
from tests.processes import workers_of

_SETS = (
    "prompts.choose=1",
    "sample.per_prompt=2",
    "sample.sampler.steps=2",
    "update.steps=1",
    "keep={last: 2, every: 100}",
    "resources.preflight=false",
)
_MIB = 2.0**20


def rows(scale: Scale) -> Iterator[Row]:
    """Without Prefect."""
    return _rows(scale, "long", "--plain")


def prefect_rows(scale: Scale) -> Iterator[Row]:
    """Under Prefect."""
    return _rows(scale, "long_prefect")


def _rows(scale: Scale, name: str, *words: str) -> Iterator[Row]:
    times, size = scale.iterations, scale.iterations // 10
    with TemporaryDirectory(prefix="rewardflow-bench-") as folder:
        held = _run(Path(folder), scale, *words)
        ends = commits(Path(folder) / "long", times)
    seconds = [b - a for a, b in pairwise(ends)]
    # The first iteration loads the model; so the windows begin at the second one.
    first, last = seconds[:size], seconds[-size:]
    how = "smoke, " + ("without Prefect" if words else "under Prefect") + ", keep last 2, every 100"
    what = f"of the last {size} of {times} iterations / of the first {size} after the first ({how})"
    middle = statistics.median(first)
    absolute = {"first": middle, "last": statistics.median(last)}
    yield Row(f"{name}_time", f"time {what}", [one / middle for one in last], 1.1, absolute=absolute)
    for place, who in enumerate(("foreman", "workers")):
        early = statistics.median(one[place] for i, one in held.items() if 1 <= i <= size)
        late = [one[place] for i, one in held.items() if i >= times - size]
        told = {"first MiB": early / _MIB, "last MiB": statistics.median(late) / _MIB}
        yield Row(f"{name}_{who}", f"memory of the {who} {what}", [one / early for one in late], 1.1, absolute=told)


def _run(folder: Path, scale: Scale, *words: str) -> Mapping[int, tuple[int, int]]:
    """Runs it; memory of the foreman and of its workers in bytes, by the iteration that was at work."""
    sets = [
        w for one in (*_SETS, f"times={scale.iterations}", f"resources.threads={scale.threads}") for w in ("--set", one)
    ]
    command = [sys.executable, "-m", "pipelines.cli", "run", "smoke", "--as", "long", "--file", str(FLOWS)]
    held: dict[int, tuple[int, int]] = {}
    with (folder / "log").open("wb") as log:
        foreman = subprocess.Popen(
            [*command, "--runs", str(folder), *words, *sets],
            cwd=ROOT,
            env=environment(folder / "home"),
            stdout=log,
            stderr=log,
        )
    try:
        iteration, workers = 0, list[int]()
        while foreman.poll() is None:
            while (folder / "long" / f"{iteration + 1:04d}").exists():
                iteration += 1
            workers = workers if len(workers) == 2 else workers_of(foreman.pid)
            if len(workers) == 2 and iteration not in held:
                held[iteration] = (resident_bytes(foreman.pid), sum(map(resident_bytes, workers)))
            time.sleep(0.1)
    finally:
        foreman.terminate()
        foreman.wait()
    assert foreman.returncode == 0, (folder / "log").read_text()[-4000:]
    return held
