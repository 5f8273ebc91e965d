"""One rank and two: the same noise, gradients and policies, and one message when something breaks.

Two processes are started once for the whole module and work on all chains of it.
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
from stages.store import tables, tensors
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
}


class Runs(NamedTuple):
    """The same chain on one rank and on two, iteration by iteration."""

    one: list[UpdateOutputs]
    two: list[UpdateOutputs]


class Everything(NamedTuple):
    """Chains by name; those of `crossed` went on at the other world size after two iterations."""

    runs: dict[str, Runs]
    one: dict[str, Chain]
    two: dict[str, Chain]
    crossed: Runs
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
    one = {name: Chain(folder, str(root / "one" / name), **UNEVEN, **more) for name, more in SETTINGS.items()}
    alone = {name: chain.run({}) for name, chain in one.items()}
    two = {name: Chain(folder, str(root / "two" / name), **UNEVEN, **more) for name, more in SETTINGS.items()}
    broken = failing(folder, root / "broken")

    def going_on(name: str, outs: Sequence[UpdateOutputs]) -> Chain:
        settings = {**UNEVEN, **SETTINGS["lora"], "first": 2, "given": {"policy": outs[1].policy.model_dump()}}
        return Chain(folder, str(root / name), **settings)

    widened = going_on("widened", alone["lora"])
    on_ranks([*two.values(), widened, *broken.values()], 2)
    runs = {name: Runs(alone[name], outputs(two[name])) for name in SETTINGS}
    narrowed = going_on("narrowed", runs["lora"].two).run({})
    errors = {name: [str(outcome(chain, rank)) for rank in range(2)] for name, chain in broken.items()}
    return Everything(runs, one, two, Runs(narrowed, outputs(widened)), errors)


def sampled(chain: Chain, table: str) -> pa.Table:
    """A table of the first iteration, where both policies are the base."""
    shards = sorted((Path(chain.directory) / "0000" / "sample" / table).glob("shard-*.arrow"))
    return pa.concat_tables([pa.ipc.open_stream(shard.read_bytes()).read_all() for shard in shards])


def first_moments(policy: PolicyRef) -> dict[str, torch.Tensor]:
    moments = tensors.load(Path(policy.path) / "optimizer.safetensors")
    return {name: value for name, value in moments.items() if name.startswith("exp_avg.")}


def moved(chain: Chain, policy: PolicyRef | None) -> torch.Tensor:
    """How far the policy's velocity is from the base's on fixed inputs."""
    base = fixed_velocity(chain.engine(), "base")
    return fixed_velocity(chain.engine(policy)) - base


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sample_has_the_same_noise_on_any_number_of_ranks(everything: Everything, name: str) -> None:
    one, two = (sampled(chains[name], "trajectory") for chains in (everything.one, everything.two))
    assert one.num_rows == 15
    for key in ("sample_id", "seed", "micro_batch"):
        assert one.column(key).to_pylist() == two.column(key).to_pylist()
    if name != "nft":
        np.testing.assert_array_equal(tables.tensors(one, "states")[:, 0], tables.tensors(two, "states")[:, 0])
        np.testing.assert_allclose(tables.tensors(one, "log_prob"), tables.tensors(two, "log_prob"), atol=1e-6)
    np.testing.assert_allclose(tables.tensors(one, "latents"), tables.tensors(two, "latents"), atol=1e-5)
    pictures = [sampled(chains[name], "samples") for chains in (everything.one, everything.two)]
    for key in ("sample_id", "prompt", "index", "seed"):
        assert pictures[0].column(key).to_pylist() == pictures[1].column(key).to_pylist()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_gradient_is_the_same(everything: Everything, name: str) -> None:
    one, two = everything.runs[name].one[0], everything.runs[name].two[0]
    assert distance(first_gradient(two.policy), first_gradient(one.policy)) < 1e-5
    assert two.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-7)
    assert two.metrics["train/skipped_units"] == (9 if name == "full" else 0)


@pytest.mark.parametrize("name", SETTINGS)
def test_three_updates_lead_to_the_same_velocity(everything: Everything, name: str) -> None:
    chain, (one, two) = everything.one[name], everything.runs[name]
    assert [out.policy.updates for out in two] == [1, 2, 3]
    assert [out.policy.sets for out in two] == [out.policy.sets for out in one]
    expected = moved(chain, one[-1].policy)
    assert float(expected.norm()) > 0
    assert float((moved(chain, two[-1].policy) - expected).norm() / expected.norm()) < 1e-3


def test_a_policy_goes_on_at_another_world_size(everything: Everything) -> None:
    """Weights, sets and moments: without the moments the third update would be a first one, of another direction."""
    chain, whole = everything.one["lora"], everything.runs["lora"].one
    before = fixed_velocity(chain.engine(whole[1].policy))
    step = fixed_velocity(chain.engine(whole[2].policy)) - before
    for out in (everything.crossed.one[0], everything.crossed.two[0]):
        assert out.policy.updates == 3
        assert out.policy.sets == ("raw", "ema")
        for name in ("raw", "ema", "optimizer"):
            got, wanted = (
                tensors.load(Path(policy.path) / f"{name}.safetensors") for policy in (out.policy, whole[2].policy)
            )
            assert got.keys() == wanted.keys()
            assert {key: value.shape for key, value in got.items()} == {
                key: value.shape for key, value in wanted.items()
            }
        moments = (first_moments(out.policy), first_moments(whole[2].policy))
        assert distance(*moments) < 1e-3
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


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_together_count_the_flops_that_one_counts(everything: Everything, name: str) -> None:
    """Calls that only keep ranks in step do not count."""
    told = json.loads((Path(everything.two[name].directory) / "rank-0.measured").read_text())
    for node in ("sample", "update"):
        alone = everything.one[name].measured[f"0/{node}"]["flops"]
        assert told[f"0/{node}"]["flops"] == alone > 0
