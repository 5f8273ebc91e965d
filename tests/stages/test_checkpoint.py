"""An update that was stopped goes on from its last checkpoint, and a policy whose bytes changed is not used."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.artifacts import PolicyRef
from schemas.contracts import UpdateOutputs
from schemas.errors import InputError
from stages.engine import checkpoint
from tests.stages.chain import ODE, Chain, fixed_velocity, on_ranks, outcome

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"update": {"loss": {"kind": "grpo", "clip": 1e-3}, "steps": 3, "epochs": 2, "ema": {"decay": 0.9}}},
    "nft": {
        "update": {"loss": {"kind": "nft"}, "steps": 3, "epochs": 2, "ema": {}},
        "sampler": ODE,
        "weights": "old",
        "lora": None,
    },
}


def stopped(chain: Chain, after: int) -> Path:
    """The folder of an update that was stopped after so many optimizer steps."""
    with pytest.raises(KeyboardInterrupt):
        replace(chain, stop_after=after).run({})
    return Path(chain.directory) / "0000" / "update"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_stopped_update_goes_on_and_ends_equal(sd3_folder: Path, tmp_path: Path, name: str) -> None:
    (whole,) = Chain(str(sd3_folder), str(tmp_path / "whole"), **LOSSES[name]).run({})
    chain = Chain(str(sd3_folder), str(tmp_path / "stopped"), checkpoint_steps=2, **LOSSES[name])
    folder = stopped(chain, 3)
    assert left(folder) == ["policy.at-2"]
    assert left(stopped(chain, 5)) == ["policy.at-4"]
    steps: list[int] = []

    class Told(Chain):
        def progress(self, done: int, total: int, unit: str) -> None:
            if unit == "optimizer steps":
                steps.append(done)

    (out,) = Told(**vars(chain)).run({})
    assert steps == [5, 6]
    assert out.policy.digest == whole.policy.digest
    assert out.metrics == whole.metrics
    assert left(folder) == ["policy"]


@pytest.mark.slow
def test_without_checkpoints_it_starts_over(sd3_folder: Path, tmp_path: Path) -> None:
    settings = LOSSES["grpo"]
    (whole,) = Chain(str(sd3_folder), str(tmp_path / "whole"), **settings).run({})
    chain = Chain(str(sd3_folder), str(tmp_path / "stopped"), **settings)
    assert left(stopped(chain, 5)) == []
    assert chain.run({})[0].policy.digest == whole.policy.digest


@pytest.mark.slow
def test_a_kill_amid_a_checkpoint_leaves_the_one_before(sd3_folder: Path, tmp_path: Path) -> None:
    settings = LOSSES["grpo"]
    (whole,) = Chain(str(sd3_folder), str(tmp_path / "whole"), **settings).run({})
    chain = Chain(str(sd3_folder), str(tmp_path / "stopped"), checkpoint_steps=2, **settings)
    folder = stopped(chain, 3)
    (folder / "policy.draft").mkdir()
    (folder / "policy.draft" / "raw.safetensors").write_bytes(b"half a fi")
    (out,) = chain.run({})
    assert out.policy.digest == whole.policy.digest
    assert left(folder) == ["policy"]


@pytest.mark.slow
def test_it_goes_on_at_another_world_size(sd3_folder: Path, tmp_path: Path) -> None:
    settings = LOSSES["grpo"]
    (whole,) = Chain(str(sd3_folder), str(tmp_path / "whole"), **settings).run({})
    chain = Chain(str(sd3_folder), str(tmp_path / "stopped"), checkpoint_steps=4, **settings)
    stopped(chain, 5)
    on_ranks([chain], 2)
    found = outcome(chain, 0)
    assert not isinstance(found, str), found
    (out,) = [UpdateOutputs.model_validate(one) for one in found]
    assert out.policy.updates == 6
    base = fixed_velocity(chain.engine(), "base")
    expected, got = (fixed_velocity(chain.engine(policy)) - base for policy in (whole.policy, out.policy))
    assert float((got - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.slow
def test_files_that_a_stopped_write_of_more_ranks_left_are_not_read(sd3_folder: Path, tmp_path: Path) -> None:
    chain = Chain(str(sd3_folder), str(tmp_path / "chain"), **LOSSES["nft"])
    (whole,) = Chain(str(sd3_folder), str(tmp_path / "whole"), **LOSSES["nft"]).run({})
    name = "shard-00002-model-00001-of-00001.safetensors"
    left_over = Path(chain.directory) / "0000" / "update" / "policy" / name
    left_over.parent.mkdir(parents=True)
    shutil.copy(next(Path(whole.policy.path).glob("shard-*")), left_over)
    (out,) = chain.run({})
    assert not left_over.exists()
    assert out.policy.digest == whole.policy.digest


@pytest.mark.parametrize("part", ["raw", "ema", "optimizer"])
def test_a_changed_byte_of_a_policy_is_found(sd3_folder: Path, tmp_path: Path, part: str) -> None:
    chain = Chain(str(sd3_folder), str(tmp_path), **LOSSES["grpo"])
    policy = chain.run({})[0].policy
    file = Path(policy.path) / f"{part}.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    chain.engine()  # the policy is no longer in memory
    with pytest.raises(InputError, match=rf"{part}\.safetensors: wanted content of digest .* Delete the stage's"):
        replace(chain, first=1, iterations=2, given={"policy": policy.model_dump()}).run({})


@pytest.mark.parametrize("part", ["raw", "optimizer"])
def test_a_changed_byte_of_full_weights_is_found(sd3_folder: Path, tmp_path: Path, part: str) -> None:
    chain = Chain(str(sd3_folder), str(tmp_path), lora=None)
    policy = chain.run({})[0].policy
    (file,) = Path(policy.path).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = next(name for name in header if name.startswith(f"{part}."))
    content[8 + size + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"shard-00001-.*: wanted content of digest .* Delete the stage's"):
        checkpoint.load(policy, part)
    with pytest.raises(InputError, match=r"shard-00001-.*: wanted content of digest .* Delete the stage's"):
        replace(chain, first=1, iterations=2, given={"policy": policy.model_dump()}).run({})
    other = "optimizer" if part == "raw" else "raw"
    assert checkpoint.load(policy, other)


@pytest.mark.parametrize(("text", "words"), [("{", "cannot read"), ("[1]", "holds no facts"), ("{}", "none noted")])
def test_facts_of_a_policy_that_are_broken(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "policy.json").write_text(text)
    policy = PolicyRef(path=str(tmp_path), digest="d", trainable="lora", sets=("raw",), updates=1)
    checkpoint.tensors.save(tmp_path / "raw.safetensors", {"a": torch.ones(2)})
    with pytest.raises(InputError, match=words):
        checkpoint.load(policy, "raw")


def test_the_digests_are_those_of_the_files(sd3_folder: Path, tmp_path: Path) -> None:
    policy = Chain(str(sd3_folder), str(tmp_path), **LOSSES["grpo"]).run({})[0].policy
    noted = json.loads((Path(policy.path) / "policy.json").read_text())["digests"]
    assert sorted(noted) == ["ema", "optimizer", "raw"]
    for part, digest in noted.items():
        assert checkpoint.tensors.digest(checkpoint.load(policy, part)) == digest
