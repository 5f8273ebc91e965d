"""Worlds of one to four ranks: the same noise, gradients and policies, and one message when something breaks.

The processes of a world are started once for the whole module and work on all its chains.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from schemas.artifacts import ConditioningTable, PolicyRef
from schemas.contracts import UpdateOutputs
from stages.engine import checkpoint
from stages.store import tables
from stages.store.tables import TableWriter
from tests.stages.chain import ODE, Chain, distance, first_gradient, fixed_velocity, on_ranks, outcome, rewritten

pytestmark = pytest.mark.slow

# 5 samples in micro-batches of 2 make 9 of them, 27 replayed steps and 5 shards: nothing shares out evenly.
UNEVEN: dict[str, Any] = {"per_prompt": 5, "micro_batch": 2, "shard_micro_batches": 2, "iterations": 3}
KL = {"kind": "velocity", "weight": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"lora": 2, "update": {"loss": {"kind": "grpo", "clip": 1e-3}, "kl": KL, "ema": {"decay": 0.9}}},
    "full": {"lora": None, "update": {"loss": {"kind": "grpo", "clip": 1e-3}}, "flat": ("p1",)},
    "nft": {"lora": 2, "update": {"loss": {"kind": "nft"}, "ema": {}}, "sampler": ODE, "weights": "old"},
    "replicas": {"lora": None, "update": {"loss": {"kind": "grpo", "clip": 1e-3}, "ema": {}}},
    "tokens": {"lora": 2, "update": {"loss": {"kind": "grpo", "clip": 1e-3}, "kl": KL, "ema": {}}},
    "tokens_full": {"lora": None, "update": {"loss": {"kind": "nft"}, "ema": {}}, "sampler": ODE, "weights": "old"},
}
# How the model lies in memory must not show in the numbers.
FORMS: dict[str, dict[str, Any]] = {
    "lora": {"gathered": {"sample": True}},
    "nft": {"offload": ("parameters", "autoencoder"), "decode_batch": 1},
    "replicas": {"replicas": 2, "activation_checkpointing": True},
    "tokens": {"context_parallel": 2, "activation_checkpointing": True},
    "tokens_full": {"context_parallel": 2},
}
WORLDS = (2, 3, 4)
EVEN = ("replicas", "tokens", "tokens_full")
CASES = [(name, world) for name in SETTINGS for world in WORLDS if name not in EVEN or world % 2 == 0]


class Everything(NamedTuple):
    """Chains and what came of them, by name and world size.

    `crossed` went on after two iterations of four ranks, by name and new world size.
    """

    chains: dict[tuple[str, int], Chain]
    outs: dict[tuple[str, int], list[UpdateOutputs]]
    crossed: dict[tuple[str, int], UpdateOutputs]
    errors: dict[str, list[str]]


def outputs(chain: Chain, rank: int = 0) -> list[UpdateOutputs]:
    found = outcome(chain, rank)
    assert not isinstance(found, str), found
    return found


def spoilt(conditioning: ConditioningTable, prompt_id: str, directory: Path) -> ConditioningTable:
    """The same embeddings with a NaN in those of one prompt."""
    table = tables.read(conditioning)
    columns: dict[str, Any] = {name: table.column(name).to_pylist() for name in ("prompt_id", "role")}
    columns |= {name: [value.copy() for value in tables.ragged(table, name)] for name in conditioning.names}
    columns["embeds"][columns["prompt_id"].index(prompt_id)][0, 0] = np.nan
    writer = TableWriter(directory, "spoilt", table.schema)
    writer.write(0, columns)
    return writer.ref(ConditioningTable, 1, names=conditioning.names).under(directory)


def failing(folder: str, directory: Path) -> dict[str, Chain]:
    """Chains that break on one rank of two: NaN in what it samples, and in what it trains on."""
    whole = Chain(folder, str(directory / "whole"))
    conditioning = whole.conditioning(whole.prompts())
    drawn = whole.sample(whole.context("sample", 0)).trajectory
    states = tables.tensors(tables.read(drawn), "states").copy()
    states[5, 1, 0, 0, 0] = np.nan
    given = {
        "sample": {"conditioning": spoilt(conditioning, "p1", directory).model_dump()},
        "update": {"trajectory": rewritten(drawn, directory, states=states).model_dump()},
    }
    return {name: Chain(folder, str(directory / name), given=refs) for name, refs in given.items()}


@pytest.fixture(scope="module")
def everything(sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Everything:
    folder, root = str(sd3_folder), tmp_path_factory.mktemp("ranks")
    chains = {
        (name, world): Chain(
            folder,
            str(root / f"{name}-{world}"),
            **{**UNEVEN, **SETTINGS[name]},
            resources=FORMS.get(name, {}) if world > 1 else {},
        )
        for name, world in [*((name, 1) for name in SETTINGS), *CASES]
    }
    outs = {(name, 1): chains[name, 1].run({}) for name in SETTINGS}
    broken, crossed = failing(folder, root / "broken"), {}

    def going_on(name: str, world: int) -> Chain:
        settings = {**UNEVEN, **SETTINGS[name], "first": 2, "given": {"policy": outs[name, 4][1].policy.model_dump()}}
        return Chain(folder, str(root / f"{name}-4-to-{world}"), **settings)

    for world in reversed(WORLDS):
        here = {name: chain for (name, size), chain in chains.items() if size == world}
        crossing = {name: going_on(name, 3) for name in ("lora", "full")} if world == 3 else {}
        on_ranks([*here.values(), *crossing.values(), *(broken.values() if world == 2 else ())], world)
        outs |= {(name, world): outputs(chain) for name, chain in here.items()}
        crossed |= {(name, 3): outputs(chain)[0] for name, chain in crossing.items()}
    crossed |= {(name, 1): going_on(name, 1).run({})[0] for name in ("lora", "full")}
    errors = {name: [str(outcome(chain, rank)) for rank in range(2)] for name, chain in broken.items()}
    return Everything(chains, outs, crossed, errors)


def sampled(chain: Chain, table: str) -> pa.Table:
    """A table of the first iteration, where both policies are the base."""
    shards = sorted((Path(chain.directory) / "0000" / "sample" / table).glob("shard-*.arrow"))
    return pa.concat_tables([pa.ipc.open_stream(shard.read_bytes()).read_all() for shard in shards])


def first_moments(policy: PolicyRef) -> dict[str, torch.Tensor]:
    moments = checkpoint.load(policy, "optimizer")
    return {name: value for name, value in moments.items() if name.startswith("exp_avg.")}


def moved(chain: Chain, policy: PolicyRef | None) -> torch.Tensor:
    """How far the policy's velocity is from the base's on fixed inputs."""
    base = fixed_velocity(chain.engine(), "base")
    return fixed_velocity(chain.engine(policy)) - base


@pytest.mark.parametrize(("name", "world"), CASES)
def test_a_sample_has_the_same_noise_on_any_number_of_ranks(everything: Everything, name: str, world: int) -> None:
    both = everything.chains[name, 1], everything.chains[name, world]
    one, other = (sampled(chain, "trajectory") for chain in both)
    assert one.num_rows == 15
    for key in ("sample_id", "seed", "micro_batch"):
        assert one.column(key).to_pylist() == other.column(key).to_pylist()
    if "sampler" not in SETTINGS[name]:
        np.testing.assert_array_equal(tables.tensors(one, "states")[:, 0], tables.tensors(other, "states")[:, 0])
        np.testing.assert_allclose(tables.tensors(one, "log_prob"), tables.tensors(other, "log_prob"), atol=1e-6)
    np.testing.assert_allclose(tables.tensors(one, "latents"), tables.tensors(other, "latents"), atol=1e-5)
    pictures = [sampled(chain, "samples") for chain in both]
    for key in ("sample_id", "prompt", "index", "seed"):
        assert pictures[0].column(key).to_pylist() == pictures[1].column(key).to_pylist()


@pytest.mark.parametrize(("name", "world"), CASES)
def test_the_first_gradient_is_the_same(everything: Everything, name: str, world: int) -> None:
    one, other = everything.outs[name, 1][0], everything.outs[name, world][0]
    assert distance(first_gradient(other.policy), first_gradient(one.policy)) < 1e-5
    assert other.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-7)
    assert other.metrics["train/skipped_units"] == (9 if name == "full" else 0)


@pytest.mark.parametrize(("name", "world"), CASES)
def test_three_updates_lead_to_the_same_velocity(everything: Everything, name: str, world: int) -> None:
    chain, one, other = everything.chains[name, 1], everything.outs[name, 1], everything.outs[name, world]
    assert [out.policy.updates for out in other] == [1, 2, 3]
    assert [out.policy.sets for out in other] == [out.policy.sets for out in one]
    expected = moved(chain, one[-1].policy)
    assert float(expected.norm()) > 0
    assert float((moved(chain, other[-1].policy) - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_policy_of_four_ranks_goes_on_at_another_world_size(everything: Everything, name: str, world: int) -> None:
    """Weights, sets and moments: without the moments the third update would be a first one, of another direction."""
    chain, whole, out = everything.chains[name, 1], everything.outs[name, 4], everything.crossed[name, world]
    before = fixed_velocity(chain.engine(whole[1].policy))
    step = fixed_velocity(chain.engine(whole[2].policy)) - before
    assert out.policy.updates == 3
    assert out.policy.sets == whole[2].policy.sets
    for part in (*out.policy.sets, "optimizer"):
        got, wanted = (checkpoint.load(policy, part) for policy in (out.policy, whole[2].policy))
        shapes = [{key: value.shape for key, value in found.items()} for found in (got, wanted)]
        assert shapes[0] == shapes[1]
    assert distance(first_moments(out.policy), first_moments(whole[2].policy)) < 1e-3
    after = fixed_velocity(chain.engine(out.policy)) - before
    assert float((after - step).norm() / step.norm()) < 2e-2


@pytest.mark.parametrize(
    ("name", "words"), [("sample", ("sample[0]", "latents", "p1/0", "a b c")), ("update", ("update[0]", "p1/1"))]
)
def test_an_error_on_one_rank_is_the_same_message_on_all(
    everything: Everything, name: str, words: Sequence[str]
) -> None:
    first, second = everything.errors[name]
    assert first == second
    assert first.startswith("NonFinite: ")
    for word in words:
        assert word in first


@pytest.mark.parametrize(
    ("name", "world"), [case for case in CASES if not FORMS.get(case[0], {}).get("activation_checkpointing")]
)
def test_ranks_together_count_the_flops_that_one_counts(everything: Everything, name: str, world: int) -> None:
    """Calls that only keep ranks in step do not count."""
    told = json.loads((Path(everything.chains[name, world].directory) / "rank-0.measured").read_text())
    for node in ("sample", "update"):
        alone = everything.chains[name, 1].measured[f"0/{node}"]["flops"]
        assert told[f"0/{node}"]["flops"] == alone > 0


def test_full_weights_are_written_by_every_rank_once(everything: Everything) -> None:
    for name, world, wanted in (("full", 4, 4), ("full", 3, 3), ("replicas", 2, 2)):
        folder = Path(everything.outs[name, world][0].policy.path)
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) <= wanted
        one = sum(file.stat().st_size for file in Path(everything.outs[name, 1][0].policy.path).glob("*.safetensors"))
        assert sum(file.stat().st_size for file in files) < 1.6 * one  # headers are a third of files this small
