"""Retention: what goes, what stays, and that no result changes."""

import json
import re
from pathlib import Path

import pytest

from pipelines.adopt import begin, start_of
from pipelines.cli import main
from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.rundir import RunDirectory
from schemas.errors import InputError
from tests.pipelines.bench import Bench, sized

TIMES = "times=10"
KEEP = "keep={last: 2, every: 4}"
BEST = sized({0: 0.5, 2: 0.7, 4: 0.68, 6: 0.66, 8: 0.65, 9: 0.64})


def there(bench: Bench, stage: str, output: str) -> list[int]:
    """Iterations in which an output of a stage is on disk."""
    return sorted(int(p.parts[-3]) for p in bench.run.path.glob(f"*/{stage}/{output}"))


def test_a_run_with_keep_ends_as_one_without(bench: Bench, tmp_path: Path) -> None:
    bench.go(TIMES, KEEP, metrics=BEST)
    whole = Bench(bench.file, tmp_path / "runs" / "whole")
    whole.go(TIMES, metrics=BEST)
    assert bench.records() == whole.records()
    # 8 and 9 are the last, 0, 4 and 8 every fourth.
    assert there(bench, "sample", "trajectory") == [0, 4, 8, 9]
    assert there(bench, "sample", "samples") == [0, 4, 8, 9]
    # Policies: also 3 and 7, which 4 and 8 began from, and 1, which scored best in iteration 2.
    assert there(bench, "update", "policy") == [0, 1, 3, 4, 7, 8, 9]
    assert there(bench, "score", "rewards") == list(range(10))
    gone = json.loads((bench.run.path / "0002" / "sample" / "pruned.json").read_text())
    assert set(gone) == {"samples", "trajectory"}
    assert all(size > 0 for size in gone.values())


def test_going_on_needs_nothing_that_went(bench: Bench) -> None:
    bench.go(TIMES, KEEP, metrics=BEST)
    assert bench.go(TIMES, KEEP, metrics=BEST).ran == []
    # The longer loop has the same best policy, so that its export stands.
    more = bench.go("times=12", KEEP, metrics=sized({10: 0.69, 11: 0.68}))
    assert {request.iteration for request in more.requests} == {10, 11}


def test_the_best_of_a_longer_loop_is_still_there(bench: Bench) -> None:
    bench.go(TIMES, "keep={last: 1}", metrics=sized({0: 0.5, 2: 0.6, 4: 0.7, 6: 0.65, 8: 0.65, 9: 0.9}))
    assert there(bench, "update", "policy") == [3, 8, 9]
    more = bench.go("times=11", "keep={last: 1}", metrics=sized({10: 0.65}))
    assert more.request("export").inputs["policy"]["path"].endswith("0003/update/policy")


def test_what_stands_on_a_pruned_output_says_so(bench: Bench) -> None:
    bench.go(TIMES, KEEP, metrics=BEST)
    words = r"eval_score\[2\]: its input 'samples', 0002/eval.samples at .*, was pruned \(keep\)"
    with pytest.raises(InputError, match=words):
        bench.go(TIMES, KEEP, "eval_score.rewards.size.prefer=large", metrics=BEST, on_change="rerun")
    assert (bench.run.path / "0002" / "eval_score" / "record.json").is_file()


def test_what_a_rerun_adopted_is_never_pruned(bench: Bench) -> None:
    bench.go("times=4", metrics=BEST)
    plan = compile_flow(load(bench.file, "small", ["times=4"]), "small")
    new = bench.run.path.with_name("two")
    begin(plan, RunDirectory.open(bench.run.path), new, start_of("2/update", plan), (), only=False)
    bench.go(TIMES, "keep={last: 1}", metrics=BEST)
    assert there(bench, "sample", "trajectory") == [0, 1, 2, 9]
    assert there(bench, "update", "policy") == [0, 1, 8, 9]  # 8 is what 9 began from and measured
    again = Bench(bench.file, new)
    assert again.go("times=4", "keep={last: 1}", metrics=BEST).ran[0] == "update[2]"
    assert there(bench, "sample", "trajectory") == [0, 1, 2, 9]


def test_the_command_tells_and_frees(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.go(TIMES, metrics=BEST)
    words = ["prune", "one", "--runs", str(bench.run.path.parent), "--file", str(bench.file)]
    assert main(words) == 2
    assert "has no `keep`; say what to keep with --last N and --every M" in capsys.readouterr().err
    words += ["--last", "2", "--every", "4"]
    before = {path for path in bench.run.path.rglob("*") if path.is_file()}
    assert main([*words, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "0002/sample.trajectory  " in told
    assert {path for path in bench.run.path.rglob("*") if path.is_file()} == before
    assert main(words) == 0
    freed = capsys.readouterr().out
    assert freed.splitlines()[:-1] == told.splitlines()[:-1]
    assert re.fullmatch(r"freed [\d.]+ k?B in \d+ outputs", freed.splitlines()[-1])
    assert there(bench, "update", "policy") == [0, 1, 3, 4, 7, 8, 9]
    assert main(words) == 0
    assert capsys.readouterr().out == "freed 0 B in 0 outputs\n"
    adopter = bench.run.path.with_name("again")
    adopter.mkdir()
    (adopter / "run.json").write_text(
        json.dumps({"flow": "small", "base": {"adopted": {"../one": {"0001/update": ""}}}})
    )
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("kept beside: what again adopted\n")
    assert main(["show", "one/2/sample", "--runs", str(bench.run.path.parent)]) == 0
    assert ", pruned" in capsys.readouterr().out


def test_what_a_stopped_pruning_left_goes_with_the_next(bench: Bench) -> None:
    bench.go(TIMES, KEEP, metrics=BEST)
    left = bench.run.path / "0002" / "sample" / "trajectory"
    left.mkdir()
    (left / "shard-00001.arrow").write_text("x")
    bench.go("times=11", KEEP, metrics=BEST)
    assert not left.exists()
