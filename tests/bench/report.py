"""The benchmark's table and its JSON."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pipelines.facts import git, versions
from tests.bench.measure import Row, Scale, processor

_FORM = "{:<22} {:>8} {:>18} {:>6}  {:<7} {}"


def header(scale: Scale) -> dict[str, object]:
    """Where and with what it was measured."""
    return {
        "date": datetime.now(UTC).isoformat("T", "seconds"),
        "git": git(),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "load_before": os.getloadavg()[0],
        },
        "threads": scale.threads,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "repetitions": scale.repetitions,
        "sets": list(scale.sets),
        "python": platform.python_version(),
        "versions": versions(),
    }


def write(path: Path, facts: dict[str, object], rows: Sequence[Row]) -> None:
    """All rows so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "rows": [row.as_json() for row in rows]}, indent=2) + "\n")


def titles() -> str:
    return _FORM.format("row", "median", "least..most", "bound", "", "absolute medians, where the time went")


def line(row: Row) -> str:
    """One row of the table, with what is compared below it."""
    spread = f"{min(row.values):.3f}..{max(row.values):.3f}"
    told = ", ".join(f"{name} {value:.3f}" for name, value in row.absolute.items())
    parts = ", ".join(f"{name} {value:.3f}" for name, value in row.parts.items())
    facts = f"{told} ({parts})" if parts else told
    verdict = "within" if row.within else "MISSED"
    first = _FORM.format(row.name, f"{row.median:.3f} {row.unit}", spread, f"{row.bound:g}", verdict, facts)
    equal = f"; equal: {row.checked}" if row.checked else ""
    return f"{first}\n    {row.compared}{equal}"
