import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.plan import FromBest, FromCarry, FromHistory, FromLast, FromModel, FromNode, Plan
from schemas.contracts import CONTRACTS, SampleConfig, UpdateConfig
from schemas.errors import FlowFileError
from schemas.flow import NodeOptions

Write = Callable[..., Path]
ROOT = Path(__file__).parents[2]
EXPORT = "export: {policy: loop.best(eval_score.size)}"


def compiled(file: Path, *sets: str) -> Plan:
    return compile_flow(load(file, "small", sets), "small")


def refused(file: Path, *sets: str) -> str:
    with pytest.raises(FlowFileError) as error:
        compiled(file, *sets)
    return str(error.value)


def test_every_shipped_flow_compiles() -> None:
    file = load(ROOT / "flows.yaml")
    assert {"shapes", "shapes_grpo", "pretrain_shapes"} <= set(file.spec.flows)
    for name in file.spec.flows:
        assert compile_flow(file, name).nodes


def test_fields_of_a_stage_never_share_a_name() -> None:
    for name, contract in CONTRACTS.items():
        doors = [set(contract.config.model_fields), set(contract.inputs.model_fields), set(NodeOptions.model_fields)]
        assert len(set.union(*doors)) == sum(map(len, doors)), name


def test_nodes_edges_and_order(flow_file: Write, tmp_path: Path) -> None:
    plan = compiled(flow_file())
    assert [node.name for node in plan.section("before")] == ["prompts", "encode"]
    body = [node.name for node in plan.section("body")]
    assert body == ["sample", "score", "advantage", "update", "eval", "eval_score"]
    update = plan.nodes["update"]
    assert update.inputs == {
        "trajectory": FromNode("sample", "trajectory"),
        "conditioning": FromNode("encode", "embeddings"),
        "advantages": FromNode("advantage", "advantages"),
        "policy": FromCarry("policy"),
    }
    assert isinstance(update.config, UpdateConfig)
    assert update.config.model.path == str(tmp_path / "model")
    assert (plan.nodes["eval"].stage, plan.nodes["eval"].every) == ("sample", 2)
    assert plan.nodes["export"].inputs == {"policy": FromBest("eval_score", "size", FromCarry("policy"))}
    assert (plan.carry["policy"].start, plan.carry["policy"].next) == (FromModel(), FromNode("update", "policy"))
    assert (plan.guards["collapse"].node, plan.guards["collapse"].metric) == ("eval_score", "size")
    assert (plan.times, plan.seed, plan.base, plan.warnings) == (4, 3, tmp_path, ())


def test_a_node_may_have_its_own_model(flow_file: Write) -> None:
    file = flow_file(("encode: {prompts", "encode: {model: {kind: sd3, path: owner/name}, prompts"))
    config = compiled(file).nodes["encode"].config
    assert config.model_dump()["model"]["path"] == "owner/name"


def test_parallel_branches_and_when(flow_file: Write) -> None:
    more = "advantage: {rewards: score.rewards}\n        "
    more += "other: {stage: score, when: score.size/std, samples: sample.samples"
    file = flow_file(
        ("advantage: {rewards: score.rewards}", more + ", rewards: {big: {kind: jpeg_size, prefer: large}}}")
    )
    plan = compiled(file)
    assert plan.nodes["other"].when == FromNode("score", "size/std")
    assert plan.nodes["other"].inputs == {"samples": FromNode("sample", "samples")}


def test_last_history_and_mappings(flow_file: Write) -> None:
    more = f"""{EXPORT}
      copy: {{stage: export, policy: loop.last(update.policy)}}
      base: {{stage: export, policy: model}}
      summarise:
        metric: size
        before: {{a: loop.last(score.rewards)}}
        after: {{a: loop.last(eval_score.rewards)}}
        curves: {{reward: loop.history(score.size), norm: loop.history( update.grad_norm )}}"""
    plan = compiled(flow_file((EXPORT, more)))
    assert plan.nodes["copy"].inputs == {"policy": FromLast("update", "policy")}
    assert plan.nodes["base"].inputs == {"policy": FromModel()}
    curves = {"reward": FromHistory("score", "size"), "norm": FromHistory("update", "grad_norm")}
    assert plan.nodes["summarise"].inputs["curves"] == curves
    assert plan.nodes["summarise"].inputs["after"] == {"a": FromLast("eval_score", "rewards")}


