"""The runner on real plans and a launcher that writes real files; what stages compute is tested elsewhere."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import Collapsed, InputError, StaleRecord, UserError
from schemas.record import Decision, StageRequest
from tests.pipelines.bench import Bench, BenchLauncher, sized


def test_every_node_runs_when_it_is_due_and_after_what_it_reads(bench: Bench) -> None:
    ran = bench.go("times=4").ran
    evaluated = [int(name[5:-1]) for name in ran if name.startswith("eval[")]
    assert evaluated == [0, 2, 3]  # before the first update, every second, and last
    assert sorted(ran) == sorted(set(ran))
    for iteration in range(4):
        order = [ran.index(f"{node}[{iteration}]") for node in ("sample", "score", "advantage", "update")]
        assert order == sorted(order)
    assert ran.index("update[0]") < ran.index("sample[1]")
    assert ran[-1] == "export"


def test_carried_value_starts_at_the_base_and_then_comes_from_the_iteration_before(bench: Bench) -> None:
    launcher = bench.go("times=2")
    assert launcher.request("sample[0]").inputs["policy"] is None
    policy = launcher.request("sample[1]").inputs["policy"]
    assert policy["path"] == str(bench.run.path / "0000/update/policy")
    assert policy["digest"] == bench.record("0000/update").outputs["policy"]["digest"]
    assert bench.record("0000/sample").sources["policy"] == "model"
    assert bench.record("0001/sample").sources["policy"] == "0000/update.policy"


def test_best_is_the_policy_that_was_measured_and_ties_go_to_the_earliest(bench: Bench) -> None:
    bench.go("times=7", metrics=sized({0: 0.3, 2: 0.5, 4: 0.5, 6: 0.45}))
    assert bench.record("after/export").sources["policy"] == "0001/update.policy"


def test_best_may_be_the_base(bench: Bench) -> None:
    launcher = bench.go("times=3", metrics=sized({0: 0.9, 2: 0.85}))
    assert launcher.request("export").inputs == {"policy": None}


def test_same_command_again_computes_nothing(bench: Bench) -> None:
    bench.go("times=3")
    before = bench.records()
    assert bench.go("times=3").ran == []
    assert bench.records() == before
    assert bench.said[0] == "reused 19 finished stages (before, iterations 0 to 2, after)"


@pytest.mark.parametrize("broken", ["sample[1]", "update[0]", "score[1]", "export"])
def test_a_failed_run_goes_on_and_ends_as_an_unbroken_one(
    bench: Bench, broken: str, flow_file: Callable[..., Path], tmp_path: Path
) -> None:
    def fail(request: StageRequest) -> None:
        if broken in (f"{request.node}[{request.iteration}]", request.node):
            raise InputError("broken")

    with pytest.raises(InputError, match="broken"):
        bench.go("times=2", hook=fail)
    done = set(bench.records())
    again = bench.go("times=2")
    assert not {r.directory.removesuffix(".partial") for r in again.requests} & {str(bench.run.path / d) for d in done}
    whole = Bench(flow_file(), tmp_path / "runs" / "two")
    whole.go("times=2")
    assert bench.records() == whole.records()


def test_raising_times_extends_a_finished_run(bench: Bench, flow_file: Callable[..., Path], tmp_path: Path) -> None:
    values = {0: 0.1, 2: 0.3, 3: 0.9, 4: 0.5, 5: 0.4}
    bench.go("times=4", metrics=sized(values), on_change="stop")
    assert bench.record("after/export").sources["policy"] == "0002/update.policy"
    ran = bench.go("times=6", "stop.collapse.falls=1", metrics=sized(values)).ran
    assert [name for name in ran if "[" in name and int(name.split("[")[1][:-1]) < 4] == []
    # Iteration 3 was evaluated as the last one only; now it is not due, and the best is another.
    assert bench.record("after/export").sources["policy"] == "0003/update.policy"
    assert (bench.run.path / "after/export.stale-1").is_dir()
    assert any("export: made again from other policy" in line for line in bench.said)
    whole = Bench(flow_file(), tmp_path / "runs" / "two")
    whole.go("times=6", "stop.collapse.falls=1", metrics=sized(values))
    extra = {"0003/eval", "0003/eval_score"}
    assert {k: v for k, v in bench.records().items() if k not in extra} == whole.records()


def test_changed_recipe_stops_before_anything_is_computed_from_it(bench: Bench) -> None:
    bench.go("times=2")
    before = bench.records()
    with pytest.raises(StaleRecord, match=r"update\[0\].*\n.*config\.ema\.decay: 0\.9 -> 0\.8"):
        bench.go("times=2", "update.ema.decay=0.8")
    assert bench.records() == before


def test_rerun_makes_again_what_changed_and_what_stands_on_it(bench: Bench) -> None:
    bench.go("times=2")
    ran = bench.go("times=2", "update.ema.decay=0.8", on_change="rerun").ran
    assert ran[0] == "update[0]"
    assert not {"sample[0]", "score[0]", "advantage[0]", "eval[0]", "prompts", "encode"} & set(ran)
    assert {"sample[1]", "score[1]", "update[1]", "eval[1]"} <= set(ran)
    assert (bench.run.path / "0000/update.stale-1/record.json").is_file()
    assert bench.go("times=2", "update.ema.decay=0.8").ran == []


def test_keep_uses_the_old_results_and_says_so(bench: Bench) -> None:
    bench.go("times=2")
    assert bench.go("times=2", "update.ema.decay=0.8", on_change="keep").ran == []
    assert any("update[0]: kept" in line and "config.ema.decay" in line for line in bench.said)


def test_resources_never_make_a_stage_stale(bench: Bench) -> None:
    bench.go("times=2")
    assert bench.go("times=2", "resources.processes=2", "resources.micro_batch={sample: 5}").ran == []


def test_a_guard_ends_the_loop_and_after_reads_the_best(bench: Bench) -> None:
    values = sized({0: 0.2, 2: 0.5, 4: 0.35, 6: 0.9})
    launcher = bench.go("times=9", metrics=values)
    assert "update[4]" in launcher.ran
    assert "sample[5]" not in launcher.ran
    assert bench.record("after/export").sources["policy"] == "0001/update.policy"
    decision = Decision.model_validate_json((bench.run.path / "0004/decision.json").read_bytes())
    assert (decision.value, decision.best, decision.best_iteration) == (0.35, 0.5, 2)
    assert any("guard 'collapse': eval_score.size is 0.35 in iteration 4" in line for line in bench.said)
    assert bench.go("times=9", metrics=values).ran == []
    # A wider margin takes the loop on.
    assert "sample[5]" in bench.go("times=9", "stop.collapse.falls=0.5", metrics=values).ran
    assert not (bench.run.path / "0004/decision.json").exists()


def test_a_guard_may_fail_the_run(bench: Bench) -> None:
    with pytest.raises(Collapsed, match=r"0\.35 in iteration 4.*0\.5 in iteration 2"):
        bench.go("times=9", "stop.collapse.action=fail", metrics=sized({0: 0.2, 2: 0.5, 4: 0.35}))
    assert not (bench.run.path / "after").exists()


def test_when_skips_a_node_and_what_reads_it_and_says_why(bench: Bench) -> None:
    def metrics(request: StageRequest) -> dict[str, float]:
        return {"size": 0.0 if request.iteration == 1 else 1.0} if request.stage == "score" else {}

    launcher = bench.go("times=3", "advantage.when=score.size", metrics=metrics)
    assert "advantage[1]" not in launcher.ran
    assert "update[1]" not in launcher.ran
    skipped = bench.record("0001/advantage")
    assert (skipped.status, skipped.why) == ("skipped", "size of score[1] is 0")
    assert bench.record("0001/update").why == "advantage[1] was skipped"
    # The policy of iteration 0 goes on.
    assert bench.record("0002/sample").sources["policy"] == "0000/update.policy"
    assert bench.go("times=3", "advantage.when=score.size", metrics=metrics).ran == []


def test_skipped_node_runs_when_it_is_wanted_again(bench: Bench) -> None:
    def zero(request: StageRequest) -> dict[str, float]:
        return {"size": 0.0} if request.stage == "score" else {}

    bench.go("times=1", "advantage.when=score.size", metrics=zero)
    assert {"advantage[0]", "update[0]"} <= set(bench.go("times=1", metrics=zero).ran)


def test_reader_of_an_every_node_says_on_which_record_it_stands(flow_file: Callable[..., Path], tmp_path: Path) -> None:
    file = flow_file(("eval_score: {stage: score, every: 2,", "eval_score: {stage: score,"))
    bench = Bench(file, tmp_path / "runs" / "one")
    bench.go("times=4")
    record = bench.record("0001/eval_score")
    assert record.sources["samples"] == "0000/eval.samples"
    assert "0000/eval" in record.why
    # eval[3] ran as the last one; in a longer loop its readers stand on eval[2], without a question.
    assert bench.record("0003/eval_score").sources["samples"] == "0003/eval.samples"
    bench.go("times=5")
    assert bench.record("0003/eval_score").sources["samples"] == "0002/eval.samples"


def test_what_stands_on_a_stage_that_was_made_again_follows_it(flow_file: Callable[..., Path], tmp_path: Path) -> None:
    """A node that trains reads one with `every`, which runs in the last iteration too: in a longer loop it did not."""
    some = "        some: {stage: prompts, every: 2, path: prompts.txt, choose: 2}\n        sample:\n"
    file = flow_file(
        ("        sample:\n          prompts: prompts.chosen\n", some + "          prompts: some.chosen\n")
    )
    bench = Bench(file, tmp_path / "runs" / "one")
    bench.go("times=2")
    assert bench.record("0001/sample").sources["prompts"] == "0001/some.chosen"
    with pytest.raises(InputError):  # killed amid the chain
        bench.go("times=4", hook=lambda request: _fail() if request.node == "advantage" else None)
    ran = bench.go("times=4").ran
    assert bench.record("0001/sample").sources["prompts"] == "0000/some.chosen"
    assert not {"some[0]", "sample[0]", "update[0]", "sample[1]", "score[1]"} & set(ran)
    assert {"advantage[1]", "update[1]", "sample[2]", "update[3]"} <= set(ran)
    fresh = Bench(file, tmp_path / "runs" / "fresh")
    fresh.go("times=4")
    only = {"0001/some", "0001/eval", "0001/eval_score"}  # of the shorter loop's end
    assert {k: v for k, v in bench.records().items() if k not in only} == fresh.records()


def _fail() -> None:
    raise InputError("stopped")


def test_branches_run_side_by_side(bench: Bench) -> None:
    together = threading.Barrier(2, timeout=20)

    def meet(request: StageRequest) -> None:
        if request.node in ("sample", "eval") and request.iteration == 0:
            together.wait()

    bench.go("times=1", hook=meet)


def test_after_a_failure_running_branches_are_committed_and_nothing_new_starts(bench: Bench) -> None:
    sampling, failed = threading.Event(), threading.Event()

    def hook(request: StageRequest) -> None:
        if request.node == "sample":
            sampling.set()
            assert failed.wait(20)
        if request.node == "eval":
            assert sampling.wait(20)
            threading.Timer(0.3, failed.set).start()
            raise InputError("broken")

    launcher = BenchLauncher(hook=hook)
    with pytest.raises(InputError):
        bench.launch(launcher, ["times=1"])
    assert launcher.closed
    assert "0000/sample" in bench.records()
    assert "0000/score" not in bench.records()


def test_partial_work_of_another_recipe_is_not_taken_up(bench: Bench) -> None:
    def leave_a_shard(request: StageRequest) -> None:
        if request.node == "sample":
            (Path(request.directory) / "shard").write_text("of per_prompt 4")
            raise InputError("stopped")

    found: list[bool] = []

    def look(request: StageRequest) -> None:
        if request.node == "sample":
            found.append((Path(request.directory) / "shard").exists())

    with pytest.raises(InputError):
        bench.go("times=1", hook=leave_a_shard)
    bench.go("times=1", "sample.per_prompt=5", hook=look)
    assert found == [False]


def test_a_directory_belongs_to_one_flow(bench: Bench) -> None:
    bench.go("times=1")
    facts = bench.run.read()
    bench.run.write({**facts, "flow": "other"})
    with pytest.raises(UserError, match=r"'other', not 'small'.*--as"):
        bench.go("times=1")


def test_run_json_has_plan_seed_and_digests(bench: Bench) -> None:
    bench.go("times=1")
    facts = bench.run.read()
    assert (facts["flow"], facts["seed"]) == ("small", 3)
    assert {Path(path).name for path in facts["assets"]} == {"model", "prompts.txt"}
    assert facts["plan"]["nodes"]
