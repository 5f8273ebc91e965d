"""`metrics` and `logs` on a real run directory."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from tests.pipelines.bench import Bench


def test_a_table_a_stage(say: Callable[..., str]) -> None:
    found = json.loads(say("metrics", "one", "--json"))["tables"]
    assert list(found) == [
        "prompts",
        "encode",
        "sample",
        "score",
        "advantage",
        "update",
        "eval",
        "eval_score",
        "export",
    ]
    assert [(row["iteration"], row["size"]) for row in found["eval_score"]] == [(0, 0.5), (2, 0.7), (3, 0.625)]
    assert all(row["memory/peak_bytes"] == 1.0 and row["seconds"] >= 0 for row in found["update"])
    assert found["export"][0]["iteration"] is None


def test_in_a_terminal_a_metric_is_a_line(say: Callable[..., str]) -> None:
    lines = say("metrics", "one", "eval_score").splitlines()
    assert lines[0] == "eval_score: 3 iterations, 0 to 3"
    assert lines[1].split() == ["metric", "first", "last", "least", "most", "mean"]
    assert lines[2].split() == ["size", "0.5", "0.625", "0.5", "0.7", "0.6083", "▁█▆"]


def test_files_hold_the_whole_tables(say: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    assert str(folder / "eval_score.csv") in say("metrics", "one", "--csv", str(folder)).splitlines()
    with (folder / "eval_score.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["iteration"], row["size"]) for row in rows] == [("0", "0.5"), ("2", "0.7"), ("3", "0.625")]
    say("metrics", "one", "eval_score", "--arrow", str(folder))
    table = pa.ipc.open_stream((folder / "eval_score.arrow").read_bytes()).read_all()
    assert table.column("iteration").to_pylist() == [0, 2, 3]
    assert table.column("size").to_pylist() == [0.5, 0.7, 0.625]


def test_an_unknown_stage_is_named(say: Callable[..., str]) -> None:
    assert "no stage 'evalscore'" in say("metrics", "one", "evalscore", code=2)
    assert "Did you mean 'eval_score'?" in say("metrics", "one", "evalscore", code=2)


def test_logs(done: Bench, say: Callable[..., str]) -> None:
    assert "has no logs" in say("logs", "one", code=2)
    done.run.logs.mkdir()
    (done.run.logs / "compute-rank0.log").write_text("first\nsecond\nthird\n")
    (done.run.logs / "light-rank0.log").write_text("light\n")
    assert say("logs", "one", "--lines", "2").splitlines() == ["compute-rank0 | third", "light-rank0   | light"]
    assert say("logs", "one", "--rank", "compute-rank0", "--lines", "0").splitlines()[1:4] == [
        "first",
        "second",
        "third",
    ]
    assert "Did you mean 'light-rank0'?" in say("logs", "one", "--rank", "ligt-rank0", code=2)


def test_logs_of_all_ranks_in_order_of_time(done: Bench, say: Callable[..., str]) -> None:
    """A line that C code wrote follows the one before it; a clock that was set back changes no rank's order."""
    done.run.logs.mkdir()
    at = "2026-01-31T08:30:0"
    first = f"{at}0.000 a\n{at}2.000 c\nSegmentation fault\n{at}1.500 set back\n"
    (done.run.logs / "compute-rank0.log").write_text(first)
    (done.run.logs / "compute-rank1.log").write_text(f"before any time\n{at}1.000 b\n{at}3.000 d\n")
    (done.run.logs / "prefect.log").write_text("not a worker's\n")
    shown = [line.replace(at, "").split(" | ") for line in say("logs", "one", "--lines", "0").splitlines()]
    assert [(name[-1], text) for name, text in shown] == [
        ("1", "before any time"),
        ("0", "0.000 a"),
        ("1", "1.000 b"),
        ("0", "2.000 c"),
        ("0", "Segmentation fault"),
        ("0", "1.500 set back"),
        ("1", "3.000 d"),
    ]
