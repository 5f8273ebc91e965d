"""Rules between nodes: weights, losses, advantages, and users' own rewards."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.plan import FromBest, FromNode, Plan
from schemas.contracts import ScoreConfig
from schemas.errors import FlowFileError
from schemas.rewards import ExternalReward

Write = Callable[..., Path]
ROOT = Path(__file__).parents[2]
GRPO = "loss: {kind: grpo, clip: 1e-4}"
NFT = "loss: {kind: nft}"
SDE = "sampler: {kind: flow_sde, steps: 6}"
ADVANTAGES = "          advantages: advantage.advantages\n"
EMA = "          ema: {decay: 0.9}\n"
EXPORT = "export: {policy: loop.best(eval_score.size)}"
PER_PROMPT = "per_prompt: 4"
ONCE = "advantage: {rewards: score.rewards}"


def compiled(file: Path, *sets: str) -> Plan:
    return compile_flow(load(file, "small", sets), "small")


def refused(file: Path, *sets: str) -> str:
    with pytest.raises(FlowFileError) as error:
        compiled(file, *sets)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # what a loss needs from the sampler
        ([(SDE, "sampler: {kind: ode}")], r"update.loss: grpo needs .* sampler of 'sample' is 'ode'; write .*flow_sde"),
        ([(ADVANTAGES, "")], r"update.loss: grpo needs advantages"),
        ([(GRPO, "loss: {kind: sft}")], r"update.advantages: sft does not use advantages"),
        ([(GRPO, NFT)], r"sample.weights: nft .* samples of the 'old' weights, not 'raw'; write `weights: old`"),
        ([(PER_PROMPT, "weights: ema")], r"sample.weights: grpo .* 'raw' weights, not 'ema'; write `weights: raw`"),
        ([(GRPO, GRPO + "\n          old: {rate: 0.1}")], r"update.old: grpo has no old policy"),
        (
            [(GRPO, NFT + "\n          kl: {kind: mean, weight: 1}"), (PER_PROMPT, "weights: old")],
            r"update.kl: kind 'mean' compares steps.*`kind: velocity`",
        ),
        # which sets of weights exist
        ([(PER_PROMPT, "weights: old")], r"sample.weights: update 'update' leaves no 'old' weights"),
        ([(EMA, "")], r"eval.weights: update 'update' leaves no 'ema' weights; give that update"),
        ([(EMA, "")], r"export.weights: update 'update' leaves no 'ema' weights"),
        ([("weights: ema", "weights: raw")], r"eval.weights: loop.best\(eval_score.size\) would choose by the 'raw'"),
        ([(EXPORT, EXPORT[:-1] + ", weights: raw}")], r"export.weights: is 'raw', but .* measured the 'ema' weights"),
        # one policy and one model in sampling and update
        (
            [(ADVANTAGES + "          policy: carry.policy", ADVANTAGES + "          policy: model")],
            r"update.policy: 'update' improves model, but its trajectory was sampled by 'sample' from carry.policy",
        ),
        (
            [(PER_PROMPT, "model: {kind: sd3, path: model, dtype: bfloat16}")],
            r"update.model: differs in dtype from the model of 'sample'; grpo replays its steps exactly",
        ),
        (
            [("weights: ema", "weights: ema\n          model: {kind: sd3, path: model, lora: {rank: 2}}")],
            r"eval.model: differs in lora from the model of 'update', which makes the policy read here",
        ),
        # whose advantages
        (
            [(ONCE, "more: {stage: score, samples: eval.samples, rewards: {a: {kind: jpeg_size}}}\n        "
              "advantage: {rewards: more.rewards}")],
            r"update.advantages: are those of pictures by 'eval', but the trajectory is of 'sample'",
        ),
        ([("sample.samples, rewards: {size: {", "sample.samples, rewards: {size: {weight: 0, ")], r"every reward .* 0"),
        # what is best
        ([("policy: carry.policy\n          weights: ema", "weights: ema")], r"export.policy: .*no policy of the loop"),
        ([(EXPORT, EXPORT[:-1] + ", format: lora}")], r"export.format: format lora needs a model with a `lora` block"),
        (
            [(EXPORT, "summarise: {metric: sise, before: {}, after: {a: loop.last(score.rewards)}}")],
            r"summarise.metric: 'score' has no reward 'sise'. Known: size. Did you mean 'size'",
        ),
        (
            [("policy: {start: model, next: update.policy}",
              "policy: {start: model, next: update.policy}\n        again: {start: model, next: update.policy}")],
            r"carry.again.next: update.policy is carried twice, as 'policy' and 'again'",
        ),
    ],
)  # fmt: skip
def test_rules(flow_file: Write, changes: list[tuple[str, str]], words: str) -> None:
    message = refused(flow_file(*changes))
    assert re.search(words, message), message
    assert re.match(r".*flows.yaml:\d+:\d+: flows\.small\.", message), message


def test_nft_from_the_old_weights_compiles(flow_file: Write) -> None:
    plan = compiled(flow_file((GRPO, NFT), (PER_PROMPT, "weights: old"), (SDE, "sampler: {kind: ode}")))
    assert plan.warnings == ()


def test_samples_of_the_base_need_no_set(flow_file: Write) -> None:
    """With the base in both, raw and old are the same weights."""
    file = flow_file(
        (GRPO, NFT),
        (ADVANTAGES + "          policy: carry.policy", ADVANTAGES + "          policy: model"),
        ("          policy: carry.policy\n          per_prompt", "          per_prompt"),
    )
    assert compiled(file).nodes["sample"].inputs.keys() == {"prompts", "conditioning"}


def test_encoded_pictures_have_no_steps(flow_file: Write) -> None:
    more = f"{ONCE}\n        images: {{stage: encode_images, samples: sample.samples}}"
    changes = ((ONCE, more), ("trajectory: sample.trajectory", "trajectory: images.trajectory"))
    assert "grpo trains on steps, and 'images' (encode_images) has none" in refused(flow_file(*changes))
    plan = compiled(flow_file(*changes, (GRPO, "loss: {kind: sft}"), (ADVANTAGES, "")))
    assert plan.nodes["update"].config.model_dump()["loss"]["kind"] == "sft"


def test_guidance_before_a_loss_on_final_latents_is_a_warning(flow_file: Write) -> None:
    changes = ((GRPO, NFT), (PER_PROMPT, "weights: old"), (SDE, "sampler: {kind: ode, guidance_scale: 4.5}"))
    (warning,) = compiled(flow_file(*changes)).warnings
    assert warning.startswith("update: nft trains the conditional branch, but 'sample' samples with guidance_scale 4.5")


def test_a_group_of_one_is_a_warning(flow_file: Write) -> None:
    (warning,) = compiled(flow_file(), "sample.per_prompt=1").warnings
    assert "every advantage is 0" in warning


def test_a_seldom_measured_score_is_a_warning(flow_file: Write) -> None:
    (warning,) = compiled(flow_file(("{stage: score, every: 2, samples", "{stage: score, samples"))).warnings
    assert warning == "eval_score: runs in every iteration, but all it reads comes from 'eval' (every 2)"


def test_a_carry_that_nobody_reads_is_a_warning(flow_file: Write) -> None:
    more = (
        "policy: {start: model, next: update.policy}\n        spare: {start: encode.embeddings, next: again.embeddings}"
    )
    file = flow_file(
        ("policy: {start: model, next: update.policy}", more),
        (ONCE, f"{ONCE}\n        again: {{stage: encode, prompts: prompts.chosen}}"),
    )
    assert compiled(file).warnings == ("nothing in the loop reads carry.spare",)


SECOND = f"""{ONCE}
        second:
          stage: update
          trajectory: sample.trajectory
          conditioning: encode.embeddings
          policy: update.policy
          loss: {{kind: sft}}
          ema: {{decay: 0.9}}
        third:
          stage: sample
          prompts: prompts.chosen
          conditioning: encode.embeddings
          policy: second.policy
          sampler: {{kind: ode}}
          weights: ema
        third_score: {{stage: score, samples: third.samples, rewards: {{size: {{kind: jpeg_size}}}}}}
        compare:
          stage: summarise
          metric: size
          before: {{a: eval_score.rewards}}
          after: {{a: third_score.rewards}}"""


def test_best_is_of_the_policy_that_was_measured(flow_file: Write) -> None:
    plan = compiled(flow_file((ONCE, SECOND), ("loop.best(eval_score.size)", "loop.best(third_score.size)")))
    assert plan.nodes["export"].inputs["policy"] == FromBest("third_score", "size", FromNode("second", "policy"))


def test_best_of_two_policies_is_ambiguous(flow_file: Write) -> None:
    message = refused(flow_file((ONCE, SECOND), ("loop.best(eval_score.size)", "loop.best(compare.better)")))
    assert "'compare' measures more than one policy (carry.policy, second.policy)" in message


EXTERNAL = "external: {mine: {target: 'house.rewards:Mine', config: 'house_configs:MineConfig'}}\npython_path: [code]\n"
REWARDS = "score: {samples: sample.samples, rewards: {size: {kind: jpeg_size}}}"
MINE = "score: {samples: sample.samples, rewards: {size: {kind: external, name: mine, settings: {scale: 2.5}}}}"
CONFIG = """
from schemas.strict import Strict
class MineConfig(Strict):
    scale: float
    colour: str = "red"
