"""Trackers by their own libraries, each read back with what it wrote; and that none can slow, fail or repeat a run."""

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import main
from schemas.errors import InputError
from schemas.record import StageRequest
from tests.pipelines.bench import Bench

TENSORBOARD = "trackers.tb={kind: tensorboard}"
Points = dict[str, list[tuple[int, float]]]


def measured(request: StageRequest) -> dict[str, float]:
    """Metrics that tell iterations and nodes apart."""
    now = float(request.iteration or 0)
    if request.stage == "score":
        return {"size": now + (0.5 if request.node == "eval_score" else 0.25), "size/std": 0.125}
    if request.stage == "advantage":
        return {"reward/mean": now}
    return {"train/loss": -now, "steps": 1.0} if request.stage == "update" else {}


def wanted(times: int) -> Points:
    """What `measured` gives in a run, by the trackers' names, without seconds."""
    evaluated = [i for i in range(times) if i % 2 == 0 or i == times - 1]
    return {
        "score/size": [(i, i + 0.25) for i in range(times)],
        "score/size/std": [(i, 0.125) for i in range(times)],
        "eval_score/size": [(i, i + 0.5) for i in evaluated],
        "eval_score/size/std": [(i, 0.125) for i in evaluated],
        "reward/mean": [(i, float(i)) for i in range(times)],
        "train/loss": [(i, -float(i)) for i in range(times)],
        "update/steps": [(i, 1.0) for i in range(times)],
    }


def timeless(points: Points) -> Points:
    """Without what was measured."""
    return {name: found for name, found in points.items() if not name.startswith("time/") and "/memory/" not in name}


def tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    files.Reload()
    # Two files of one second and one process are read in the order of their names.
    events = {name: sorted(files.Scalars(name), key=lambda event: event.wall_time) for name in files.Tags()["scalars"]}
    return {name: [(event.step, event.value) for event in found] for name, found in events.items()}


def test_tensorboard_has_the_metrics_of_every_iteration(bench: Bench) -> None:
    bench.go("times=4", TENSORBOARD, metrics=measured)
    found = tensorboard(bench.run.path / "tensorboard")
    assert timeless(found) == wanted(4)
    assert [step for step, _ in found["time/update"]] == [0, 1, 2, 3]
    assert [step for step, _ in found["time/encode"]] == [0]
    assert [step for step, _ in found["time/export"]] == [3]


def test_a_tracker_changes_no_record(bench: Bench) -> None:
    bench.go("times=2", metrics=measured)
    before = bench.records()
    assert bench.go("times=2", TENSORBOARD, metrics=measured).ran == []
    assert bench.records() == before
    assert timeless(tensorboard(bench.run.path / "tensorboard")) == wanted(2)


def test_a_resumed_run_and_a_longer_one_log_nothing_twice(bench: Bench) -> None:
    def fail(request: StageRequest) -> None:
        if request.node == "update" and request.iteration == 2:
            raise InputError("broken")

    with pytest.raises(InputError, match="broken"):
        bench.go("times=4", TENSORBOARD, metrics=measured, hook=fail)
    part = timeless(tensorboard(bench.run.path / "tensorboard"))
    assert part["train/loss"] == wanted(2)["train/loss"]
    bench.go("times=4", TENSORBOARD, metrics=measured)
    assert bench.go("times=4", TENSORBOARD, metrics=measured).ran == []
    assert timeless(tensorboard(bench.run.path / "tensorboard")) == wanted(4)
    bench.go("times=5", TENSORBOARD, metrics=measured)
    longer = timeless(tensorboard(bench.run.path / "tensorboard"))
    assert longer["train/loss"] == wanted(5)["train/loss"]


def test_what_is_made_again_is_logged_again_and_nothing_else(bench: Bench) -> None:
    bench.go("times=2", TENSORBOARD, metrics=measured)
    bench.go("times=2", TENSORBOARD, "eval_score.rewards.size.prefer=large", metrics=measured, on_change="rerun")
    found = tensorboard(bench.run.path / "tensorboard")
    assert [step for step, _ in found["time/eval_score"]] == [0, 1, 0, 1]
    assert [step for step, _ in found["time/update"]] == [0, 1]


