"""8-bit Adam with bitsandbytes, through the real stages; run by test_adam8bit.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.artifacts import PolicyRef
from stages.engine import checkpoint
from tests.stages.chain import Chain, distance, fixed_velocity, on_ranks, outcome

UPDATE: dict[str, Any] = {"loss": {"kind": "grpo", "clip": 1e-3}}


def chain_of(folder: Path, directory: Path, kind: str, **settings: Any) -> Chain:
    """Full weights, some tensors of which have more than 4,096 numbers."""
    update = {**UPDATE, "optimizer": {"kind": kind, "learning_rate": {"start": 1e-3}}}
    return Chain(str(folder), str(directory), lora=None, update=update, **{"iterations": 3, **settings})


@pytest.fixture(scope="module")
def policies(sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PolicyRef]]:
    """Of three updates, by kind of the optimizer."""
    root = tmp_path_factory.mktemp("adam8bit")
    kinds = ("adamw", "adamw_8bit")
    return {kind: [out.policy for out in chain_of(sd3_folder, root / kind, kind).run({})] for kind in kinds}


def raw(policy: PolicyRef) -> dict[str, Tensor]:
    return checkpoint.load(policy, "raw")


def ways(folder: Path, directory: Path, *policies: PolicyRef) -> list[Tensor]:
    """How far each policy's velocity is from the base's on fixed inputs."""
    engine = chain_of(folder, directory, "adamw").engine()
    base, out = fixed_velocity(engine, "base"), []
    for policy in policies:
        engine.load(policy)
        out.append((fixed_velocity(engine) - base).flatten())
    return out


def test_moments_have_eight_bits_in_memory_and_float32_on_disk(sd3_folder: Path, tmp_path: Path) -> None:
    residents: dict[str, Any] = {}
    out = chain_of(sd3_folder, tmp_path, "adamw_8bit", iterations=1).run(residents)[0]
    states = residents["engine"][1].optimizer.adamw.state
    kinds = {(leaf.numel() >= 4096, state["state1"].dtype) for leaf, state in states.items()}
    assert kinds == {(True, torch.uint8), (False, torch.float32)}
    assert {value.dtype for value in checkpoint.load(out.policy, "optimizer").values()} == {torch.float32}


def test_it_leads_where_adamw_leads(policies: dict[str, list[PolicyRef]], sd3_folder: Path, tmp_path: Path) -> None:
    plain, short = policies["adamw"][-1], policies["adamw_8bit"][-1]
    one, other = ways(sd3_folder, tmp_path, plain, short)
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.99
    assert float(other.norm() / one.norm()) == pytest.approx(1, abs=0.05)
    assert distance(raw(short), raw(plain)) > 0


def test_a_resumed_optimizer_takes_the_same_step(
    policies: dict[str, list[PolicyRef]], sd3_folder: Path, tmp_path: Path
) -> None:
    """As the one that stayed in memory."""
    second, third = policies["adamw_8bit"][1:]
    resumed = chain_of(sd3_folder, tmp_path, "adamw_8bit", first=2, given={"policy": second.model_dump()})
    again = raw(resumed.run({})[0].policy)
    assert all(torch.equal(again[name], value) for name, value in raw(third).items())


def test_two_ranks_do_the_same(policies: dict[str, list[PolicyRef]], sd3_folder: Path, tmp_path: Path) -> None:
    """But for tensors whose shards are too small for 8 bits."""
    chain = chain_of(sd3_folder, tmp_path / "ranks", "adamw_8bit")
    on_ranks([chain], 2)
    outs = outcome(chain, 0)
    assert not isinstance(outs, str), outs
    one, other = ways(sd3_folder, tmp_path, outs[-1].policy, policies["adamw_8bit"][-1])
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.99
