"""runs, show, why and diff on real run directories."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.lock import locked
from tests.pipelines.bench import Bench, Say, no_metrics, sized


def timeless(text: str) -> str:
    """Without what differs from one time to the next."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:+]+", "THEN", text)
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d)? (s|B|kB)\b", "N", text))


def test_runs_and_their_states(done: Bench, say: Say, tmp_path: Path) -> None:
    stopped = Bench(done.file, tmp_path / "runs" / "two")
    with pytest.raises(RuntimeError):
        stopped.go(hook=lambda request: _fail() if request.iteration == 2 and request.stage == "update" else None)
    (tmp_path / "runs" / "three").mkdir()
    (tmp_path / "runs" / "three" / "run.json").write_text("{")
    lines = say("runs").splitlines()
    assert [timeless(line) for line in lines[:3]] == [
        "run flow state iterations best time size began",
        "one small complete 4 of 4 eval_score.size 0.7 N N THEN",
        "two small stopped 2 of 4 eval_score.size 1 N N THEN",
    ]
    assert lines[3].startswith(f"damaged: {tmp_path / 'runs' / 'three' / 'run.json'} cannot be read")
    with locked(done.run.path, lambda _: None):
        found = {run["run"]: run["state"] for run in json.loads(say("runs", "--json"))["runs"]}
    assert found == {"one": "at work", "two": "stopped"}


def _fail() -> None:
    raise RuntimeError("stop here")


def test_show_a_run(done: Bench, say: Say) -> None:
    text = say("show", "one")
    assert timeless(text.splitlines()[0]) == "one: small, complete, 4 of 4 iterations, N at work, N"
    rows = [line.split() for line in text.splitlines() if re.match(r"iteration|\d ", line)]
    assert rows == [
        ["iteration", "score.size", "eval_score.size"],
        ["0", "1", "0.5"],
        ["1", "1"],
        ["2", "1", "0.7"],
        ["3", "1", "0.625"],
    ]
    assert text.splitlines()[-1] == f"after/export  {done.run.path / 'after' / 'export'}"
    shown = json.loads(say("show", "one", "--json"))
    assert shown["loop"]["eval_score.size"] == {"0": 0.5, "2": 0.7, "3": 0.625}
    assert shown["best"] == {"metric": "eval_score.size", "value": 0.7, "iteration": 2}
    assert [stage["address"] for stage in shown["stages"]] == ["before/prompts", "before/encode", "after/export"]


def test_show_an_iteration_and_a_stage(done: Bench, say: Say) -> None:
    lines = say("show", "one/2").splitlines()
    assert lines[0] == "one/0002"
    assert [line.split()[0] for line in lines[1:]] == [
        f"0002/{node}" for node in ("sample", "score", "advantage", "update", "eval", "eval_score")
    ]
    assert say("show", "one/last").splitlines()[0] == "one/0003"
    shown = json.loads(say("show", "one/2/update", "--json"))
    assert shown["sources"]["policy"] == "0001/update.policy"
    assert shown["lineage"] == ["0002/update", "0001/update", "0000/update", "model"]
    assert shown["readers"] == ["0003/eval", "0003/sample", "0003/update"]
    text = say("show", "one/2/update")
    assert "  loss.clip: 0.0001" in text
    assert "  policy <- 0001/update.policy" in text
    assert "lineage  0002/update <- 0001/update <- 0000/update <- model" in text


def test_why_says_what_the_runner_would_do(done: Bench, say: Say) -> None:
    def why(place: str, *sets: str) -> dict[str, object]:
        given = [word for text in sets for word in ("--set", text)]
        return json.loads(say("why", f"one/{place}", "--file", str(done.file), "--json", *given))

    before = {path: path.read_bytes() for path in done.run.path.rglob("*") if path.is_file()}
    assert why("2/update")["verdict"] == "reused"
    changed = why("2/update", "update.loss.clip=2e-4")
    assert changed["verdict"] == "changed"
    assert changed["changes"] == [["config", "config.loss.clip", 1e-4, 2e-4]]
    assert changed["stands_on"] == {"0001/update": "changed"}
    follows = why("2/sample", "update.loss.clip=2e-4")
    assert (follows["verdict"], follows["stands_on"]) == ("reused", {"0001/update": "changed"})
    assert why("5/update", "times=6")["verdict"] == "missing"
    other = why("1/sample", "seed=9")
    assert other["changes"] == [["setting", "seed", 3, 9]]
    assert {path: path.read_bytes() for path in done.run.path.rglob("*") if path.is_file()} == before
    # What it says comes true.
    assert "made by another recipe: --on-change decides" in say(
        "why", "one/2/update", "--file", str(done.file), "--set", "update.loss.clip=2e-4"
    )