def test_an_absolute_folder_has_one_for_each_run(bench: Bench, tmp_path: Path) -> None:
    bench.go("times=1", f"trackers.tb={{kind: tensorboard, folder: {tmp_path / 'all'}}}", metrics=measured)
    assert timeless(tensorboard(tmp_path / "all" / "one")) == wanted(1)


def wandb_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The history rows of a .wandb file: a LevelDB log of protobuf records after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = file.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # a block's end that has no room for a chunk's head
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            message: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            message.ParseFromString(record)
            record = b""
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                yield {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items}


def wandb_points(run: Path) -> Points:
    out: Points = {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        for row in wandb_rows(file):
            for name, value in row.items():
                if not name.startswith("_") and name != "iteration":
                    out.setdefault(name, []).append((int(row["iteration"]), float(value)))
    return out


@pytest.mark.slow
def test_wandb_offline_has_them_and_a_resumed_run_has_its_id(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    bench.go("times=2", "trackers.wb={kind: wandb}", metrics=measured)
    assert bench.said[-1].startswith("run "), bench.said
    assert timeless(wandb_points(bench.run.path)) == wanted(2)
    bench.go("times=4", "trackers.wb={kind: wandb}", metrics=measured)
    assert [line for line in bench.said if "warning" in line] == []
    assert timeless(wandb_points(bench.run.path))["train/loss"] == wanted(4)["train/loss"]
    files = list(bench.run.path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1


MLFLOW = "trackers.ml={kind: mlflow}"
NOLOAD = "ignore:The ``noload`` loader strategy is deprecated"  # MLflow 3.18 with SQLAlchemy 2.1


def mlflow_points(run: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rewardflow")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags["flow"]) == ("one", "FINISHED", "small")
    names = found.data.metrics
    return {n: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, n)] for n in names}


@pytest.mark.slow
@pytest.mark.filterwarnings(NOLOAD)
def test_mlflow_has_them_in_a_store_of_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bench.go("times=2", metrics=measured)
    words = ["track", "one", "--file", str(bench.file), "--runs", str(bench.run.path.parent), "--set", MLFLOW]
    assert main(words) == 0, capsys.readouterr()
    assert timeless(mlflow_points(bench.run.path)) == wanted(2)
    # The run goes on with the same tracker, and so with the same MLflow run.
    bench.go("times=4", MLFLOW, metrics=measured)
    assert [line for line in bench.said if "warning" in line] == []
    assert timeless(mlflow_points(bench.run.path))["train/loss"] == wanted(4)["train/loss"]
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="trackio wants pillow < 13, which is not pinned"
)
def test_trackio_has_them(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    bench.go("times=2", "trackers.tr={kind: trackio}", metrics=measured)
    bench.go("times=4", "trackers.tr={kind: trackio}", metrics=measured)
    assert [line for line in bench.said if "warning" in line] == []
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    run = json.loads((bench.run.path / "trackers.json").read_text())["tr"]["id"]
    out: Points = {}
    for row in storage.get_logs("rewardflow", run):
        for name in row.keys() - {"step", "timestamp"}:
            out.setdefault(name, []).append((row["step"], row[name]))
    assert timeless(out)["train/loss"] == wanted(4)["train/loss"]


def test_track_mirrors_a_run_afterwards_and_sends_nothing_twice(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.go("times=4", metrics=measured)
    words = ["track", "one", "--file", str(bench.file), "--runs", str(bench.run.path.parent)]
    assert main(words) == 2
    assert "the flow has no trackers; name a kind with --to" in capsys.readouterr().err
    for _ in range(2):
        assert main([*words, "--to", "tensorboard"]) == 0
        assert capsys.readouterr().out.startswith("tensorboard: has 4 of 4 iterations of ")
    assert timeless(tensorboard(bench.run.path / "tensorboard")) == wanted(4)


def test_track_mirrors_whole_iterations_of_a_stopped_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(request: StageRequest) -> None:
        if request.node == "update" and request.iteration == 2:
            raise InputError("broken")

    with pytest.raises(InputError, match="broken"):
        bench.go("times=4", metrics=measured, hook=fail)
    words = ["track", "one", "--file", str(bench.file), "--runs", str(bench.run.path.parent), "--set", TENSORBOARD]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("tb: has 2 of 4 iterations of ")
    bench.go("times=4", TENSORBOARD, metrics=measured)
    assert timeless(tensorboard(bench.run.path / "tensorboard")) == wanted(4)
