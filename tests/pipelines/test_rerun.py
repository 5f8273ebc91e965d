"""Re-runs: what is adopted, what is made anew, and that the old run stays as it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.adopt import anew, begin, start_of
from pipelines.cli import main
from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.lock import locked
from pipelines.plan import Plan
from pipelines.rundir import Address, RunDirectory
from pipelines.unroll import Unrolled
from schemas.errors import InputError, UserError
from tests.pipelines.bench import Bench, BenchLauncher, sized

BEST = sized({0: 0.5, 2: 0.7, 3: 0.6})


@pytest.fixture
def old(flow_file: Callable[..., Path], tmp_path: Path) -> Bench:
    """A complete run of the small flow: four iterations, evaluated at 0, 2 and 3."""
    bench = Bench(flow_file(), tmp_path / "runs" / "one")
    bench.go(metrics=BEST)
    return bench


def again(old: Bench, start: str, *sets: str, only: bool = False, name: str = "two") -> tuple[Bench, BenchLauncher]:
    """The re-run and what it computed."""
    new = Bench(old.file, old.run.path.with_name(name))
    plan = planned(old, *sets)
    base = RunDirectory.open(old.run.path)
    begin(plan, base, new.run.path, start_of(start, plan), sets, only=only)
    return new, new.go(*sets, metrics=BEST)


def planned(bench: Bench, *sets: str) -> Plan:
    return compile_flow(load(bench.file, "small", sets), "small")


def files(bench: Bench) -> dict[str, bytes]:
    return {str(p.relative_to(bench.run.path)): p.read_bytes() for p in bench.run.path.rglob("*") if p.is_file()}


def labels(bench: Bench, start: str, *, only: bool = False) -> set[str]:
    plan = planned(bench)
    return {a.label for a in anew(Unrolled(plan, bench.run), start_of(start, plan), only)}


CYCLE = ("sample", "score", "advantage", "update")


@pytest.mark.parametrize(
    ("start", "made"),
    [
        ("2/update", {"update[2]", "update[3]", "sample[3]", "score[3]", "advantage[3]", "eval[3]", "eval_score[3]"}),
        ("3/advantage", {"advantage[3]", "update[3]"}),
        ("2/eval_score", {"eval_score[2]", "eval_score[3]", "export"}),
        ("after/export", {"export"}),
    ],
)
def test_what_stands_on_a_stage_is_made_anew(old: Bench, start: str, made: set[str]) -> None:
    want = made | ({"export"} if "eval_score[3]" in made else set())
    assert labels(old, start) == want
    before = files(old)
    new, launcher = again(old, start)
    assert set(launcher.ran) == want
    assert files(old) == before
    assert new.said[-1].startswith("run ")


def test_from_before_the_loop_everything_that_reads_it_follows(old: Bench) -> None:
    everything = {a.label for a in _all(old)}
    assert labels(old, "before/encode") == everything - {"prompts"}
    assert labels(old, "before/prompts") == everything


def _all(bench: Bench) -> list[Address]:
    plan = planned(bench)
    world = Unrolled(plan, bench.run)
    body = [Address("body", n.name, i) for i in range(4) for n in plan.section("body") if world.due(n, i)]
    return [Address("before", "prompts"), Address("before", "encode"), *body, Address("after", "export")]


def test_only_makes_one_stage_in_one_iteration_or_in_all(old: Bench) -> None:
    assert labels(old, "2/score", only=True) == {"score[2]"}
    assert labels(old, "all/score", only=True) == {f"score[{i}]" for i in range(4)}
    assert labels(old, "all/eval_score", only=True) == {"eval_score[0]", "eval_score[2]", "eval_score[3]"}
    new, launcher = again(old, "all/score", "score.rewards.size.prefer=large", only=True)
    assert launcher.ran == [f"score[{i}]" for i in range(4)]
    read = [launcher.request(f"score[{i}]").inputs["samples"]["path"] for i in range(4)]
    assert read == [str(old.run.path / f"000{i}" / "sample" / "samples") for i in range(4)]
    assert {p.parent.name for p in new.run.path.glob("*/*/record.json")} == {"score"}


def test_settings_reach_what_is_made_anew_and_inputs_are_the_old_ones(old: Bench) -> None:
    new, launcher = again(old, "2/update", "update.loss.clip=2e-4")
    assert launcher.request("update[2]").config["loss"]["clip"] == 2e-4
    first = launcher.request("update[2]").inputs
    assert first["policy"]["path"] == str(old.run.path / "0001" / "update" / "policy")
    assert first["trajectory"]["path"] == str(old.run.path / "0002" / "sample" / "trajectory")
    assert launcher.request("sample[3]").inputs["policy"]["path"] == str(new.run.path / "0002" / "update" / "policy")
    assert new.record("0002/update").sources["policy"] == "0001/update.policy"
    base = json.loads((new.run.path / "run.json").read_text())["base"]
    assert (base["run"], base["from"], base["only"]) == ("../one", "2/update", False)
    assert set(base["adopted"]) == {"../one"}
    assert {"before/prompts", "0001/update", "0002/sample", "0002/eval_score"} <= set(base["adopted"]["../one"])
    # Nothing is copied.
    assert not (new.run.path / "0001").exists()


def test_the_same_command_goes_on_and_another_one_is_refused(old: Bench) -> None:
    new, _ = again(old, "2/update", "update.loss.clip=2e-4")
    _, launcher = again(old, "2/update", "update.loss.clip=2e-4")
    assert launcher.ran == []
    assert new.go("update.loss.clip=2e-4", "times=5", metrics=BEST).ran[0] in {f"{n}[4]" for n in ("sample", "eval")}
    with pytest.raises(UserError, match=r"is there already, a re-run of \.\./one from 2/update; choose another name"):
        again(old, "3/update")
    with pytest.raises(UserError, match="is there already, a run of its own"):
        again(old, "3/update", name="one")


def test_a_rerun_of_a_rerun_reads_from_both(old: Bench) -> None:
    again(old, "2/update")
    two = Bench(old.file, old.run.path.with_name("two"))
    three, launcher = again(two, "3/advantage", name="three")
    assert launcher.ran == ["advantage[3]", "update[3]"]
    base = json.loads((three.run.path / "run.json").read_text())["base"]
    assert set(base["adopted"]) == {"../one", "../two"}
    assert launcher.request("update[3]").inputs["trajectory"]["path"] == str(
        two.run.path / "0003" / "sample" / "trajectory"
    )


def test_updates_on_samples_of_another_policy_say_so(old: Bench) -> None:
    new, _ = again(old, "all/update", "update.loss.clip=2e-4", only=True)
    assert new.record("0000/update").why == ""
    assert new.record("0001/update").why.startswith("off policy: its samples came from another policy")


def test_adopted_records_are_verified(old: Bench) -> None:
    plan = planned(old)
    new = Bench(old.file, old.run.path.with_name("two"))
    begin(plan, RunDirectory.open(old.run.path), new.run.path, start_of("3/update", plan), (), only=False)
    record = old.run.path / "0002" / "sample" / "record.json"
    text = record.read_text()
    record.write_text(text.replace('"node": "sample"', '"node":  "sample"'))
    with pytest.raises(InputError, match=r"sample\[2\] was adopted from .*, and its record is no longer the same"):
        new.go(metrics=BEST)
    record.unlink()
    with pytest.raises(InputError, match=r"sample\[2\] was adopted from .*0002/sample, which is gone"):
        new.go(metrics=BEST)
    record.write_text(text)
    assert new.go(metrics=BEST).ran == ["update[3]"]


def test_both_runs_may_move_together(old: Bench, tmp_path: Path) -> None:
    again(old, "3/update")
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = Bench(old.file, tmp_path / "moved" / "two")
    assert moved.go(metrics=BEST).ran == []


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("update", "wants ITERATION/STAGE"),
        ("2/updat", "no stage 'updat'.*Did you mean 'update'"),
        ("9/update", "the last iteration is 3"),
        ("1/eval_score", "does not run in that iteration"),
        ("2/encode", "write before/encode"),
        ("before/update", "write an iteration or 'all' before it"),
    ],
)
def test_wrong_starts(old: Bench, start: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        again(old, start, only=True)
    assert not old.run.path.with_name("two").exists()


def test_a_setting_that_would_change_nothing_is_refused(old: Bench) -> None:
    with pytest.raises(UserError, match=r"--set sample.per_prompt=8: 'sample' is adopted as it was made"):
        again(old, "3/update", "sample.per_prompt=8")


def test_removing_a_run_that_another_needs_is_refused(old: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    again(old, "3/update")
    runs = str(old.run.path.parent)
    assert main(["remove", "one", "--runs", runs]) == 2
    assert "is needed by two, which adopted stages of it" in capsys.readouterr().err
    with locked(old.run.path.with_name("two"), lambda _: None):
        assert main(["remove", "two", "--runs", runs]) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert main(["remove", "two", "--runs", runs]) == 0
    assert main(["remove", "one", "--runs", runs]) == 0
    assert list(old.run.path.parent.iterdir()) == []
    assert main(["remove", "one", "--runs", runs]) == 2
    assert "no run 'one'" in capsys.readouterr().err


def test_a_run_tells_only_what_was_asked_for(old: Bench) -> None:
    new, _ = again(old, "2/score", only=True)
    assert [line for line in new.said if "export" in line] == []
    new, _ = again(old, "3/update", name="three")
    # Nothing of `after` stands on the last update here, and what was adopted is named where it lies.
    assert f"export.folder  {old.run.path / 'after' / 'export' / 'folder'}" in new.said
