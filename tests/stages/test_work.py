"""FLOPs against closed forms, without a change of a bit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stages.engine.policy import Engine
from stages.engine.work import FlopMeter, peak_flops
from stages.models import Conditioning
from tests.stages.chain import ODE, Chain


def test_products_and_attention_cost_what_the_formulas_say() -> None:
    meter, batch, tokens, heads, width = FlopMeter(), 3, 5, 2, 8
    weight = torch.randn(width, width, requires_grad=True)
    values = torch.randn(batch, heads, tokens, width, requires_grad=True)
    product, attention = 2 * heads * tokens * width * width, 2 * (2 * heads * tokens * tokens * width)
    for times in (1, 2):
        with meter.forward("form", batch):
            out = nn.functional.scaled_dot_product_attention(values @ weight, values, values)
        with meter.backward(batch):
            out.sum().backward()
        # Backward is two products for each of forward's, and for attention one more: its weights are made again.
        assert meter.total == times * batch * (3 * product + 3.5 * attention)


def test_calls_that_do_not_count_cost_nothing() -> None:
    meter = FlopMeter()
    for counts in (False, True, False):
        with meter.counted(counts), meter.forward("form", 2):
            torch.mm(torch.ones(2, 4), torch.ones(4, 4))
    assert meter.total == 2 * 2 * 4 * 4


def test_counting_changes_no_bit(sd3_folder: Path, tmp_path: Path) -> None:
    engine = Chain(str(sd3_folder), str(tmp_path), lora=None).engine()
    engine.flops = FlopMeter()
    latents = torch.randn(2, *engine.adapter.latent_shape())
    given = Conditioning({"embeds": torch.randn(2, 16, 32), "pooled": torch.randn(2, 32)})
    velocities, gradients = [], []
    for _ in ("counted", "not"):
        velocity = engine.velocity(latents, torch.tensor([500.0, 900.0]), given, 1.0)
        with engine.flops.backward(2):
            velocity.square().sum().backward()
        velocities.append(velocity.detach())
        gradients.append([p.grad.to_local().clone() for p in engine.weights.parameters.values()])  # pyright: ignore
        engine.module.zero_grad(set_to_none=True)
    assert torch.equal(*velocities)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_stage_tells_its_speed(sd3_folder: Path, tmp_path: Path, guidance: float) -> None:
    made = Chain(str(sd3_folder), str(tmp_path), sampler={**ODE, "guidance_scale": guidance})
    ctx = made.context("sample", 0)
    made.sample(ctx)
    assert {"time/load", "time/denoise", "time/decode", "time/write", "time/wait"} <= ctx.measured.keys()
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
    found = []

    def layer(module: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            assert isinstance(module.kernel_size, tuple)
            found.append(2 * out.numel() * module.in_channels * module.kernel_size[0] * module.kernel_size[1])
        elif isinstance(module, nn.Linear):
            found.append(2 * out.numel() * module.in_features)

    hooks = [m.register_forward_hook(layer) for m in engine.module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    given = Conditioning({"embeds": torch.randn(1, 16, 32), "pooled": torch.randn(1, 32)})
    with _attention(found), torch.no_grad():
        engine.velocity(torch.randn(1, *engine.adapter.latent_shape()), torch.tensor([500.0]), given, 1.0)
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
