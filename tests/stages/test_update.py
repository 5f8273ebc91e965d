import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

from schemas.artifacts import TrajectoryTable
from schemas.contracts import UpdateOutputs
from schemas.errors import InputError, NonFinite, RunError
from schemas.losses import LearningRate
from stages.engine.checkpoint import load
from stages.store import tables
from tests.stages.chain import ODE, SDE, Chain, distance, first_gradient, rewritten, written_advantages

GRPO = {"loss": {"kind": "grpo", "clip": 1e-3}}
NFT = {"loss": {"kind": "nft"}}


def chain(folder: Path, directory: Path, **changes: Any) -> Chain:
    return Chain(str(folder), str(directory), **changes)


def base(made: Chain) -> dict[str, torch.Tensor]:
    """The trainable weights before any update."""
    weights = made.engine().weights
    return weights.full(weights.start)


def updated(chain: Chain, trajectory: TrajectoryTable, node: str = "update", **config: Any) -> UpdateOutputs:
    judged = chain.advantages(trajectory, chain.context(f"{node}-judged", 0))
    return chain.update_once(trajectory, judged, chain.context(node, 0), config=chain.update_config(**config))


@pytest.mark.parametrize("lora", [2, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_one_at_the_first_update(sd3_folder: Path, tmp_path: Path, lora: int | None, dtype: str) -> None:
    sampler = {**SDE, "guidance_scale": 2.0, "states": "float16"}
    made = chain(sd3_folder, tmp_path, lora=lora, dtype=dtype, sampler=sampler, iterations=2)
    for out in made.run({}):
        assert out.metrics["train/ratio_mean"] == 1.0
        assert out.metrics["train/ratio_max_deviation"] == 0.0
        assert out.metrics["train/log_prob_noise"] == 0.0
        assert out.metrics["train/clip_fraction"] == 0.0
        for name in ("raw", "optimizer"):
            assert {value.dtype for value in load(out.policy, name).values()} == {torch.float32}


@pytest.mark.parametrize("window", [{"kind": "progressive", "size": 2}, {"kind": "fixed", "first": 1}])
@pytest.mark.parametrize("kind", ["dance_sde", "cps", "ddim"])
def test_every_stochastic_step_is_replayed_to_the_last_bit(
    sd3_folder: Path, tmp_path: Path, kind: str, window: dict[str, Any]
) -> None:
    sampler = {"kind": kind, "steps": 5, "eta": 0.4, "window": window, "outside": "ode_dpm"}
    sampler |= {"shared_noise": True, "shared_prefix": True}
    first, second = chain(sd3_folder, tmp_path, sampler=sampler, iterations=2).run({})
    for out in (first, second):
        assert out.metrics["train/ratio_mean"] == 1.0
        assert out.metrics["train/ratio_max_deviation"] == 0.0
        assert out.metrics["train/grad_norm"] > 0.0
    assert first.policy.digest != second.policy.digest


@pytest.mark.slow
@pytest.mark.parametrize("update", [GRPO, NFT], ids=["grpo", "nft"])
def test_a_warm_run_a_cold_run_and_a_resumed_run_are_equal(
    sd3_folder: Path, tmp_path: Path, update: dict[str, Any]
) -> None:
    weights = "old" if update is NFT else "raw"
    settings = {"update": {**update, "steps": 2, "ema": {"decay": 0.9}}, "weights": weights, "iterations": 3}
    warm = chain(sd3_folder, tmp_path / "warm", **settings).run({})
    cold = chain(sd3_folder, tmp_path / "cold", **settings).run(None)
    assert [out.policy.digest for out in warm] == [out.policy.digest for out in cold]
    assert [out.metrics for out in warm] == [out.metrics for out in cold]
    shutil.copytree(tmp_path / "warm" / "0000", tmp_path / "resumed" / "0000")
    given = {"policy": warm[0].policy.model_dump()}
    resumed = chain(sd3_folder, tmp_path / "resumed", **settings, first=1, given=given).run({})
    assert [out.policy.digest for out in resumed] == [out.policy.digest for out in warm[1:]]
    assert len({out.policy.digest for out in warm}) == 3


def test_the_gradient_does_not_depend_on_micro_batches_or_the_order_of_rows(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path, flat=("p1",))
    drawn = made.sample(made.context("sample", 0)).trajectory
    expected = first_gradient(updated(made, drawn).policy)
    shuffled = rewritten(drawn, tmp_path / "order", np.random.default_rng(0).permutation(12).tolist())
    assert distance(first_gradient(updated(made, shuffled, "order").policy), expected) < 1e-6
    singly = rewritten(drawn, tmp_path / "single", micro_batch=range(12))
    assert distance(first_gradient(updated(made, singly, "single").policy), expected) < 1e-5
    whole = rewritten(drawn, tmp_path / "whole", micro_batch=[0] * 4 + [1] * 4 + [2] * 4)
    out = updated(made, whole, "whole")
    assert distance(first_gradient(out.policy), expected) < 1e-5
    assert out.metrics["train/skipped_units"] == drawn.num_steps


@pytest.mark.parametrize("update", [NFT, {"loss": {"kind": "sft", "text_dropout": 0.4}}], ids=["nft", "sft"])
def test_losses_on_latents_do_not_depend_on_micro_batches(
    sd3_folder: Path, tmp_path: Path, update: dict[str, Any]
) -> None:
    made = chain(sd3_folder, tmp_path, sampler=ODE, weights="old", update=update)
    drawn = made.sample(made.context("sample", 0)).trajectory
    expected = first_gradient(updated(made, drawn).policy)
    for size in (1, 5, 12):
        other = chain(sd3_folder, tmp_path, sampler=ODE, weights="old", update=update, micro_batch=size)
        assert distance(first_gradient(updated(other, drawn, f"of-{size}").policy), expected) < 1e-5
    shuffled = rewritten(drawn, tmp_path / "order", np.random.default_rng(0).permutation(12).tolist())
    assert distance(first_gradient(updated(made, shuffled, "order").policy), expected) < 1e-5


@pytest.mark.slow
def test_idle_units_are_computed_when_the_kl_needs_them(sd3_folder: Path, tmp_path: Path) -> None:
    """With all advantages 0 only the KL pulls, and at the base its gradient is 0."""
    made = chain(sd3_folder, tmp_path, flat=("p0", "p1", "p2"), iterations=2)
    first = made.sample(made.context("sample", 0)).trajectory
    out = updated(made, first)
    assert out.metrics["train/skipped_units"] == 6 * first.num_steps
    assert out.metrics["train/loss"] == 0.0
    assert out.metrics["train/grad_norm"] == 0.0
    for kind in ("velocity", "mean", "mean_over_g"):
        out = updated(made, first, kind, kl={"kind": kind, "weight": 0.5})
        assert out.metrics["train/skipped_units"] == 0
        assert out.metrics["train/grad_norm"] == 0.0
        assert out.metrics["train/kl"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("lora", [2, None])
def test_the_kl_is_the_distance_to_the_base(sd3_folder: Path, tmp_path: Path, lora: int | None) -> None:
    """The mean's KL over 2 std^2 equals that over 2 g^2 divided by -dt, and the loss has it times its weight."""
    made = chain(sd3_folder, tmp_path, lora=lora, update={**GRPO, "optimizer": {"learning_rate": {"start": 0.02}}})
    moved = made.run({})[0].policy
    sampler = {**SDE, "window": {"kind": "random", "size": 1, "range": [1, 2]}}
    flat = chain(sd3_folder, tmp_path, lora=lora, flat=("p0", "p1", "p2"), sampler=sampler)
    drawn = flat.sample(flat.context("sample", 1), moved).trajectory
    judged = flat.advantages(drawn, flat.context("judged", 1))
    kl = {}
    for kind in ("velocity", "mean", "mean_over_g"):
        config = flat.update_config(kl={"kind": kind, "weight": 3.0})
        out = flat.update_once(drawn, judged, flat.context(kind, 1), moved, config)
        kl[kind] = out.metrics["train/kl"]
        assert out.metrics["train/loss"] == pytest.approx(3 * kl[kind], rel=1e-6)
        assert out.metrics["train/grad_norm"] > 0
    table = tables.read(drawn)
    s, s1 = (float(tables.tensors(table, name)[0, 0]) for name in ("sigma", "sigma_next"))
    assert kl["mean_over_g"] == pytest.approx(kl["mean"] * (s - s1), rel=1e-5)
    g2 = 0.49 * s / (1 - s)
    of_velocity = (1 + g2 / (2 * s) * (1 - s)) * (s1 - s)  # d mean / d v
    assert kl["mean"] == pytest.approx(kl["velocity"] * of_velocity**2 / (2 * g2 * (s - s1)), rel=1e-5)


def test_old_and_ema_follow_their_schedules(sd3_folder: Path, tmp_path: Path) -> None:
    update = {**NFT, "steps": 2, "old": {"rate": 0.3, "max_decay": 0.5}, "ema": {"decay": 0.9}}
    made = chain(sd3_folder, tmp_path, update=update, weights="old", iterations=2)
    first, second = (out.policy for out in made.run({}))
    assert first.sets == ("raw", "old", "ema")
    assert (first.updates, second.updates) == (2, 4)
    raw = load(first, "raw")
    # Iteration 0 has decay 0: old becomes raw.
    assert all(torch.equal(value, raw[name]) for name, value in load(first, "old").items())
    for name, value in load(second, "old").items():
        torch.testing.assert_close(value, 0.3 * raw[name] + 0.7 * load(second, "raw")[name], atol=1e-6, rtol=0)
    samples = made.sample(made.context("more", 0)).trajectory
    one = updated(chain(sd3_folder, tmp_path / "one", weights="old"), samples, **{**update, "steps": 1})
    start = base(made)
    decay = 2 / 11  # (1 + 1) / (10 + 1)
    for name, value in load(one.policy, "ema").items():
        expected = decay * start[name] + (1 - decay) * load(one.policy, "raw")[name]
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)


def test_sets_that_nobody_keeps_up_are_dropped(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path, update={**GRPO, "ema": {}})
    policy = made.run({})[0].policy
    drawn = made.sample(made.context("sample", 1), policy).trajectory
    judged = made.advantages(drawn, made.context("judged", 1))
    plain = made.update_once(drawn, judged, made.context("update", 1), policy, made.update_config(ema=None))
    assert plain.policy.sets == ("raw",)
    with pytest.raises(InputError, match="'ema' weights, only raw"):
        made.sample(made.context("eval", 1), plain.policy, made.sample_config(weights="ema"))


def test_more_steps_and_epochs_cut_the_samples_evenly(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path, update={**GRPO, "steps": 3, "epochs": 2})
    out = made.run({})[0]
    assert out.policy.updates == 6
    ratios = [out.metrics[f"train/ratio_mean/{i}"] for i in range(6)]
    assert ratios[0] == 1.0
    assert all(ratio != 1.0 for ratio in ratios[1:])
    assert out.metrics["train/log_prob_noise"] == 0.0
    assert out.metrics["train/ratio_max_deviation"] > 0
    with pytest.raises(InputError, match="steps is 7, but there are only 6 micro-batches"):
        updated(made, made.sample(made.context("sample", 0)).trajectory, "many", steps=7)


def test_learning_rates() -> None:
    assert LearningRate(start=1.0).at(1000, 1) == 1.0
    linear = LearningRate(kind="linear", start=1.0, end=0.2, over=5)
    assert [round(linear.at(i, 1), 9) for i in range(7)] == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    cosine = LearningRate(kind="cosine", start=1.0, over=3)
    assert cosine.at(1, 1) == pytest.approx(0.5)
    assert cosine.at(5, 1) == pytest.approx(0.0)
    assert [LearningRate(start=1.0, warm_up=4).at(0, step) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]


def test_the_learning_rate_and_the_clipped_norm_reach_adam(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path)
    drawn = made.sample(made.context("sample", 0)).trajectory
    full = updated(made, drawn)
    rates = {"kind": "linear", "start": 1e-3, "over": 3, "warm_up": 4}
    out = updated(made, drawn, "clipped", optimizer={"learning_rate": rates, "max_grad_norm": 1e-5})
    assert out.metrics["train/learning_rate"] == pytest.approx(1e-3 / 4)
    clipped = first_gradient(out.policy)
    norm = torch.stack([value.norm() for value in clipped.values()]).norm()
    assert float(norm) == pytest.approx(1e-5, rel=1e-4)
    scale = 1e-5 / out.metrics["train/grad_norm"]
    assert distance(clipped, {k: v * scale for k, v in first_gradient(full.policy).items()}) < 1e-5
    # Adam's first step is the rate times the sign, where eps is far below the gradient.
    start = base(made)
    for name, value in load(out.policy, "raw").items():
        moved = value - start[name]
        expected = -1e-3 / 4 * torch.sign(clipped[name])
        torch.testing.assert_close(moved, expected, atol=1e-6, rtol=0)


def test_log_probs_that_do_not_come_out_again_stop_the_update(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path)
    drawn = made.sample(made.context("sample", 0)).trajectory
    stored = tables.tensors(tables.read(drawn), "log_prob")
    wrong = rewritten(drawn, tmp_path / "wrong", log_prob=stored + np.float32(6e-4))
    with pytest.raises(RunError, match=r"update\[0\].*6\.0e-04.*half the clip range \(5\.0e-04\)"):
        updated(made, wrong)
    assert not (tmp_path / "0000" / "update" / "policy").exists()
    # Samples of another policy are off-policy, which is no error.
    other = wrong.model_copy(update={"policy": "another"})
    out = updated(made, other, "other")
    assert out.metrics["train/ratio_mean"] == pytest.approx(math.exp(-6e-4), abs=1e-6)


def test_an_error_leaves_nothing_behind(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path)
    residents: dict[str, object] = {}
    drawn = made.sample(made.context("sample", 0, residents)).trajectory
    states = tables.tensors(tables.read(drawn), "states").copy()
    states[5, 1, 0, 0, 0] = np.nan
    broken = rewritten(drawn, tmp_path / "broken", states=states)
    judged = made.advantages(drawn, made.context("judged", 0))
    with pytest.raises(NonFinite, match=r"update\[0\].*p1/0', 'p1/1'"):
        made.update_once(broken, judged, made.context("update", 0, residents))
    assert "engine" not in residents
    warm = made.update_once(drawn, judged, made.context("update", 0, residents))
    assert warm.policy.digest == updated(made, drawn, "cold").policy.digest


def test_what_does_not_fit_is_refused(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path)
    drawn = made.sample(made.context("sample", 0)).trajectory
    ctx = made.context("update", 0)
    ids = tables.read(drawn).column("sample_id").to_pylist()
    with pytest.raises(InputError, match=r"update\[0\].*'grpo' needs `advantages`"):
        made.update_once(drawn, None, ctx)
    few = written_advantages(ids[:-1], [1.0] * 11, made.context("few", 0))
    with pytest.raises(InputError, match="sample 'p2/3' has no row"):
        made.update_once(drawn, few, ctx)
    nobody = written_advantages(ids, [None] * 12, made.context("nobody", 0))
    with pytest.raises(InputError, match="no sample with an advantage"):
        made.update_once(drawn, nobody, ctx)
    infinite = written_advantages(ids, [1.0] * 11 + [math.inf], made.context("infinite", 0))
    with pytest.raises(NonFinite, match=r"advantage of sample 'p2/3'"):
        made.update_once(drawn, infinite, ctx)
    averaged = drawn.model_copy(update={"policy": "x", "weights": "ema"})
    with pytest.raises(InputError, match="wants samples of 'raw' weights, got 'ema'"):
        made.update_once(averaged, written_advantages(ids, [1.0] * 12, made.context("all", 0)), ctx)
    unknown = rewritten(drawn, tmp_path / "unknown", prompt_id=["p0"] * 11 + ["p9"])
    with pytest.raises(InputError, match="prompt 'p9' has no embeddings"):
        made.update_once(unknown, written_advantages(ids, [1.0] * 12, made.context("all", 0)), ctx)
    finished = chain(sd3_folder, tmp_path / "ode", sampler=ODE)
    with pytest.raises(InputError, match="needs stored steps"):
        finished.run({})


def test_targets_that_the_model_does_not_have(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path)
    model = made.model.model_copy(update={"lora": made.model.lora.model_copy(update={"targets": ("to_nowhere",)})})  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"model\.lora\.targets"):
        made.sample(made.context("sample", 0), config=made.sample_config(model=model))


def test_a_policy_of_another_form_is_refused(sd3_folder: Path, tmp_path: Path) -> None:
    policy = chain(sd3_folder, tmp_path / "two").run({})[0].policy
    for lora, text in ((3, "'rank': 2"), (None, "the model says None")):
        other = chain(sd3_folder, tmp_path / str(lora), lora=lora)
        with pytest.raises(InputError, match=text):
            other.engine(policy)
    assert json.loads((Path(policy.path) / "policy.json").read_text())["lora"]["rank"] == 2


def test_nothing_is_pickled_and_lora_policies_hold_adapters_only(sd3_folder: Path, tmp_path: Path) -> None:
    out = chain(sd3_folder, tmp_path).run({})[0]
    files = sorted(path.name for path in Path(out.policy.path).iterdir())
    assert files == ["optimizer.safetensors", "policy.json", "raw.safetensors"]
    assert all(".lora_" in name for name in load(out.policy, "raw"))
    whole = SD3Transformer2DModel.from_pretrained(sd3_folder, subfolder="transformer")
    full = chain(sd3_folder, tmp_path / "full", lora=None).run({})[0]
    files = sorted(path.name for path in Path(full.policy.path).iterdir())
    assert files == ["policy.json", "shard-00001-model-00001-of-00001.safetensors"]
    assert load(full.policy, "raw").keys() == {name for name, _ in whole.named_parameters()}
