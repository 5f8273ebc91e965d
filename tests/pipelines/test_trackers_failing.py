"""Trackers that fail, hang or are missing: none can slow, stop or change a run."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.trackers.base import Spot
from pipelines.trackers.mirror import Mirror
from pipelines.trackers.names import named
from pipelines.unroll import Unrolled
from schemas.errors import FlowFileError, UserError
from schemas.trackers import TensorboardConfig
from tests.pipelines.bench import Bench
from tests.pipelines.test_trackers import TENSORBOARD, measured, tensorboard, timeless, wanted


def test_a_tracker_that_fails_warns_once_and_the_run_ends_well(bench: Bench) -> None:
    bench.run.path.mkdir(parents=True)
    (bench.run.path / "taken").write_text("a file where a folder should be")
    launcher = bench.go("times=4", "trackers.bad={kind: tensorboard, folder: taken}", TENSORBOARD, metrics=measured)
    assert launcher.ran[-1] == "export"
    (warning,) = [line for line in bench.said if line.startswith("warning")]
    assert "the tracker 'bad' failed and is left out from here on: " in warning
    assert timeless(tensorboard(bench.run.path / "tensorboard")) == wanted(4)


class Stuck:
    """A tracker whose server has stopped answering."""

    id = "stuck"
    released = threading.Event()

    def __init__(self, config: TensorboardConfig, spot: Spot) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.released.wait(60)

    def close(self) -> None:
        pass


def test_a_tracker_that_hangs_is_given_up_at_the_deadline(bench: Bench) -> None:
    bench.go("times=2", metrics=measured)
    plan = compile_flow(load(bench.file, "small", ["times=2"]), "small")
    said: list[str] = []
    begun = time.monotonic()
    mirror = Mirror(plan, bench.run.path, {"slow": TensorboardConfig()}, said.append, {"tensorboard": Stuck})
    world = Unrolled(plan, bench.run)
    for iteration in range(2):
        mirror.add(world, world.body(iteration), iteration, ())
    assert time.monotonic() - begun < 0.5
    assert mirror.close(0.5) == ["slow"]
    assert 0.5 <= time.monotonic() - begun < 2
    Stuck.released.set()
    assert len(said) == 1
    assert "the tracker 'slow' was not ready" in said[0]


def test_a_damaged_book_is_told_and_nothing_is_logged_twice(bench: Bench) -> None:
    bench.go("times=2", TENSORBOARD, metrics=measured)
    (bench.run.path / "trackers.json").write_text("{")
    bench.go("times=2", TENSORBOARD, metrics=measured)
    assert any("trackers.json cannot be read" in line for line in bench.said)
    assert timeless(tensorboard(bench.run.path / "tensorboard")) == wanted(2)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_extra_is_told_before_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(sys.modules, kind, None)  # what Python itself takes for "not installed"
    with pytest.raises(UserError, match=rf"trackers\.x: .* pip install 'rewardflow\[{kind}\]'"):
        bench.go("times=1", f"trackers.x={{kind: {kind}}}")
    assert not bench.run.path.exists()


def test_a_folder_of_the_tracker_s_name_is_not_its_package(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wandb").mkdir()  # as wandb leaves behind
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match=r"rewardflow\[wandb\]"):
        bench.go("times=1", "trackers.x={kind: wandb}")


def test_an_unknown_kind_or_field_is_refused(bench: Bench) -> None:
    for value, words in (("{kind: neptune}", "tensorboard"), ("{kind: mlflow, url: x}", "uri")):
        with pytest.raises(FlowFileError, match=words):
            load(bench.file, "small", [f"trackers.x={value}"])


def test_names_keep_the_node_where_two_nodes_of_a_stage_would_meet(
    flow_file: Callable[..., Path], bench: Bench
) -> None:
    second = "        again: {stage: advantage, rewards: score.rewards}\n        eval:\n"
    file = flow_file(("        eval:\n", second))
    two = Bench(file, bench.run.path)
    two.go("times=1", metrics=measured)
    plan = compile_flow(load(file, "small", ["times=1"]), "small")
    names = {name for node in ("advantage", "again", "update") for name in named(plan, two.record(f"0000/{node}"))}
    assert names == {
        *("advantage/reward/mean", "again/reward/mean", "train/loss", "update/steps"),
        *("time/advantage", "time/again", "time/update"),
        *(f"{node}/memory/peak_bytes" for node in ("advantage", "again", "update")),
    }
