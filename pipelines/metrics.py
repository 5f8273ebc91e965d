"""`rewardflow metrics`: a table for each stage, a row an iteration."""

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipelines.saved import Saved, saved
from pipelines.terminal import number, table
from schemas.errors import UserError, closest
from schemas.record import StageRecord

_METRICS = """\
A table for each stage of RUN: a row an iteration, a column a metric. Beside a stage's own metrics (reward/mean,
train/clip_fraction, ...) stand what was measured: seconds, time/... (seconds of its parts), images_per_second, flops,
mfu (share of the device's peak) and memory/peak_bytes. For a terminal each metric is one line over the iterations;
--csv and --arrow write the whole tables, one file a stage; --json prints them.
"""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24  # of a curve in a terminal

Row = dict[str, float | int | None]


def metrics_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`metrics`."""
    kind = argparse.RawDescriptionHelpFormatter
    metrics = commands.add_parser("metrics", help="a stage's metrics", description=_METRICS, formatter_class=kind)
    metrics.set_defaults(command=_metrics)
    metrics.add_argument("run", metavar="RUN")
    metrics.add_argument("nodes", metavar="STAGE", nargs="*", help="these stages only")
    form = metrics.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--csv", type=Path, metavar="DIR", help="write DIR/STAGE.csv")
    form.add_argument("--arrow", type=Path, metavar="DIR", help="write DIR/STAGE.arrow, an Arrow stream")
    return metrics


def tables(run: Saved, nodes: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Rows by node, each with the same columns; a metric that an iteration lacks is none."""
    unknown = next((name for name in nodes if name not in run.nodes), None)
    if unknown is not None:
        raise UserError(f"the run {run.run.path} has no stage {unknown!r}. {closest(unknown, run.nodes)}")
    found: dict[str, list[Row]] = {}
    for address, record in run.records.items():
        if record.status == "done" and (not nodes or address.node in nodes):
            found.setdefault(address.node, []).append({"iteration": address.iteration, **of_record(record)})
    return {name: _even(found[name]) for name in run.nodes if name in found}


def of_record(record: StageRecord) -> dict[str, float]:
    """A stage's metrics, and what was measured of it."""
    return {
        **record.outputs.get("metrics", {}),
        "seconds": record.volatile.seconds,
        **record.volatile.measured,
    }


def _even(rows: Sequence[Row]) -> list[Row]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _metrics(arguments: argparse.Namespace) -> int:
    run = saved(arguments.runs, arguments.run)
    found = tables(run, arguments.nodes)
    if arguments.json:
        print(json.dumps({"run": run.run.path.name, "tables": found, "damaged": run.damaged}, indent=2))
    elif arguments.csv or arguments.arrow:
        write = _write_csv if arguments.csv else _write_arrow
        folder: Path = arguments.csv or arguments.arrow
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in found.items():
            print(write(folder, name, rows))
    else:
        print("\n".join(line for name, rows in found.items() for line in _text(name, rows)))
    for text in [] if arguments.json else run.damaged.values():
        print(f"damaged: {text}")
    return 0


def _text(node: str, rows: Sequence[Row]) -> Iterator[str]:
    """A line a metric; one row alone is told without first and last."""
    names = [name for name in rows[0] if name != "iteration"]
    if len(rows) == 1:
        yield from [node, *table(["  metric", ""], [[f"  {n}", _cell(rows[0][n])] for n in names]), ""]
        return
    lines = []
    for name in names:
        values = [float(value) for row in rows if (value := row[name]) is not None]
        ends = (values[0], values[-1], min(values), max(values), sum(values) / len(values))
        lines.append([f"  {name}", *map(_cell, ends), _curve(values)])
    yield f"{node}: {len(rows)} iterations, {rows[0]['iteration']} to {rows[-1]['iteration']}"
    yield from [*table(["  metric", "first", "last", "least", "most", "mean", ""], lines), ""]


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)


def _curve(values: Sequence[float]) -> str:
    """Means of equal stretches as bars from the least to the most."""
    parts = min(_WIDTH, len(values))
    cuts = [len(values) * i // parts for i in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, spread = min(means), max(means) - min(means)
    if not spread:
        return _BARS[0] * parts
    return "".join(_BARS[min(int((value - low) / spread * len(_BARS)), len(_BARS) - 1)] for value in means)


def _write_csv(folder: Path, node: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / f"{node}.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def _write_arrow(folder: Path, node: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    import pyarrow as pa  # the other forms do without

    path = folder / f"{node}.arrow"
    types = [(name, pa.int64() if name == "iteration" else pa.float64()) for name in rows[0]]
    made = pa.Table.from_pylist(list(rows), schema=pa.schema(types))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as stream:
        stream.write_table(made)
    return path
