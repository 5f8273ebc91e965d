"""From the command to the first committed shard of samples: a second run on this machine, with two ranks."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.ground import FLOWS, ROOT
from tests.bench.measure import Row, Scale
from tests.pipelines.prefect_server import environment
from tests.processes import gone, workers_of

_PATIENCE = 300.0  # seconds
_SHARD = "samples/shard-*.json"  # what commits it


def rows(scale: Scale) -> Iterator[Row]:
    """The first run fills caches (bytecode, pages, Prefect's database) and does not count."""
    with TemporaryDirectory(prefix="rewardflow-bench-") as folder:
        told = [_started(Path(folder), f"run{number}", scale) for number in range(scale.repetitions + 1)][1:]
    parts = {name: statistics.median(one[name] for one in told) for name in told[0]}
    what = "`rewardflow run shapes` (Prefect, preflight, 2 ranks), not the first on this machine: to its first shard"
    yield Row("startup", what, [one["sample"] for one in told], 20.0, "s", parts=parts)


def _started(folder: Path, name: str, scale: Scale) -> dict[str, float]:
    """Seconds to: workers are there, the preflight has drawn samples, the run has. Then the run is stopped."""
    sets = [word for one in (*scale.sets, "resources.processes=2") for word in ("--set", one)]
    command = [sys.executable, "-m", "pipelines.cli", "run", "shapes", "--as", name, "--file", str(FLOWS)]
    run, found = folder / name, dict[str, float]()
    with (folder / "log").open("wb") as log:
        begun = time.monotonic()
        foreman = subprocess.Popen(
            [*command, "--runs", str(folder), *sets],
            cwd=ROOT,
            env=environment(folder / "home"),
            stdout=log,
            stderr=log,
        )
    workers: list[int] = []
    try:
        while "sample" not in found:
            assert foreman.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() - begun < _PATIENCE, f"no sample in {_PATIENCE:.0f} s"
            workers = workers_of(foreman.pid)
            marks = {
                "workers": bool(workers),
                "preflight sample": any(run.glob(f"preflight/*/*/{_SHARD}")),
                "sample": any(run.glob(f"[!p]*/*/{_SHARD}")),
            }
            for mark, seen in marks.items():
                if seen:
                    found.setdefault(mark, time.monotonic() - begun)
            time.sleep(0.02)
    finally:
        foreman.terminate()
        foreman.wait()
    assert gone(workers), "workers outlive their run"
    return found
