"""A plan as text for a terminal of 100 columns, and as JSON."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipelines.checks import model_of, source
from pipelines.edges import text_of
from pipelines.plan import Edge, Plan, PlanNode
from schemas.contracts import EncodeImagesConfig, PromptsConfig, SampleConfig, UpdateConfig
from schemas.losses import LogitNormalTimes, NftLoss, ScheduleTimes, SftLoss, UniformTimes
from schemas.sampling import StochasticSampler
from schemas.shapes import RenderConfig

WIDTH = 100
_TITLES = {"before": "once, before the loop", "after": "once, after the loop"}


def as_text(plan: Plan) -> str:
    """The folded DAG: the loop's body stands once, in a box."""
    lines = [f"{plan.flow}: {plan.description}", *_facts(plan)]
    for section in ("before", "body", "after"):
        nodes = plan.section(section)
        if not nodes:
            continue
        body = [line for node in nodes for line in _node(node, _columns(plan))]
        if section == "body":
            lines += ["", *_box(plan, body)]
        else:
            title = _TITLES[section] if plan.times else "stages"
            lines += ["", title, *(f"  {line}" for line in body)]
    calls = list(_calls(plan))
    if calls:
        title = "model calls in one iteration" if plan.times else "model calls"
        lines += ["", title, *(f"  {line}" for line in calls)]
    for warning in plan.warnings:
        lines += ["", *textwrap.wrap(f"warning: {warning}", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


def as_json(plan: Plan) -> str:
    """The plan as JSON, edges as they are written in flows.yaml."""
    out = {field.name: _jsonable(getattr(plan, field.name)) for field in fields(plan)}
    return json.dumps(out, indent=2)


def _facts(plan: Plan) -> list[str]:
    models = {_model(node) for node in plan.nodes.values()} - {None}
    facts = [f"seed {plan.seed}", *sorted(model for model in models if model)]
    ranks = plan.resources.processes
    facts.append(f"{ranks} process{'es' if ranks > 1 else ''} on {plan.resources.device}")
    if plan.schedule:
        facts.append(f"starts at {plan.schedule.cron!r} ({plan.schedule.timezone})")
    return textwrap.wrap("; ".join(facts), WIDTH, initial_indent="  ", subsequent_indent="  ")


def _model(node: PlanNode) -> str | None:
    model = model_of(node)
    if model is None:
        return None
    weights = f"LoRA of rank {model.lora.rank}" if model.lora else "full weights"
    where = _path(model.path) if model.path else "made in this run"
    return f"model {model.kind} ({where}), {weights}, {model.dtype}"


def _box(plan: Plan, body: list[str]) -> list[str]:
    """The loop: what is carried round, the body, and what may end it."""
    head = f"┌─ loop, {plan.times} time{'s' if plan.times > 1 else ''} "
    carried = [
        f"carry {name}: starts as {text_of(carry.start)}, then {text_of(carry.next)}"
        for name, carry in plan.carry.items()
    ]
    stops = [
        f"stop {name}: when {item.node}.{item.metric} falls {item.guard.falls:g} below its best, {item.guard.action}"
        for name, item in plan.guards.items()
    ]
    inside = [*carried, *([""] if carried else []), *body, *([""] if stops else []), *stops]
    rows = [f"│ {line}".rstrip() for line in inside]
    return [head + "─" * (WIDTH - len(head)), *rows, "└" + "─" * (WIDTH - 1)]


def _columns(plan: Plan) -> tuple[int, int]:
    """Widths of the columns of names and stages."""
    names = max(len(node.name) for node in plan.nodes.values())
    stages = max(len(line) for node in plan.nodes.values() for line in _stage(node))
    return names + 2, stages + 2


def _stage(node: PlanNode) -> list[str]:
    often = [f"every {node.every}"] if node.every else []
    return [node.stage, *often, *([f"when {text_of(node.when)}"] if node.when else [])]


def _node(node: PlanNode, columns: tuple[int, int]) -> Iterator[str]:
    """A node's lines in three columns: name; stage and how often; edges, then settings."""
    edges = [f"{name} <- {_edges(edge)}" for name, edge in node.inputs.items()]
    settings = [f"{key}: {value}" for key, value in _settings(node.config)]
    stage = _stage(node)
    right = [*_filled(edges, WIDTH - 2 - sum(columns)), *_filled(settings, WIDTH - 2 - sum(columns))]
    for index in range(max(len(stage), len(right))):
        name = node.name if index == 0 else ""
        middle = stage[index] if index < len(stage) else ""
        text = right[index] if index < len(right) else ""
        yield f"{name:<{columns[0]}}{middle:<{columns[1]}}{text}".rstrip()


def _filled(items: list[str], width: int) -> list[str]:
    """Lines of items with commas between; only an item that is longer than a line is broken."""
    lines: list[str] = []
    for index, item in enumerate(items):
        text = item + ("," if index + 1 < len(items) else "")
        if lines and len(lines[-1]) + 1 + len(text) <= width:
            lines[-1] += f" {text}"
        else:
            lines += textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def _edges(edge: Edge | Mapping[str, Edge]) -> str:
    if isinstance(edge, Mapping):
        return "{" + ", ".join(f"{name}: {text_of(item)}" for name, item in edge.items()) + "}"
    return text_of(edge)


def _settings(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Fields that the file sets, `kind` of every union, and paths; the model is told once for the flow."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name == "model" or (name not in config.model_fields_set and name != "kind"):
            continue
        yield from _setting(f"{prefix}{name}", value)


def _setting(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        inner = list(_settings(value))
        kind = next((text for key, text in inner if key == "kind"), "")
        rest = ", ".join(f"{key}: {text}" for key, text in inner if key != "kind")
        yield name, f"{kind} ({rest})".strip() if rest else kind or "default"
    elif isinstance(value, dict):
        inner = [f"{key}: {text}" for key, item in value.items() for _, text in _setting(str(key), item)]
        yield name, "{" + ", ".join(inner) + "}"
    elif isinstance(value, tuple | list):
        yield name, "[" + ", ".join(str(item) for item in value) + "]"
    else:
        yield name, _path(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _path(text: str) -> str:
    """A path from the folder one stands in, where that is shorter."""
    path = Path(text)
    if not path.is_absolute():
        return text
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else text


def _calls(plan: Plan) -> Iterator[str]:
    """How many times the nodes of one iteration (or of a flow without a loop) call the model."""
    section = "body" if plan.times else "before"
    for node in plan.section(section):
        if isinstance(node.config, SampleConfig):
            rows, times, what = num_samples(plan, node), node.config.sampler.steps, "step"
        elif isinstance(node.config, UpdateConfig):
            drawn = source(plan, node, "trajectory")
            rows = num_samples(plan, drawn) if drawn else None
            times, what = _num_trained(node.config, drawn)
        else:
            continue
        size = plan.resources.micro_batch_of(node.name, node.stage)
        count = f"{-(-rows // size) * times:,}" if rows is not None else "unknown"
        seldom = f", every {node.every} iterations" if node.every else ""
        pictures = f"{rows:,}" if rows is not None else "? (the number of prompts is not known yet)"
        plural = "s" if times > 1 else ""
        yield f"{node.name}: {count} ({pictures} pictures x {times} {what}{plural}, {size} in a micro-batch){seldom}"


def _num_trained(config: UpdateConfig, drawn: PlanNode | None) -> tuple[int, str]:
    """Model calls for one picture in an update: (number, what they are)."""
    if isinstance(config.loss, NftLoss | SftLoss):
        times: UniformTimes | LogitNormalTimes | ScheduleTimes = config.loss.times
        return config.epochs * times.draws, "(time, noise) pair"
    sampler = drawn.config.sampler if drawn and isinstance(drawn.config, SampleConfig) else None
    steps = len(sampler.window.steps(sampler.steps, 0, 0)) if isinstance(sampler, StochasticSampler) else 1
    return config.epochs * steps, "stochastic step"


def num_samples(plan: Plan, node: PlanNode) -> int | None:
    """Rows that a node's table of pictures or latents will have; none when it is not known before the run."""
    if isinstance(node.config, EncodeImagesConfig):
        drawn = source(plan, node, "samples")
        return num_samples(plan, drawn) if drawn else None
    if not isinstance(node.config, SampleConfig | RenderConfig):
        return None
    number = num_prompts(plan, node)
    return number * node.config.per_prompt if number else None


def num_prompts(plan: Plan, node: PlanNode) -> int | None:
    """Prompts that a node reads; none when their number is not known before the run."""
    prompts = source(plan, node, "prompts")
    if prompts is None or not isinstance(prompts.config, PromptsConfig):
        return None
    return prompts.config.choose or _num_lines(Path(prompts.config.path))


def _num_lines(path: Path) -> int | None:
    """Prompts in a text file: its lines that are not blank."""
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, PlanNode):
        plain = {"stage": value.stage, "section": value.section, "every": value.every}
        when = text_of(value.when) if value.when else None
        inputs = {name: _jsonable(edge) for name, edge in value.inputs.items()}
        return {**plain, "when": when, "config": _jsonable(value.config), "inputs": inputs}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, Edge):
        return text_of(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return {field.name: _jsonable(getattr(value, field.name)) for field in fields(value)}
