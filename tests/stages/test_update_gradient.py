"""The first gradient against one written out anew with plain torch: no FSDP, no units, no stored log-probs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from schemas.artifacts import ConditioningTable
from schemas.seeds import seed_of
from stages.engine.lora import is_lora, make_trainable, start_of
from stages.models import adapter
from stages.models.sd3 import Sd3
from stages.store import tables
from tests.stages.chain import ODE, SDE, Chain, distance, first_gradient, written_advantages

GRPO = {"loss": {"kind": "grpo", "clip": 1e-3}}
NFT = {"loss": {"kind": "nft", "beta": 0.3, "times": {"kind": "uniform", "draws": 2}}}
SFT = {"loss": {"kind": "sft", "text_dropout": 0.5}}


class Plain:
    """The same weights without our engine."""

    def __init__(self, chain: Chain, conditioning: ConditioningTable) -> None:
        made = adapter(chain.model, None)
        assert isinstance(made, Sd3)
        self.module: nn.Module = made.transformer()
        make_trainable(self.module, chain.model.lora, made.lora_targets)
        for name, parameter in self.module.named_parameters():
            if chain.model.lora is not None and is_lora(name):
                parameter.data = start_of(name, tuple(parameter.shape), chain.model.lora)
        table = tables.read(conditioning)
        columns = {name: tables.ragged(table, name) for name in ("embeds", "pooled")}
        self.text = {
            prompt_id: {name: torch.tensor(columns[name][row])[None] for name in columns}
            for row, prompt_id in enumerate(table.column("prompt_id").to_pylist())
        }

    def velocity(self, latents: Tensor, timestep: float, prompt_id: str, guidance: float = 1.0) -> Tensor:
        """For one sample (1, ...)."""
        if guidance > 1:
            negative, positive = (self.velocity(latents, timestep, key) for key in ("", prompt_id))
            return negative + guidance * (positive - negative)
        text = self.text[prompt_id]
        return self.module(latents, text["embeds"], text["pooled"], torch.tensor([timestep]), return_dict=False)[0]

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        loss.backward()
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}


def _columns(chain: Chain, trajectory: Any) -> dict[str, Any]:
    table = tables.read(trajectory)
    out: dict[str, Any] = {name: table.column(name).to_pylist() for name in ("sample_id", "prompt_id")}
    names = ["latents"] + (["states", "sigma", "sigma_next", "sigma_max", "timestep"] if trajectory.num_steps else [])
    return out | {name: torch.tensor(tables.tensors(table, name)).float() for name in names}


def _grpo(plain: Plain, rows: dict[str, Any], advantages: list[float | None], eta: float, guidance: float) -> Tensor:
    terms = []
    for row, advantage in enumerate(advantages):
        for step in range(rows["sigma"].shape[1]):
            if advantage is None:
                continue
            x, after = rows["states"][row, step : step + 1], rows["states"][row, step + 1 : step + 2]
            s, s1, top = (float(rows[name][row, step]) for name in ("sigma", "sigma_next", "sigma_max"))
            v = plain.velocity(x, float(rows["timestep"][row, step]), rows["prompt_id"][row], guidance)
            g = eta * math.sqrt(s / (1 - (top if s > 1 - 1e-6 else s)))
            mean = x + (v + g**2 / (2 * s) * (x + (1 - s) * v)) * (s1 - s)
            log_prob = torch.distributions.Normal(mean, g * math.sqrt(s - s1)).log_prob(after).mean()
            terms.append(-advantage * torch.exp(log_prob - log_prob.detach()))
    return torch.stack(terms).mean()


def _drawn(x0: Tensor, sample_id: str, number: int, normal: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed_of(7, 0, 0, sample_id, number, "draw"))
    if normal:
        t = torch.sigmoid(torch.randn((), generator=generator))
    else:
        t = 0.001 + 0.998 * torch.rand((), generator=generator)
    return t, torch.randn(x0.shape, generator=generator)


def _nft(plain: Plain, rows: dict[str, Any], advantages: list[float | None]) -> Tensor:
    terms = []
    for row, advantage in enumerate(advantages):
        for number in range(2):
            if advantage is None:
                continue
            x0 = rows["latents"][row]
            t, noise = _drawn(x0, rows["sample_id"][row], number, normal=False)
            noised = (1 - t) * x0 + t * noise
            v = plain.velocity(noised[None], float(t * 1000), rows["prompt_id"][row])[0]
            old, r = v.detach(), float(np.clip(advantage, -5, 5)) / 10 + 0.5
            for share, sign in ((r, 1), (1 - r, -1)):
                off = noised - t * (old + sign * 0.3 * (v - old)) - x0
                terms.append(5 / 0.3 * share * (off**2).mean() / off.detach().abs().mean())
    return torch.stack(terms).sum() / (len(terms) / 2)


def _sft(plain: Plain, rows: dict[str, Any]) -> Tensor:
    terms = []
    for row, sample_id in enumerate(rows["sample_id"]):
        x0 = rows["latents"][row]
        t, noise = _drawn(x0, sample_id, 0, normal=True)
        dropped = seed_of(7, 0, 0, sample_id, 0, "drop") / 2**63 < 0.5
        prompt_id = "" if dropped else rows["prompt_id"][row]
        v = plain.velocity(((1 - t) * x0 + t * noise)[None], float(t * 1000), prompt_id)[0]
        terms.append(((v - (noise - x0)) ** 2).mean())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("lora", [2, None])
@pytest.mark.parametrize(
    ("update", "sampler"),
    [
        (GRPO, SDE),
        (GRPO, {**SDE, "guidance_scale": 2.5, "eta": 1.0, "states": "float16"}),
        (GRPO, {**SDE, "window": {"kind": "random", "size": 1}, "shared_noise": True}),
        (NFT, ODE),
        (SFT, ODE),
    ],
    ids=["grpo", "grpo-guided", "grpo-window", "nft", "sft"],
)
def test_the_first_gradient_equals_one_written_out(
    sd3_folder: Path, tmp_path: Path, lora: int | None, update: dict[str, Any], sampler: dict[str, Any]
) -> None:
    weights = "old" if update is NFT else "raw"
    chain = Chain(str(sd3_folder), str(tmp_path), lora=lora, update=update, sampler=sampler, weights=weights)
    trajectory = chain.sample(chain.context("sample", 0)).trajectory
    rows = _columns(chain, trajectory)
    # A group without spread, samples that left, and others.
    values: list[float | None] = [0.0] * 4 + [None, 1.5, -0.5, 0.3] + [1.0, -1.0, None, None]
    judged = written_advantages(rows["sample_id"], values, chain.context("advantage", 0))
    out = chain.update_once(trajectory, None if update is SFT else judged, chain.context("update", 0))

    plain = Plain(chain, chain.conditioning(chain.prompts()))
    if update is GRPO:
        loss = _grpo(plain, rows, values, sampler["eta"], sampler.get("guidance_scale", 1.0))
    else:
        loss = _nft(plain, rows, values) if update is NFT else _sft(plain, rows)
    expected = plain.gradient(loss)
    assert distance(first_gradient(out.policy), expected) < 1e-5
    assert out.metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert out.metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    skipped = 2 * trajectory.num_steps if update is GRPO else 0  # micro-batches of two
    assert out.metrics["train/skipped_units"] == skipped
