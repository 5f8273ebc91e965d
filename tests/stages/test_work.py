"""FLOPs against closed forms, without a change of a bit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stages.engine.policy import Engine
from stages.engine.work import peak_flops
from stages.models import Conditioning
from tests.stages.chain import ODE, Chain

PARTS = ("load", "data", "forward", "denoise", "decode", "write", "idle", "other")


def inputs(engine: Engine, samples: int) -> tuple[torch.Tensor, torch.Tensor, Conditioning]:
    given = Conditioning({"embeds": torch.randn(samples, 16, 32), "pooled": torch.randn(samples, 32)})
    return torch.randn(samples, *engine.adapter.latent_shape()), torch.full((samples,), 500.0), given


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("again", [False, True])
def test_backward_costs_two_products_for_each_of_forward_but_none_for_frozen_weights(
    sd3_folder: Path, tmp_path: Path, lora: int | None, again: bool
) -> None:
    engine = Chain(str(sd3_folder), str(tmp_path), lora=lora, resources={"activation_checkpointing": again}).engine()
    for samples in (1, 3):
        before = engine.flops.flops
        velocity = engine.velocity(*inputs(engine, samples), 1.0)
        forward = engine.flops.flops - before
        engine.backward(velocity.sum(), samples)
        backward = engine.flops.flops - before - forward
        assert forward == samples * _flops_of_one(engine)
        blocks = backward - (2 if lora is None else 1) * forward
        # Trained weights need a product for themselves and one for what came before them, frozen ones only the latter.
        assert (0.5 * forward < blocks < 1.1 * forward) if again else (-0.1 * forward < blocks < 0.2 * forward)


def test_calls_that_do_not_count_cost_nothing(sd3_folder: Path, tmp_path: Path) -> None:
    engine = Chain(str(sd3_folder), str(tmp_path)).engine()
    before = engine.flops.flops, engine.flops.tokens
    with engine.flops.counted(False):
        engine.backward(engine.velocity(*inputs(engine, 2), 1.0).sum(), 2)
    assert (engine.flops.flops, engine.flops.tokens) == before
    with torch.no_grad():
        engine.velocity(*inputs(engine, 2), 1.0)
    assert engine.flops.tokens == before[1] + 2 * (16 + 16)  # of latents and of text


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_stage_tells_its_speed(sd3_folder: Path, tmp_path: Path, guidance: float) -> None:
    made = Chain(str(sd3_folder), str(tmp_path), sampler={**ODE, "guidance_scale": guidance})
    ctx = made.context("sample", 0)
    made.sample(ctx)
    parts = ctx.clock.parts()
    assert {f"time/{name}" for name in PARTS} == parts.keys()
    assert min(parts.values()) >= 0
    assert ctx.measured["images_per_second"] > 0
    branches = 2 if guidance > 1 else 1
    assert ctx.measured["flops"] == 12 * 3 * branches * _flops_of_one(made.engine())
    assert 0 < ctx.measured["mfu"] < 1
    again = made.context("sample", 0)
    made.sample(again)  # all shards are there
    assert again.measured["flops"] == again.measured["images_per_second"] == 0


def test_the_peak_of_this_machine_is_measured() -> None:
    assert 1e9 < peak_flops("cpu", torch.float32) < 1e15


def _flops_of_one(engine: Engine) -> float:
    """FLOPs of one sample's forward, from the layers' shapes."""
    found, told = [], inputs(engine, 1)
    with torch.no_grad():
        engine.velocity(*told, 1.0)  # its twin has been counted from here on

    def layer(module: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            assert isinstance(module.kernel_size, tuple)
            found.append(2 * out.numel() * module.in_channels * module.kernel_size[0] * module.kernel_size[1])
        elif isinstance(module, nn.Linear):
            found.append(2 * out.numel() * module.in_features)

    hooks = [m.register_forward_hook(layer) for m in engine.module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with _attention(found), torch.no_grad():
        engine.velocity(*told, 1.0)
    for hook in hooks:
        hook.remove()
    return sum(found)


@contextlib.contextmanager
def _attention(found: list[int]) -> Iterator[None]:
    whole = nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        batch, heads, tokens, width = query.shape
        found.append(4 * batch * heads * tokens * key.shape[2] * width)
        return whole(query, key, value, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", counted)
        yield
