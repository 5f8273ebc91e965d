"""Rules that hold between nodes: which weights are sampled, what a loss needs, whose advantages they are."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence

from pipelines.edges import policy_readers, text_of
from pipelines.mistakes import Mistakes
from pipelines.nodes import place_of
from pipelines.plan import (
    Edge,
    FromBest,
    FromCarry,
    FromLast,
    FromModel,
    FromNode,
    Plan,
    PlanNode,
)
from schemas.contracts import (
    CONTRACTS,
    AdvantageConfig,
    EncodeConfig,
    EncodeImagesConfig,
    ExportConfig,
    SampleConfig,
    ScoreConfig,
    SummariseConfig,
    UpdateConfig,
)
from schemas.errors import closest
from schemas.losses import WeightSet
from schemas.models import ModelConfig
from schemas.sampling import SAMPLERS, StochasticSampler

_STOCHASTIC = [kind.model_fields["kind"].default for kind in SAMPLERS if issubclass(kind, StochasticSampler)]


def check(plan: Plan, found: Mistakes) -> None:
    """All rules, on a plan whose nodes and edges are sound by themselves."""
    for node in plan.nodes.values():
        _check_model(plan, node, found)
        match node.config:
            case UpdateConfig():
                _check_update(plan, node, node.config, found)
            case SampleConfig() | ExportConfig():
                _check_weights(plan, node, node.config.weights, found)
            case AdvantageConfig():
                _check_advantage(plan, node, found)
            case SummariseConfig():
                _check_summary(plan, node, node.config, found)
        if isinstance(node.config, ExportConfig) and node.config.format == "lora" and node.config.model.lora is None:
            message = "format lora needs a model with a `lora` block; full weights are exported as `format: pipeline`"
            found.add(message, _at(plan, node, "format"))
    _check_resources(plan, found)
    _warn(plan, found)


def _at(plan: Plan, node: PlanNode, *fields: str) -> tuple[str | int, ...]:
    return place_of(plan.flow, node.section, node.name, *fields)


def model_of(node: PlanNode) -> ModelConfig | None:
    """The model that a node loads, if its stage loads one."""
    kinds = (EncodeConfig, EncodeImagesConfig, SampleConfig, UpdateConfig, ExportConfig)
    return node.config.model if isinstance(node.config, kinds) else None


def single(node: PlanNode, name: str) -> Edge | None:
    """An edge of an input that is no mapping; none when it is absent."""
    edge = node.inputs.get(name)
    return None if isinstance(edge, Mapping) else edge


def source(plan: Plan, node: PlanNode, name: str) -> PlanNode | None:
    """The node that an input comes from, if it comes straight from one."""
    edge = single(node, name)
    return plan.nodes[edge.node] if isinstance(edge, FromNode | FromLast) else None


def makers(plan: Plan, edge: Edge | None) -> Iterator[PlanNode]:
    """The update nodes whose policy may arrive by an edge: none for the base model."""
    match edge:
        case FromCarry(name):
            yield plan.nodes[plan.carry[name].next.node]
            yield from makers(plan, plan.carry[name].start)
        case FromNode(node, _) | FromLast(node, _):
            yield plan.nodes[node]
        case FromBest():
            yield from makers(plan, edge.policy)


def sets_of(config: UpdateConfig) -> tuple[WeightSet, ...]:
    """The sets of weights that an update leaves behind."""
    old: tuple[WeightSet, ...] = ("old",) if config.loss.needs.old_policy else ()
    ema: tuple[WeightSet, ...] = ("ema",) if config.ema is not None else ()
    return ("raw", *old, *ema)


def _check_model(plan: Plan, node: PlanNode, found: Mistakes) -> None:
    model = model_of(node)
    if model is None:
        return
    if model.path is None and "pipeline" not in node.inputs:
        message = "the model has no path: name a folder or hub id in `model.path`, or give the node a `pipeline`"
        found.add(message, _at(plan, node, "model"), key=True)
    if plan.resources.context_parallel > 1:
        _check_shared_tokens(plan, node, model, found)
    for maker in makers(plan, single(node, "policy")):
        made = model_of(maker)
        if made is None or maker is node:
            continue
        names = [name for name in ("kind", "path", "revision", "lora") if getattr(made, name) != getattr(model, name)]
        if names:
            message = (
                f"differs in {', '.join(names)} from the model of {maker.name!r}, which makes the policy read here"
            )
            found.add(message, _at(plan, node, "model"))


def _check_shared_tokens(plan: Plan, node: PlanNode, model: ModelConfig, found: Mistakes) -> None:
    """What diffusers computes otherwise, or not at all, where ranks share tokens."""
    with_it = f"resources.context_parallel {plan.resources.context_parallel}"
    if model.attention != "native":
        message = f"{model.attention} is not used in the backward pass of {with_it}; write native"
        found.add(message, _at(plan, node, "model", "attention"))
    if model.lora is not None and model.lora.dropout:
        message = f"{with_it} would drop the same inputs of every rank's tokens; leave it out"
        found.add(message, _at(plan, node, "model", "lora", "dropout"))


def _check_weights(plan: Plan, node: PlanNode, weights: WeightSet, found: Mistakes) -> None:
    edge = single(node, "policy")
    at = _at(plan, node, "weights")
    remedy = {
        "ema": "give that update `ema: {decay: 0.95}` or write `weights: raw` here",
        "old": "only a loss with an old policy, such as nft, leaves them; write `weights: raw` here",
        "raw": "",
    }
    for maker in makers(plan, edge):
        if isinstance(maker.config, UpdateConfig) and weights not in sets_of(maker.config):
            found.add(f"update {maker.name!r} leaves no {weights!r} weights; {remedy[weights]}", at)
            return
    if isinstance(edge, FromBest):
        _check_measured(plan, node, edge, weights, found)


def _check_measured(plan: Plan, node: PlanNode, edge: FromBest, weights: WeightSet, found: Mistakes) -> None:
    """The best policy is best in the weights that were measured; with an average, those are to be measured."""
    body = {n.name: n for n in plan.section("body")}
    for reader, _ in policy_readers(edge.node, body):
        if not isinstance(reader.config, SampleConfig):
            continue
        measured = reader.config.weights
        averaged = [m.name for m in makers(plan, edge) if isinstance(m.config, UpdateConfig) and m.config.ema]
        if averaged and measured != "ema":
            message = f"{text_of(edge)} would choose by the {measured!r} weights; write `weights: ema` here: "
            found.add(message + f"update {averaged[0]!r} keeps an average", _at(plan, reader, "weights"))
        elif measured != weights:
            message = f"is {weights!r}, but {text_of(edge)} measured the {measured!r} weights of {reader.name!r}"
            found.add(f"{message}; write `weights: {measured}`", _at(plan, node, "weights"))


def _check_update(plan: Plan, node: PlanNode, config: UpdateConfig, found: Mistakes) -> None:
    loss, needs = config.loss.kind, config.loss.needs
    at = _at(plan, node, "loss")
    if needs.advantages and "advantages" not in node.inputs:
        found.add(f"{loss} needs advantages: add `advantages: NODE.advantages`", at)
    if not needs.advantages and "advantages" in node.inputs:
        found.add(f"{loss} does not use advantages; leave the edge out", _at(plan, node, "advantages"))
    if config.old is not None and not needs.old_policy:
        found.add(f"{loss} has no old policy; leave `old` out", _at(plan, node, "old"))
    if config.kl is not None and config.kl.kind != "velocity" and not needs.states:
        message = f"kind {config.kl.kind!r} compares steps, and {loss} trains on final latents; write `kind: velocity`"
        found.add(message, _at(plan, node, "kl"))
    if needs.states and config.model.lora is not None and config.model.lora.dropout:
        message = f"{loss} replays log-probs, which dropout {config.model.lora.dropout:g} would change; leave it out, "
        found.add(f"{message}or use a loss on final latents: nft or sft", _at(plan, node, "model", "lora", "dropout"))
    if config.optimizer.kind == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        message = "adamw_8bit needs bitsandbytes: pip install 'rewardflow[adam8bit]', or write adamw"
        found.add(message, _at(plan, node, "optimizer", "kind"))
    drawn = source(plan, node, "trajectory")
    if drawn is None:
        return
    if isinstance(drawn.config, SampleConfig):
        _check_sampling(plan, node, config, drawn, drawn.config, found)
    elif needs.states:
        remedy = "use a sample node, or a loss on final latents: nft or sft"
        found.add(f"{loss} trains on steps, and {drawn.name!r} ({drawn.stage}) has none: {remedy}", at)
    _check_same_pictures(plan, node, drawn, found)


def _check_sampling(
    plan: Plan, node: PlanNode, config: UpdateConfig, drawn: PlanNode, sample: SampleConfig, found: Mistakes
) -> None:
    """What a loss asks of the node that sampled."""
    loss, needs = config.loss.kind, config.loss.needs
    if needs.states and not isinstance(sample.sampler, StochasticSampler):
        first, *others = _STOCHASTIC
        message = f"{loss} needs the log-probs of stochastic steps, but the sampler of {drawn.name!r} is "
        found.add(
            f"{message}{sample.sampler.kind!r}; write `sampler: {{kind: {first}}}` there, or {', '.join(others)}",
            _at(plan, node, "loss"),
        )
    if needs.states and sample.model != config.model:
        names = [n for n in type(sample.model).model_fields if getattr(sample.model, n) != getattr(config.model, n)]
        message = f"differs in {', '.join(names)} from the model of {drawn.name!r}; {loss} replays its steps exactly"
        found.add(message, _at(plan, node, "model"))
    if not needs.states and sample.sampler.guided:
        found.warnings.append(
            f"{node.name}: {loss} trains the conditional branch, but {drawn.name!r} samples with guidance_scale "
            f"{sample.sampler.guidance_scale:g}; 1 is usual here"
        )
    if needs.sampled_from is None:
        return
    read, improved = single(drawn, "policy") or FromModel(), single(node, "policy") or FromModel()
    if read != improved:
        message = f"{node.name!r} improves {text_of(improved)}, but its trajectory was sampled by {drawn.name!r} from "
        found.add(f"{message}{text_of(read)}; {loss} wants one policy in both", _at(plan, node, "policy"))
    elif sample.weights != needs.sampled_from and not isinstance(read, FromModel):
        message = f"{loss} ({node.name!r}) learns from samples of the {needs.sampled_from!r} weights, not "
        found.add(f"{message}{sample.weights!r}; write `weights: {needs.sampled_from}`", _at(plan, drawn, "weights"))


def _check_same_pictures(plan: Plan, node: PlanNode, drawn: PlanNode, found: Mistakes) -> None:
    advantage = source(plan, node, "advantages")
    score = source(plan, advantage, "rewards") if advantage else None
    scored = source(plan, score, "samples") if score else None
    pictured = drawn if isinstance(drawn.config, SampleConfig) else source(plan, drawn, "samples")
    if scored is not None and pictured is not None and scored is not pictured:
        message = f"are those of pictures by {scored.name!r}, but the trajectory is of {pictured.name!r}"
        found.add(message, _at(plan, node, "advantages"))


def _check_advantage(plan: Plan, node: PlanNode, found: Mistakes) -> None:
    score = source(plan, node, "rewards")
    if score is None or not isinstance(score.config, ScoreConfig):
        return
    if not any(reward.weight for reward in score.config.rewards.values()):
        found.add(f"every reward of {score.name!r} has weight 0, so no advantage is left", _at(plan, node, "rewards"))
    sample = source(plan, score, "samples")
    if sample is not None and isinstance(sample.config, SampleConfig) and sample.config.per_prompt == 1:
        found.warnings.append(f"{node.name}: {sample.name!r} draws one picture a prompt, so every advantage is 0")


def _check_summary(plan: Plan, node: PlanNode, config: SummariseConfig, found: Mistakes) -> None:
    for name in ("before", "after"):
        edges = node.inputs.get(name)
        for edge in edges.values() if isinstance(edges, Mapping) else ():
            score = plan.nodes[edge.node] if isinstance(edge, FromNode | FromLast) else None
            if (
                score is not None
                and isinstance(score.config, ScoreConfig)
                and config.metric not in score.config.rewards
            ):
                hint = closest(config.metric, score.config.rewards)
                found.add(f"{score.name!r} has no reward {config.metric!r}. {hint}", _at(plan, node, "metric"))


def _check_resources(plan: Plan, found: Mistakes) -> None:
    known: Sequence[str] = [*plan.nodes, *sorted(CONTRACTS)]
    for name, size in plan.resources.micro_batch.items():
        at = ("flows", plan.flow, "resources", "micro_batch", name)
        if name not in known:
            found.add(f"no node or stage {name!r}. {closest(name, set(known))}", at, key=True)
        if size < 1:
            found.add(f"wanted at least 1, got {size}", at)


def _warn(plan: Plan, found: Mistakes) -> None:
    """What is lawful but seldom meant."""
    body = {node.name: node for node in plan.section("body")}
    read = {edge.name for node in body.values() for edge in node.edges() if isinstance(edge, FromCarry)}
    found.warnings += [f"nothing in the loop reads carry.{name}" for name in plan.carry if name not in read]
    for node in body.values():
        sources = [body[edge.node] for edge in node.edges() if isinstance(edge, FromNode) and edge.node in body]
        if node.every is None and sources and all(source.every for source in sources):
            seldom = ", ".join(f"{source.name!r} (every {source.every})" for source in sources)
            found.warnings.append(f"{node.name}: runs in every iteration, but all it reads comes from {seldom}")