"""


def external_file(
    flow_file: Write, *changes: tuple[str, str], config: str = CONFIG, module: str = "house_configs"
) -> Path:
    head = EXTERNAL.replace("house_configs", module)
    file = flow_file((REWARDS, MINE), ("flows:\n", head + "flows:\n"), *changes)
    (file.parent / "code" / "house").mkdir(parents=True)
    (file.parent / "code" / "house" / "rewards.py").write_text("")
    (file.parent / "code" / f"{module}.py").write_text(config)
    return file


def test_an_external_reward_is_filled_from_its_entry(flow_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    file = external_file(flow_file)
    plan = compiled(file)
    config = plan.nodes["score"].config
    assert isinstance(config, ScoreConfig)
    reward = config.rewards["size"]
    assert isinstance(reward, ExternalReward)
    assert (reward.target, reward.settings) == ("house.rewards:Mine", {"scale": 2.5, "colour": "red"})
    assert plan.python_path == (str(file.parent / "code"),)


@pytest.mark.parametrize(
    ("module", "change", "config", "words"),
    [
        (
            "m_unlisted",
            ("name: mine", "name: mien"),
            CONFIG,
            r"rewards.size.name: no entry 'mien'.*Did you mean 'mine'",
        ),
        ("m_target", ("name: mine", "name: mine, target: 'os:system'"), CONFIG, r"size.target: `target` follows from"),
        ("m_field", ("scale: 2.5", "scael: 2.5"), CONFIG, r"settings.scael: unknown field 'scael'.*'scale'"),
        ("m_type", ("scale: 2.5", "scale: much"), CONFIG, r"settings.scale: wanted a valid number, got 'much'"),
        (
            "m_import",
            ("seed: 3", "seed: 4"),
            "import nowhere_at_all",
            r"external.mine.config: cannot import 'm_import'",
        ),
        ("m_class", ("seed: 3", "seed: 4"), "MineConfig = 3", r"has no pydantic class 'MineConfig'"),
        (
            "m_open",
            ("seed: 3", "seed: 4"),
            "from pydantic import BaseModel\nclass MineConfig(BaseModel):\n    scale: float",
            r"takes unknown fields in silence",
        ),
    ],
)
def test_external_mistakes(
    flow_file: Write,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    change: tuple[str, str],
    config: str,
    words: str,
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    message = refused(external_file(flow_file, change, config=config, module=module))
    assert re.search(words, message), message
    assert re.match(r".*flows.yaml:\d+:\d+: ", message), message


def test_an_entry_without_config_takes_no_settings(flow_file: Write) -> None:
    file = external_file(flow_file, (", config: 'house_configs:MineConfig'", ""))
    assert "names no config class, so the reward takes no settings" in refused(file)


@pytest.mark.slow
def test_a_config_module_that_loads_torch(flow_file: Write) -> None:
    file = external_file(flow_file, config="import torch\n" + CONFIG, module="m_torch")
    # In a process of its own: this one has torch already.
    command = [sys.executable, "-m", "pipelines.cli", "plan", "small", "--file", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "external.mine.config: 'm_torch' loads torch" in done.stderr


def test_an_optimizer_of_an_extra_that_is_not_installed_is_refused(flow_file: Write) -> None:
    message = refused(flow_file((GRPO, f"{GRPO}\n          optimizer: {{kind: adamw_8bit}}")))
    assert "update.optimizer.kind: adamw_8bit needs bitsandbytes: pip install 'rewardflow[adam8bit]'" in message