@pytest.mark.slow
def test_why_of_unfinished_and_adopted_stages(done: Bench, say: Say) -> None:
    stage = done.run.path / "0003" / "sample"
    partial = stage.with_name("sample.partial")
    stage.rename(partial)
    (partial / "samples.d").mkdir()
    (partial / "samples.d" / "shard-00000.json").write_text("{}")
    found = json.loads(say("why", "one/3/sample", "--file", str(done.file), "--json"))
    assert (found["verdict"], found["note"]) == ("unfinished", "1 shards are there and would be kept")
    partial.rename(stage)
    runs = str(done.run.path.parent)
    words = ["rerun", "one", "--from", "after/export", "--as", "two", "--plain", "--file", str(done.file)]
    # The stage itself needs a real model; what was adopted is there before it fails.
    assert main([*words, "--runs", runs]) != 0
    found = json.loads(say("why", "two/2/update", "--file", str(done.file), "--json"))
    assert found["verdict"] == "adopted"


def test_diff(done: Bench, say: Say, tmp_path: Path) -> None:
    other = Bench(done.file, tmp_path / "runs" / "two")
    other.go("update.loss.clip=2e-4", "times=2", metrics=sized({0: 0.5, 1: 0.25}))
    shown = json.loads(say("diff", "one", "two", "--json"))
    assert shown["settings"] == {"times": [4, 2], "update.loss.clip": [1e-4, 2e-4]}
    assert shown["results"]["eval_score.size"] == [{"last": 0.625, "best": 0.7}, {"last": 0.25, "best": 0.5}]
    assert shown["iterations"] == [4, 2]
    rows = [line.split() for line in say("diff", "one", "two").splitlines()]
    assert ["update.loss.clip", "0.0001", "0.0002"] in rows
    assert ["eval_score.size", "0.625", "0.25", "0.7", "0.5"] in rows
    assert "the settings are the same" in say("diff", "one", "one")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "on"], "no run 'on' in .*Did you mean 'one'"),
        (["show", "one/9"], "the run .* has no '9'"),
        (["show", "one/2/updat"], "no stage 'updat'.*Did you mean 'update'"),
        (["show", "one/after/update"], "'update' is not in 'after'; write an iteration/update"),
        (["show", "one/1/eval"], "one/0001/eval has no record: it has not run"),
        (["why", "one/2"], "wants RUN/ITERATION/STAGE"),
        (["diff", "one", "tow"], "no run 'tow'"),
    ],
)
def test_wrong_places(say: Say, words: list[str], message: str) -> None:
    assert re.search(message, say(*words, code=2))


def test_a_damaged_record_is_named_and_the_rest_is_shown(done: Bench, say: Say) -> None:
    record = done.run.path / "0001" / "score" / "record.json"
    record.write_text("{}")
    text = say("show", "one")
    assert f"damaged: the record {record} cannot be read" in text
    assert "one: small, stopped, 3 of 4 iterations" in text
    assert "cannot be read" in say("show", "one/1/score", code=2)


def test_a_copied_run_shows_the_same(done: Bench, say: Say, tmp_path: Path) -> None:
    before = json.loads(say("show", "one", "--json"))
    done.run.path.rename(done.run.path.with_name("other"))
    after = json.loads(say("show", "other", "--json"))
    assert after["loop"] == before["loop"]
    assert after["outputs"] == {"after/export": str(done.run.path.with_name("other") / "after" / "export")}


def test_five_hundred_iterations_are_shown_in_two_seconds(done: Bench, say: Say) -> None:
    run = done.run.path
    text = json.loads((run / "run.json").read_text())
    text["plan"]["times"] = 500
    (run / "run.json").write_text(json.dumps(text))
    for iteration in range(4, 500):
        for node in ("sample", "score", "advantage", "update", "eval", "eval_score"):
            if node.startswith("eval") and iteration % 2 and iteration != 499:
                continue
            old = (run / ("0002" if node.startswith("eval") else "0003") / node / "record.json").read_text()
            folder = run / f"{iteration:04d}" / node
            folder.mkdir(parents=True)
            (folder / "record.json").write_text(re.sub(r'"iteration": \d+', f'"iteration": {iteration}', old))
    for words in (
        ["show", "one"],
        ["diff", "one", "one"],
        ["why", "one/400/update", "--file", str(done.file), "--set", "times=500"],
        ["report", "one"],
    ):
        begun = time.process_time()  # of this process alone: what others do on the machine does not count
        out = say(*words)
        assert time.process_time() - begun < (10 if words[0] == "report" else 2)
        if words[0] == "show":
            assert "500 of 500 iterations" in out
            assert len(out.splitlines()) < 60
            assert re.search(r"\(45\d iterations between are not shown; --json has all\)", out)


def test_metrics_that_nobody_measured(flow_file: Callable[..., Path], tmp_path: Path, say: Say) -> None:
    empty = Bench(flow_file(), tmp_path / "runs" / "empty")
    with pytest.raises(RuntimeError):
        empty.go(metrics=no_metrics, hook=lambda request: _fail())
    shown = json.loads(say("show", "empty", "--json"))
    assert (shown["state"], shown["loop"], shown["best"], shown["stages"]) == ("stopped", {}, None, [])
