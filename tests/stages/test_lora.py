"""Adapters: how they begin, what switching them off gives, and which of their inputs dropout hides."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from schemas.artifacts import TrajectoryTable
from stages.engine.dropout import AdapterDropout, dropout
from stages.engine.lora import is_lora
from stages.engine.policy import Engine, Form
from stages.engine.weights import local
from stages.store import tensors
from tests.stages.chain import ODE, Chain, distance, first_gradient, fixed_velocity, on_ranks, outcome
from tests.stages.test_engine import given

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"init": "kaiming"},
    "gaussian": {"init": "gaussian"},
    "dora": {"dora": True},
    "dora everywhere": {"dora": True, "targets": ["attn.to_q", "ff.net.2", "proj_out", "norm1.linear"]},
}
SFT = {"loss": {"kind": "sft"}, "kl": {"weight": 0.1}}


def chain(folder: Path, directory: Path, **settings: Any) -> Chain:
    return Chain(str(folder), str(directory), **settings)


def trained(engine: Engine) -> None:
    """Moves every adapter far from where it was."""
    generator = torch.Generator().manual_seed(5)
    moved = {name: v + 0.3 * torch.randn(v.shape, generator=generator) for name, v in engine.weights.raw().items()}
    engine.weights.put(moved)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_the_model_without_adapters(sd3_folder: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    bare = chain(sd3_folder, tmp_path / "bare", dtype=dtype).engine()
    without = Engine(bare.config.model_copy(update={"lora": None}), None, "cpu", Form())
    plain = fixed_velocity(without)
    engine = chain(sd3_folder, tmp_path / "with", dtype=dtype, adapter=KINDS[kind]).engine()
    assert torch.equal(fixed_velocity(engine), plain)
    assert {value.dtype for value in engine.weights.parameters.values()} == {torch.float32}
    assert all(map(is_lora, engine.weights.parameters))
    trained(engine)
    far = fixed_velocity(engine)
    assert (far - plain).abs().max() > 0.01
    assert torch.equal(fixed_velocity(engine, "base"), plain)
    assert torch.equal(fixed_velocity(engine), far)


def test_how_lora_a_is_drawn(sd3_folder: Path, tmp_path: Path) -> None:
    drawn = {}
    for init in ("kaiming", "gaussian"):
        engine = chain(sd3_folder, tmp_path / init, lora=32, adapter={"init": init}).engine()
        again = chain(sd3_folder, tmp_path / f"{init} again", lora=32, adapter={"init": init}).engine()
        drawn[init] = engine.weights.raw()
        assert all(torch.equal(value, again.weights.raw()[name]) for name, value in drawn[init].items())
    first = {init: torch.cat([v.flatten() for n, v in raw.items() if ".lora_A." in n]) for init, raw in drawn.items()}
    assert first["kaiming"].abs().max() <= 1 / 16**0.5
    assert float(first["kaiming"].std()) == pytest.approx(1 / (3 * 16) ** 0.5, rel=0.02)
    assert float(first["gaussian"].std()) == pytest.approx(1 / 32, rel=0.02)
    assert first["gaussian"].abs().max() > 3 / 32


def test_dropout_of_known_numbers() -> None:
    part, inputs = AdapterDropout(0.25, "attn.to_q"), torch.ones(3, 50, 200)
    assert part(inputs) is inputs
    part.seeds = (1, 2, 1)
    out = part(inputs)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(out.mean()) == pytest.approx(1, abs=0.01)
    assert torch.equal(out[0], out[2])
    assert not torch.equal(out[0], out[1])
    part.seeds = (2,)
    assert torch.equal(part(inputs[:1])[0], out[1])
    other = AdapterDropout(0.25, "attn.to_k")
    other.seeds = (2,)
    assert not torch.equal(other(inputs[:1])[0], out[1])


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_acts_on_adapters_alone_and_only_inside(sd3_folder: Path, tmp_path: Path, dora: bool) -> None:
    made = chain(sd3_folder, tmp_path, adapter={"dropout": 0.5, "dora": dora})
    engine = made.engine()
    sure = chain(sd3_folder, tmp_path / "sure", adapter={"dora": dora}).engine()
    others = [m for m in engine.module.modules() if isinstance(m, nn.Dropout)]
    trained(engine)
    trained(sure)
    expected, seeds = fixed_velocity(sure), list(range(6))
    assert torch.equal(fixed_velocity(engine), expected)
    with dropout(engine.module, seeds):
        inside = fixed_velocity(engine)
        assert torch.equal(fixed_velocity(engine), inside)
        assert not any(module.training for module in others)
        assert torch.equal(fixed_velocity(engine, "base"), fixed_velocity(sure, "base"))
    assert (inside - expected).abs().max() > 1e-3
    assert torch.equal(fixed_velocity(engine), expected)
    assert not any(module.training for module in engine.module.modules() if isinstance(module, LoraLayer))


def test_a_forward_that_is_computed_again_sees_the_same_masks(sd3_folder: Path, tmp_path: Path) -> None:
    gradients = []
    for again in (False, True):
        engine = chain(sd3_folder, tmp_path / str(again), adapter={"dropout": 0.5}).engine()
        trained(engine)
        module: Any = engine.module
        if again:
            module.enable_gradient_checkpointing()
        with dropout(module, range(6)), torch.enable_grad():
            velocity(engine).square().sum().backward()
        gradients.append({name: local(p.grad) for name, p in engine.weights.parameters.items() if p.grad is not None})
    assert distance(gradients[1], gradients[0]) < 1e-6


def velocity(engine: Engine) -> torch.Tensor:
    """`fixed_velocity` switches gradients off."""
    return engine.velocity(torch.ones(6, 4, 8, 8), torch.linspace(100, 900, 6), given(6), 1.0)


def drawn(sd3_folder: Path, tmp_path: Path, **settings: Any) -> tuple[Chain, TrajectoryTable]:
    made = chain(sd3_folder, tmp_path / "drawn", sampler=ODE, **settings)
    return made, made.sample(made.context("sample", 0)).trajectory


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_dropout_does_not_know_ranks_and_micro_batches(sd3_folder: Path, tmp_path: Path, dora: bool) -> None:
    settings: dict[str, Any] = {"sampler": ODE, "update": SFT, "adapter": {"dropout": 0.5, "dora": dora}}
    made, trajectory = drawn(sd3_folder, tmp_path)
    made_elsewhere = {
        "trajectory": trajectory.model_dump(),
        "conditioning": made.conditioning(made.prompts()).model_dump(),
    }
    ways = {
        "one": chain(sd3_folder, tmp_path / "one", micro_batch=1, given=made_elsewhere, **settings),
        "three": chain(sd3_folder, tmp_path / "three", micro_batch=3, given=made_elsewhere, **settings),
    }
    found = {name: way.run({})[0] for name, way in ways.items()}
    ranks = chain(sd3_folder, tmp_path / "ranks", micro_batch=3, given=made_elsewhere, **settings)
    plain = replace(ranks, directory=str(tmp_path / "plain"), adapter={"dropout": 0.5})
    on_ranks([ranks, plain], 2)
    two = outcome(ranks, 0)
    assert not isinstance(two, str), two
    found["ranks"] = two[0]
    sure = replace(ways["three"], directory=str(tmp_path / "sure"), adapter={"dora": dora}).run({})[0]
    gradients = {name: first_gradient(out.policy) for name, out in found.items()}
    assert distance(gradients["one"], gradients["three"]) < 1e-5
    assert distance(gradients["ranks"], gradients["three"]) < 1e-5
    assert distance(first_gradient(sure.policy), gradients["three"]) > 0.1
    for rank in range(2):
        base, bare = (tensors.load(Path(c.directory) / f"rank-{rank}.base")["base"] for c in (ranks, plain))
        assert torch.equal(base, bare)