def test_best_follows_a_policy_made_in_the_body(flow_file: Write) -> None:
    file = flow_file(("policy: carry.policy\n          weights: ema", "policy: update.policy\n          weights: ema"))
    best = compiled(file).nodes["export"].inputs["policy"]
    assert best == FromBest("eval_score", "size", FromNode("update", "policy"))


def test_set_reaches_the_config(flow_file: Write) -> None:
    config = compiled(flow_file(), "sample.per_prompt=16", "sample.sampler.window={kind: random, range: [0, 2]}").nodes[
        "sample"
    ]
    assert isinstance(config.config, SampleConfig)
    assert config.config.per_prompt == 16
    assert config.config.sampler.model_dump()["window"] == {"kind": "random", "size": 1, "range": (0, 2)}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("encode: {prompts", "encod: {prompts", "6:7.*|no stage 'encod'.*Did you mean 'encode'"),
        ("stage: score, every", "stage: scor, every", r"eval_score.stage: no stage 'scor'.*'score'"),
        ("per_prompt: 4", "per_promt: 4", r":\d+:11: .*unknown field 'per_promt'.*Did you mean 'per_prompt'"),
        ("clip: 1e-4", "clp: 1e-4", r"update.loss.clp: unknown field 'clp'.*Did you mean 'clip'"),
        ("{kind: grpo, clip: 1e-4}", "{clip: 1e-4}", r"update.loss: the field `kind` is missing. Known: .*grpo"),
        ("kind: grpo, clip", "kind: grop, clip", r"update.loss.kind: unknown kind 'grop'.*Did you mean 'grpo'"),
        ("clip: 1e-4", "clip: small", r"update.loss.clip: wanted a valid number, got 'small'"),
        ("rewards: score.rewards}", "rewards: score.rewards, kind: groups}", r"unknown value 'groups'.*'group'"),
        ("flow_sde, steps: 6", "flow_sde, steps: 1", r"sample.sampler: needs steps >= 2"),
        ("path: prompts.txt", "path: prompt.txt", r"prompts.path: no prompt file at /.*prompt.txt"),
        ("path: prompts.txt", "path: data/prompts.txt", r"prompts.path: no prompt file at /.*data/prompts.txt"),
        ("path: model}", "path: modle}", r":5:30: flows.small.model.path: no model folder at /.*modle"),
        ("model: {kind: sd3, path: model}", "", r"needs a model"),
        ("path: model}", "}", r"the model has no path"),
        ("encode: {prompts: prompts.chosen}", "encode: {}", r"needs 'prompts'; prompts.chosen would fit"),
        (
            "samples: sample.samples",
            "samples: sample.trajectory",
            r"is TrajectoryTable, but score.samples wants Samples",
        ),
        ("samples: sample.samples", "samples: sample.pictures", r"no output 'pictures'. Known: samples, trajectory"),
        ("samples: sample.samples", "samples: sampel.samples", r"no node 'sampel'.*Did you mean 'sample'"),
        ("samples: sample.samples", "samples: sample", r"wants an edge .*got 'sample'"),
        ("samples: sample.samples", "samples: 3", r"wants an edge .*got 3"),
        ("samples: sample.samples", "samples: model", r"`model` is the base model, no SamplesTable"),
        ("advantage: {rewards", "advantage: {every: 0, rewards", r"every: wanted greater than or equal to 1"),
        ("encode: {prompts", "encode: {every: 2, prompts", r"only a stage of the loop's body can say `every`"),
        (EXPORT, "export: {policy: carry.policy}", r"carry.policy exists only in the loop's body"),
        (EXPORT, "export: {policy: update.policy}", r"write loop.last\(update.policy\)"),
        (EXPORT, "export: {policy: loop.lats(update.policy)}", r"no loop.lats.*Did you mean 'last'"),
        (EXPORT, "export: {policy: loop.last(encode.embeddings)}", r"'encode' is not in the loop's body"),
        (EXPORT, "export: {policy: loop.last(update)}", r"wants node.output, got 'update'"),
        (EXPORT, "export: {policy: loop.best(eval_score.sizes)}", r"no metric 'sizes'.*Did you mean 'size'"),
        (EXPORT, "export: {policy: loop.history(score.size)}", r"HistoryRef, but export.policy wants PolicyRef"),
        (
            EXPORT,
            "s: {stage: score, samples: loop.best(score.size), rewards: {a: {kind: jpeg_size}}}",
            r"gives a policy",
        ),
        (EXPORT, "sample: {stage: export, policy: model}", r"the name 'sample' is taken"),
        (EXPORT, "times: {stage: export, policy: model}", r"a node cannot be called 'times'"),
        ("encode: {prompts: prompts.chosen}", "encode: {prompts: render.samples}", r"no node 'render'"),
        ("next: update.policy", "next: update.polcy", r"carry.policy.next: node 'update' .*Did you mean 'policy'"),
        ("next: update.policy", "next: encode.embeddings", r"wants an output of a node in the loop's body"),
        (
            "start: model",
            "start: encode.embeddings",
            r"encode.embeddings is ConditioningTable, but update.policy is Poli",
        ),
        ("start: model", "start: update.policy", r"runs later than"),
        ("metric: eval_score.size", "metric: eval_score.siz", r"stop.collapse.metric: .*Did you mean 'size'"),
        ("metric: eval_score.size", "metric: encode.size", r"no node 'encode' in the loop's body"),
        ("micro_batch: {sample: 3}", "micro_batch: {smaple: 3}", r"micro_batch.smaple: no node or stage.*'sample'"),
        ("micro_batch: {sample: 3}", "micro_batch: {sample: 0}", r"micro_batch.sample: wanted at least 1"),
    ],
)
def test_mistakes(flow_file: Write, old: str, new: str, words: str) -> None:
    file = flow_file((old, new))
    message = refused(file)
    assert re.search(words, message), message
    assert re.match(rf"{re.escape(str(file))}:\d+:\d+: flows\.small\.", message), message


