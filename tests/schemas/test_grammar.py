import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from schemas.contracts import CONTRACTS, AdvantageConfig, PromptsConfig, SampleConfig, ScoreConfig
from schemas.losses import EmaConfig, GrpoLoss, LearningRate, OldPolicyConfig, OptimizerConfig, UniformTimes
from schemas.models import LoraConfig, Sd3Model
from schemas.rewards import JpegSizeReward
from schemas.sampling import (
    SAMPLERS,
    AllSteps,
    FixedWindow,
    FlowSdeSampler,
    OdeSampler,
    ProgressiveWindow,
    RandomWindow,
    SamplerConfig,
    Window,
)
from schemas.seeds import seed_of
from schemas.strict import Strict

ROOT = Path(__file__).parents[2]


def subclasses(kind: type[BaseModel]) -> list[type[BaseModel]]:
    return [kind, *(below for child in kind.__subclasses__() for below in subclasses(child))]


def test_every_model_is_closed_and_frozen() -> None:
    models = [model for model in subclasses(Strict) if model.__module__.startswith("schemas.")]
    assert len(models) > 60
    for model in models:
        assert model.model_config.get("extra") == "forbid", model
        assert model.model_config.get("frozen") is True, model


def test_the_drawing_office_loads_no_framework() -> None:
    code = (
        "import schemas.contracts, schemas.flow, schemas.fingerprint, schemas.record, schemas.tables, sys;"
        "print(sorted({'torch', 'diffusers', 'transformers', 'peft', 'prefect'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_every_config_comes_back_from_json() -> None:
    model = Sd3Model(path="a/b", lora=LoraConfig(targets=("to_q",)))
    config = SampleConfig(
        model=model, per_prompt=2, sampler=FlowSdeSampler(steps=4, window=RandomWindow(range=(0, 2))), weights="raw"
    )
    assert SampleConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_contracts_name_their_versions() -> None:
    for name, contract in CONTRACTS.items():
        assert contract.version >= 1, name
        assert "metrics" in contract.outputs.model_fields, name


@pytest.mark.parametrize("steps", [2, 3, 10])
def test_all_steps_leave_the_last_out(steps: int) -> None:
    assert AllSteps().steps(steps, 0, 0) == tuple(range(steps - 1))


def test_a_random_window_is_drawn_once_an_iteration() -> None:
    window = RandomWindow(size=2, range=(1, 6))
    drawn = [window.steps(10, 5, iteration) for iteration in range(200)]
    assert drawn == [window.steps(10, 5, iteration) for iteration in range(200)]
    assert set(drawn) == {(first, first + 1) for first in range(1, 5)}
    assert drawn != [window.steps(10, 6, iteration) for iteration in range(200)]


def test_a_random_window_covers_the_noisy_half_by_default() -> None:
    assert {step for i in range(200) for step in RandomWindow().steps(10, 0, i)} == set(range(5))


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        (RandomWindow(size=1, range=(0, 6)), 6),
        (RandomWindow(size=4), 4),
        (AllSteps(), 1),
        (FixedWindow(first=2, size=2), 4),
        (ProgressiveWindow(size=2, range=(1, 6)), 6),
    ],
)
def test_the_last_step_is_never_in_a_window(window: Window, steps: int) -> None:
    with pytest.raises(ValidationError, match="last"):
        FlowSdeSampler(steps=steps, window=window)


def test_a_progressive_window_slides_and_starts_over() -> None:
    window = ProgressiveWindow(size=2, range=(1, 5), every=3)
    assert [window.steps(10, 0, i)[0] for i in range(12)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 1, 1, 1]
    assert window.steps(10, 0, 4) == (2, 3)
    assert [ProgressiveWindow().steps(6, 0, i) for i in range(4)] == [(0,), (1,), (2,), (0,)]


def test_a_fixed_window_stays() -> None:
    assert {FixedWindow(first=1, size=2).steps(6, seed, i) for seed in range(3) for i in range(9)} == {(1, 2)}


def test_all_samplers_are_kinds_of_the_union() -> None:
    kinds = {one.model_fields["kind"].default for one in SAMPLERS}
    for kind in kinds:
        assert TypeAdapter(SamplerConfig).validate_python({"kind": kind}).kind == kind
    with pytest.raises(ValidationError) as error:
        TypeAdapter(SamplerConfig).validate_python({"kind": "heun"})
    assert all(f"'{kind}'" in str(error.value) for kind in kinds)


