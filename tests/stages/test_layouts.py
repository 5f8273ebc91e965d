"""Tables, sampler and engine know nothing of a family's layout: packed latents (2-D a sample) and video (4-D)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from stages.engine import checkpoint
from stages.models import ADAPTERS
from tests.stages.chain import SDE, Chain

# Wan's output is a view; nobody writes into it.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
SHAPES = {"Packed": (16, 4), "Video": (16, 3, 4, 4)}


@pytest.fixture(params=sorted(SHAPES))
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ADAPTERS, "sd3", f"tests.stages.layouts:{request.param}")
    return request.param


@pytest.fixture
def made(family: str, tmp_path: Path) -> Chain:
    update: dict[str, Any] = {"loss": {"kind": "grpo", "clip": 1e-2}, "kl": {"kind": "mean", "weight": 0.01}}
    return Chain(str(tmp_path), str(tmp_path), sampler=SDE, update=update, iterations=2)


def test_datasets_gives_states_back_in_their_shape(family: str, made: Chain) -> None:
    out = made.sample(made.context("sample", 0))
    shape = SHAPES[family]
    assert out.trajectory.latent_shape == shape
    files = sorted(Path(out.trajectory.path).glob("*.arrow"))
    assert len(files) == len(out.trajectory.shards)
    for file in files:
        table = Dataset.from_file(str(file))
        schema = table.data.schema
        told = {name: json.loads(schema.field(name).metadata[b"shape"]) for name in ("latents", "states")}
        assert told == {"latents": list(shape), "states": [4, *shape]}  # three stochastic steps: four states
        states = np.array(table["states"], dtype=np.float32).reshape(-1, 4, *shape)
        for seed, given in zip(table["seed"], states[:, 0], strict=True):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            assert np.array_equal(given, noise.numpy())
        # The last step, which is never stochastic, leads from the last state to the latents.
        latents = np.array(table["latents"], dtype=np.float32).reshape(-1, *shape)
        moved = np.abs(latents - states[:, -1]).max(axis=tuple(range(1, latents.ndim)))
        assert (moved > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [2, None])
def test_an_update_replays_and_moves_the_policy(made: Chain, lora: int | None) -> None:
    made = Chain(**{**vars(made), "lora": lora})
    first, second = made.run({})
    for out in (first, second):
        assert out.metrics["train/ratio_mean"] == 1.0
        assert out.metrics["train/ratio_max_deviation"] == 0.0
        assert out.metrics["train/log_prob_noise"] == 0.0
    assert first.metrics["train/kl"] == 0.0
    assert second.metrics["train/kl"] > 0.0
    old, new = (checkpoint.load(out.policy, "raw") for out in (first, second))
    assert old.keys() == new.keys()
    assert any(not torch.equal(old[name], new[name]) for name in old)


@pytest.mark.slow
def test_a_cold_engine_computes_the_same(made: Chain) -> None:
    warm = made.run({})[-1].policy.digest
    cold = Chain(**{**vars(made), "directory": str(Path(made.directory) / "cold")})
    assert cold.run()[-1].policy.digest == warm