def test_a_cycle_is_named(flow_file: Write) -> None:
    more = """advantage: {rewards: score.rewards}
        a: {stage: sample, prompts: b.chosen, conditioning: encode.embeddings, sampler: {kind: ode}}
        b: {stage: prompts, path: prompts.txt, when: c.size}
        c: {stage: score, samples: a.samples, rewards: {size: {kind: jpeg_size}}}"""
    message = refused(flow_file(("advantage: {rewards: score.rewards}", more)))
    assert "the nodes wait for each other: a -> b -> c -> a" in message


def test_mistakes_of_all_nodes_come_together(flow_file: Write) -> None:
    lines = refused(flow_file(("per_prompt: 4", "per_promt: 4"), ("clip: 1e-4", "clip: 2"))).splitlines()
    assert len(lines) == 2


def test_a_model_folder_must_be_whole(flow_file: Write, tmp_path: Path) -> None:
    file = flow_file()
    (tmp_path / "model" / "transformer" / "weights.safetensors").unlink()
    assert re.search(r":5:30: flows.small.model.path: .* lacks the transformer's weights", refused(file))
    (tmp_path / "model" / "transformer" / "config.json").unlink()
    assert re.search(r":5:30: flows.small.model.path: .* lacks the transformer \(", refused(file))
    (tmp_path / "model" / "model_index.json").unlink()
    message = refused(file)
    assert "lacks model_index.json" in message
    assert len(message.splitlines()) == 1, "one flow's model is one mistake"


def test_an_empty_prompt_file(flow_file: Write, tmp_path: Path) -> None:
    file = flow_file()
    (tmp_path / "prompts.txt").write_text("\n  \n")
    assert "prompts.txt is empty; write one prompt a line" in refused(file)


def test_a_set_is_blamed_for_its_mistake(flow_file: Write) -> None:
    message = refused(flow_file(), "sample.smapler=3")
    assert message.startswith("--set sample.smapler=3: flows.small.loop.body.sample.smapler: unknown field")


def test_unknown_flow(flow_file: Write) -> None:
    with pytest.raises(FlowFileError, match=r"no flow 'smal'.*Did you mean 'small'"):
        compile_flow(load(flow_file()), "smal")