@pytest.mark.parametrize("kind", ["cps", "ddim"])
def test_their_noise_is_at_most_all(kind: str) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        TypeAdapter(SamplerConfig).validate_python({"kind": kind, "eta": 1.1})


def test_a_shared_prefix_needs_shared_noise_and_steps_before_the_window() -> None:
    with pytest.raises(ValidationError, match="shared_prefix needs shared_noise"):
        FlowSdeSampler(shared_prefix=True, window=RandomWindow())
    with pytest.raises(ValidationError, match="steps before the window"):
        FlowSdeSampler(shared_prefix=True, shared_noise=True)


def test_a_window_fits_its_range() -> None:
    with pytest.raises(ValidationError, match="size 3 does not fit into range"):
        RandomWindow(size=3, range=(0, 2))


def test_guidance_of_one_is_none() -> None:
    assert not OdeSampler(guidance_scale=1.0).guided
    assert OdeSampler(guidance_scale=1.5).guided


def test_old_policy_schedule_of_diffusion_nft() -> None:
    old = OldPolicyConfig(rate=0.01, max_decay=0.5)
    assert [old.decay(i) for i in (0, 10, 50, 500)] == [0.0, 0.1, 0.5, 0.5]


def test_ema_warms_up() -> None:
    assert EmaConfig(decay=0.9).at(1) == pytest.approx(2 / 11)
    assert EmaConfig(decay=0.9).at(1000) == 0.9
    assert EmaConfig(decay=0.9, warm_up=False).at(1) == 0.9


def test_clip_ranges() -> None:
    assert GrpoLoss(clip=0.1).clip_range == pytest.approx((0.9, 1.1))
    assert GrpoLoss(clip=0.1, clip_high=0.2).clip_range == pytest.approx((0.9, 1.2))


def test_a_falling_rate_needs_its_length() -> None:
    with pytest.raises(ValidationError, match="needs over"):
        LearningRate(kind="cosine", start=1e-4)


def test_outputs_vary_only_by_what_they_depend_on() -> None:
    sample = SampleConfig(model=Sd3Model(), sampler=OdeSampler(), fixed_noise=True)
    assert sample.varies() == {"seed"}
    assert sample.model_copy(update={"fixed_noise": False}).varies() == {"seed", "iteration"}
    assert PromptsConfig(path="a").varies() == frozenset()
    assert PromptsConfig(path="a", choose=3).varies() == {"seed", "iteration"}
    assert AdvantageConfig().varies() == frozenset()


def test_metric_names_of_rewards() -> None:
    names = ScoreConfig(rewards={"size": JpegSizeReward()}).metric_names()
    assert names == ("size", "size/std", "size/zero_std_ratio", "size/missing")


@pytest.mark.parametrize("name", ["sample_id", "prompt_id"])
def test_a_reward_cannot_take_a_key_column(name: str) -> None:
    with pytest.raises(ValidationError, match="cannot be called"):
        ScoreConfig(rewards={name: JpegSizeReward()})


@pytest.mark.parametrize("name", ["a/b", "a.b", "", "1st", "with space"])
def test_a_rewards_name_is_plain(name: str) -> None:
    with pytest.raises(ValidationError, match=f"the reward's name {name!r} becomes a column"):
        ScoreConfig(rewards={name: JpegSizeReward()})


def test_seeds_are_of_identity_not_of_process() -> None:
    code = "from schemas.seeds import seed_of; print(seed_of(1, 2, 'p', 3))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) == seed_of(1, 2, "p", 3)
    assert len({seed_of(1, i, "p", j) for i in range(30) for j in range(30)}) == 900
    assert seed_of("1", 2) != seed_of(1, 2)
    assert 0 <= seed_of("x") < 2**63


@pytest.mark.parametrize("bounds", [(5, -1), (0, 1), (0.5, 0.5), (0.1, 1.5)])
def test_times_lie_between_0_and_1(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="0 < low < high <= 1"):
        UniformTimes(range=bounds)


@pytest.mark.parametrize("betas", [(2, 3), (0.9, 1.0), (-0.1, 0.9)])
def test_betas_are_below_1(betas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        OptimizerConfig(betas=betas)
