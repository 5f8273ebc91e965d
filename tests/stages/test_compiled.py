"""Blocks through torch.compile: really compiled, the same numbers to rounding, and the ratio still 1."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.stages.chain import Chain, distance, first_gradient, fixed_velocity

pytestmark = [
    pytest.mark.slow,
    # Inductor's own code warns of what it is about to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("lora", [2, None])
def test_compiled_blocks_give_the_same_velocity_and_gradient(
    sd3_folder: Path, tmp_path: Path, lora: int | None
) -> None:
    plain = Chain(str(sd3_folder), str(tmp_path / "plain"), lora=lora)
    compiled = Chain(str(sd3_folder), str(tmp_path / "compiled"), lora=lora, resources={"compile": True})
    torch.compiler.reset()
    counters.clear()
    velocities = [fixed_velocity(chain.engine()) for chain in (plain, compiled)]
    assert counters["frames"]["ok"] > 0
    torch.testing.assert_close(velocities[1], velocities[0], rtol=1e-5, atol=1e-6)
    (one,), (other,) = (chain.run({}) for chain in (plain, compiled))
    assert distance(first_gradient(other.policy), first_gradient(one.policy)) < 1e-4
    assert other.metrics["train/ratio_max_deviation"] < 1e-5
