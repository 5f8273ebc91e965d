"""The preflight: one prompt through the whole flow before anything expensive, and no trace of it afterwards."""

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from pipelines.adopt import begin, start_of
from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.plan import PlanNode
from pipelines.preflight import least
from pipelines.trackers.mirror import Mirror
from pipelines.unroll import Unrolled
from schemas.contracts import CONTRACTS
from schemas.errors import InputError
from schemas.record import StageRequest
from tests.pipelines.bench import Bench

ON = "resources.preflight=true"
OTHER = (
    "      prompts: {path: prompts.txt}\n",
    "      prompts: {path: prompts.txt}\n      few: {stage: prompts, path: few.txt}\n",
)


@pytest.fixture
def other(flow_file: Callable[..., Path], tmp_path: Path) -> Bench:
    """Training draws for a few of the prompts that are encoded."""
    (tmp_path / "few.txt").write_text("two\n")
    sample = "        sample:\n          prompts: prompts.chosen\n", "        sample:\n          prompts: few.chosen\n"
    return Bench(flow_file(OTHER, sample), tmp_path / "runs" / "other")


def parted(requests: Collection[StageRequest]) -> tuple[list[str], list[str]]:
    """Nodes of the preflight, and of the run itself, in order."""
    small = [r.node for r in requests if r.rehearsal]
    return small, [r.node for r in requests if not r.rehearsal]


def test_the_whole_flow_runs_once_on_the_least(bench: Bench) -> None:
    launcher = bench.go("times=2", ON)
    small, own = parted(launcher.requests)
    plan = compile_flow(load(bench.file, "small", ["times=2"]), "small")
    assert sorted(small) == sorted(plan.nodes)
    assert [r.rehearsal for r in launcher.requests] == [True] * len(small) + [False] * len(own)
    by_node = {r.node: r for r in launcher.requests if r.rehearsal}
    assert by_node["prompts"].config["choose"] == 1
    assert by_node["sample"].config["per_prompt"] == 2
    assert by_node["sample"].config["sampler"] == launcher.request("sample[1]").config["sampler"]
    assert (by_node["update"].config["steps"], by_node["update"].iteration) == (1, 0)
    assert Path(by_node["update"].directory).parents[1] == (bench.run.path / "preflight").resolve()
    assert not (bench.run.path / "preflight").exists()
    assert not any("preflight" in str(r.inputs) for r in launcher.requests if not r.rehearsal)
    assert [text.partition(" in ")[0] for text in bench.said if "preflight" in text] == [
        "preflight: one prompt through all 9 stages (resources.preflight=false leaves it out)",
        "preflight passed",
    ]


def test_the_run_is_the_same_without_it(bench: Bench, tmp_path: Path) -> None:
    bench.go("times=2", ON)
    plain = Bench(bench.file, tmp_path / "runs" / "plain")
    plain.go("times=2")
    assert bench.records() == plain.records()
    assert not (plain.run.path / "preflight.json").exists()


def test_what_is_the_same_in_both_is_made_once(other: Bench) -> None:
    launcher = other.go("times=1", ON)
    small, own = parted(launcher.requests)
    assert own[:2] == ["prompts", "encode"]  # all that are encoded stay, since `few` are among them
    assert not {"prompts", "encode"} & set(small)
    assert "few" in small
    assert sorted(own) == sorted(compile_flow(load(other.file, "small"), "small").nodes)
    small_sample = next(r for r in launcher.requests if r.rehearsal and r.node == "sample")
    path = Path(small_sample.inputs["conditioning"]["path"])
    assert path.resolve() == (other.run.path / "before" / "encode" / "embeddings").resolve()


def test_what_breaks_late_breaks_first(bench: Bench) -> None:
    def broken(request: StageRequest) -> None:
        if request.node == "export":
            raise InputError("no room for it")

    with pytest.raises(InputError, match="no room for it"):
        bench.go("times=9", ON, hook=broken)
    assert bench.records() == {}
    told = f"the preflight failed and nothing was trained; what it left is in {bench.run.path / 'preflight'}. If only"
    assert any(text.startswith(told) for text in bench.said)
    assert (bench.run.path / "preflight" / "0000" / "update" / "record.json").is_file()
    small, _ = parted(bench.go("times=9", ON).requests)
    assert len(small) == 9  # from its start: the settings may have changed
    assert not (bench.run.path / "preflight").exists()


def test_it_flies_once_for_the_same_settings(bench: Bench) -> None:
    def stop(request: StageRequest) -> None:
        if not request.rehearsal and request.node == "sample":
            raise InputError("stopped")

    def flown(*sets: str) -> int:
        requests: list[StageRequest] = []

        def hook(request: StageRequest) -> None:
            requests.append(request)
            stop(request)

        with pytest.raises(InputError, match="stopped"):
            bench.go("times=2", ON, *sets, hook=hook)
        return len(parted(requests)[0])

    assert flown() == 9
    assert flown() == 0
    assert flown("sample.per_prompt=6") == 9
    assert flown("sample.per_prompt=6", "times=3") == 0  # a longer loop breaks no more than a short one
    (bench.run.path / "preflight.json").write_text("[")
    assert flown() == 9


def test_a_run_that_has_begun_and_a_rerun_go_without(bench: Bench, tmp_path: Path) -> None:
    bench.go("times=2")
    assert parted(bench.go("times=3", ON).requests)[0] == []
    plan = compile_flow(load(bench.file, "small", ["times=3", ON]), "small")
    again = Bench(bench.file, tmp_path / "runs" / "again")
    begin(plan, bench.run, again.run.path, start_of("0/score", plan), [], only=False)
    assert parted(again.go("times=3", ON).requests)[0] == []


def test_trackers_get_the_section_before_the_loop_once(other: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[list[str], int | None, set[str]]] = []

    def add(self: Mirror, world: Unrolled, nodes: list[PlanNode], iteration: int | None, made: set[str]) -> None:
        if world.run.path == other.run.path:
            parts.append(([node.name for node in nodes], iteration, set(made)))

    monkeypatch.setattr(Mirror, "add", add)
    other.go("times=1", ON)
    assert next((sorted(names), made) for names, iteration, made in parts if iteration is None) == (
        ["encode", "few", "prompts"],
        {"encode", "few", "prompts"},
    )
    assert len(parts) == 3


def test_the_least_of_a_stage_is_a_lawful_one(other: Bench) -> None:
    """A copy with other fields is checked by nobody else."""
    small, same = least(compile_flow(load(other.file, "small"), "small"))
    assert same == ["prompts", "encode"]
    for node in small.nodes.values():
        assert CONTRACTS[node.stage].config.model_validate(node.config.model_dump()) == node.config
