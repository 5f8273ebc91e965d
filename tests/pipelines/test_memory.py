"""The memory that `plan` tells, and the run that is refused for it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import memory
from pipelines.cli import main
from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.memory import Footprint, footprint
from pipelines.model_size import count, model_size, tensor_shapes
from pipelines.plan import Plan

EXAMPLE = ["--file", "flows.yaml"]
GIB = 2**30


def compiled(*sets: str) -> Plan:
    return compile_flow(load(Path("flows.yaml"), "shapes", ["resources.device=cpu", *sets]), "shapes")


def of(node: str, *sets: str) -> Footprint:
    plan = compiled(*sets)
    found = footprint(plan, plan.nodes[node])
    assert found is not None
    return found


def told(capsys: pytest.CaptureFixture[str], *sets: str) -> list[str]:
    words = [word for given in ("resources.device=cpu", *sets) for word in ("--set", given)]
    assert main(["plan", "shapes", *EXAMPLE, *words]) == 0
    text = capsys.readouterr().out
    return [line.strip() for line in text[text.index("memory of a rank") :].splitlines()[1:]]


def test_plan_tells_each_node_and_the_largest_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "resources.memory=0.7")
    names = ["encode", "base_train", "base_heldout", "sample", "update", "eval", "final_train", "final_heldout"]
    assert [line.split(":")[0] for line in lines[:-1]] == names
    assert lines[-1] == "a rank has 0.7 GiB (resources.memory)"
    found = of("update", "resources.memory=0.7")
    largest = found.largest(round(0.7 * GIB))
    assert lines[4] == f"update: {found.at(96) / GIB:.3g} GiB with a micro-batch of 96; {largest} would fit"
    assert largest is not None
    assert found.at(largest) <= 0.7 * GIB < found.at(largest + 1)


def test_what_the_numbers_are_made_of() -> None:
    """Of full weights on one CPU rank: weights, old, ema, two moments, start, room for one set, and a gathered copy."""
    plan = compiled()
    model = dict(plan.nodes["update"].config)["model"]
    size = model_size(model)
    assert size is not None
    update, sample = of("update"), of("sample")
    fixed, trained = update.fixed - sample.fixed, size.trained
    rest = sample.fixed - GIB // 2 - 4 * trained * (1 + 2 + 2 + 1 + 1 + 1)
    assert rest == 4 * count(tensor_shapes(Path(model.path) / "vae").values())
    assert fixed == 8 * trained + 288 * 4 * size.latents // 2  # gradients, and what the old policy predicts
    assert of("base_train").fixed == sample.fixed - 4 * trained * 4  # before any update


@pytest.mark.parametrize(
    ("node", "less", "more"),
    [
        ("update", ["model.lora={rank: 4}"], []),
        ("update", ["model.dtype=bfloat16"], []),
        ("update", ["resources.processes=2"], []),
        ("update", ["update.steps=4"], []),
        ("sample", [], ["resources.shard_micro_batches=400"]),
        ("sample", [], ["model.resolution=64"]),
    ],
)
def test_what_needs_less(node: str, less: list[str], more: list[str]) -> None:
    assert of(node, *less).at(8) < of(node, *more).at(8)


def test_json_has_it_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "resources.memory=0.7", "--set", "resources.device=cpu"]
    assert main(["plan", "shapes", *EXAMPLE, "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    assert found["limit"] == {"bytes": round(0.7 * GIB), "said": "resources.memory"}
    update = of("update")
    assert found["nodes"]["update"]["bytes"] == update.at(96)
    assert found["nodes"]["update"]["micro_batch"] == 96
    assert found["nodes"]["encode"]["largest_micro_batch"] is None


def test_a_model_that_is_not_here_is_said_to_be_unknown(
    flow_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "small", "--file", str(flow_file())]) == 0
    assert "not known before the model is: encode, sample, update, eval" in capsys.readouterr().out


def test_a_run_that_cannot_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "shapes", *EXAMPLE, "--plain", "--runs", str(tmp_path), "--set", "resources.device=cpu"]
    assert main([*words, "--as", "a", "--set", "resources.memory=0.7"]) == 2
    largest = of("update").largest(round(0.7 * GIB))
    message = capsys.readouterr().err
    assert "update: a rank needs about " in message
    assert "with resources.micro_batch.update=96, more than resources.memory (0.7 GiB)" in message
    assert f"set resources.micro_batch.update={largest}, the largest that fits" in message
    assert main([*words, "--as", "b", "--set", "resources.memory=0.3"]) == 2
    assert "encode: a rank needs about" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/before"))


def tool(folder: Path, text: str) -> None:
    """An nvidia-smi that says so."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_what_a_gpu_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    plan = compiled("resources.device=cuda")
    try:
        memory._cuda_memory.cache_clear()
        tool(tmp_path, "echo 81559; echo 24564")
        limit = memory.limit_of(plan)
        assert limit is not None
        assert limit.bytes == 24564 * 2**20
        memory._cuda_memory.cache_clear()
        tool(tmp_path, "echo no driver; exit 9")
        assert memory.limit_of(plan) is None
        assert list(memory.as_lines(plan))[-1] == "what a rank has is not known here; resources.memory (GiB) tells it"
    finally:
        memory._cuda_memory.cache_clear()


def test_what_this_machine_has() -> None:
    one, four = memory.limit_of(compiled()), memory.limit_of(compiled("resources.processes=4"))
    assert one is not None
    assert four is not None
    assert 0 < four.bytes < one.bytes
    assert "free memory" in one.said


def test_ranks_that_share_tokens_hold_less_of_a_sample() -> None:
    """All but what is whole on each rank: latents and embeddings."""
    apart, together = (of("update", "resources.processes=2", f"resources.context_parallel={n}") for n in (1, 2))
    assert 0.5 * apart.sample < together.sample < 0.6 * apart.sample
    assert together.fixed > apart.fixed  # predictions of the old policy, for twice the samples
