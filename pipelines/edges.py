"""Edges: from text such as ``sample.samples`` to typed pointers, checked against the contracts."""

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from pipelines.mistakes import Mistakes, models_in
from pipelines.nodes import Draft
from pipelines.plan import Edge, FromBest, FromCarry, FromHistory, FromLast, FromModel, FromNode, PlanNode
from schemas.artifacts import HistoryRef, PolicyRef
from schemas.doors import Contract
from schemas.errors import UserError, closest

_LOOP = re.compile(r"^loop\.(\w+)\((.*)\)$")
_NODE = re.compile(r"^(\w+)\.(\S+)$")
_FORMS = "node.output, carry.name, model, loop.last(node.output), loop.best(node.metric) or loop.history(node.metric)"
_READS = {"before": ("before",), "body": ("before", "body"), "after": ("before", "after")}


@dataclass(frozen=True)
class Scope:
    """What an edge may point to: nodes by name, and the type of each carried value."""

    nodes: Mapping[str, Draft]
    carry: Mapping[str, type[BaseModel] | None]
    built: Mapping[str, PlanNode]  # of the sections before this one


def text_of(edge: Edge) -> str:
    """An edge as it is written in flows.yaml."""
    match edge:
        case FromNode(node, output):
            return f"{node}.{output}"
        case FromCarry(name):
            return f"carry.{name}"
        case FromModel():
            return "model"
        case FromLast(node, output):
            return f"loop.last({node}.{output})"
        case FromBest(node, metric, _):
            return f"loop.best({node}.{metric})"
        case FromHistory(node, metric):
            return f"loop.history({node}.{metric})"


def outputs_of(contract: Contract) -> dict[str, type[BaseModel]]:
    """Outputs that an edge may name, and their types."""
    fields = contract.outputs.model_fields.items()
    return {name: models_in(field.annotation)[0] for name, field in fields if models_in(field.annotation)}


def wired(draft: Draft, scope: Scope, found: Mistakes) -> dict[str, Edge | Mapping[str, Edge]]:
    """The checked edges of a node; an input left out or null is absent."""
    out: dict[str, Edge | Mapping[str, Edge]] = {}
    for name, field in draft.contract.inputs.model_fields.items():
        at = (*draft.at, name)
        value = draft.inputs.get(name)
        if value is None:
            if field.is_required():
                found.add(
                    f"stage {draft.stage!r} needs {name!r}{_example(field.annotation, draft, scope)}", at, key=True
                )
        elif get_origin(field.annotation) is dict:
            out[name] = _mapping(draft, name, value, scope, found)
        elif (edge := _checked(draft, value, field.annotation, (name,), scope, found)) is not None:
            out[name] = edge
    return out


def _mapping(draft: Draft, name: str, value: object, scope: Scope, found: Mistakes) -> dict[str, Edge]:
    kind = get_args(draft.contract.inputs.model_fields[name].annotation)[1]
    if not isinstance(value, dict):
        found.add(f"wants edges by name, such as {{a: node.output}}, got {value!r}", (*draft.at, name))
        return {}
    edges = {key: _checked(draft, item, kind, (name, str(key)), scope, found) for key, item in value.items()}
    return {key: edge for key, edge in edges.items() if edge is not None}


def _checked(
    draft: Draft, value: object, wanted: Any, fields: tuple[str, ...], scope: Scope, found: Mistakes
) -> Edge | None:
    at = (*draft.at, *fields)
    try:
        edge = parse(value, draft, scope)
        _check_type(edge, wanted, draft, fields[0], scope)
    except UserError as error:
        found.add(str(error), at)
        return None
    return edge


def parse(value: object, draft: Draft, scope: Scope) -> Edge:
    """The edge that a text means, for a node of `draft`'s section."""
    if not isinstance(value, str):
        raise UserError(f"wants an edge ({_FORMS}), got {value!r}")
    text = value.replace(" ", "")
    if text == "model":
        return FromModel()
    if call := _LOOP.match(text):
        return _from_loop(call.group(1), call.group(2), draft, scope)
    match = _NODE.match(text)
    if match is None:
        raise UserError(f"wants an edge ({_FORMS}), got {value!r}")
    node, output = match.groups()
    if node == "carry":
        return _from_carry(output, draft, scope)
    source = _node(node, scope)
    _check_section(source, draft, output)
    _check_output(source, output)
    return FromNode(node, output)


def parse_metric(value: str, draft: Draft, scope: Scope) -> FromNode:
    """The `when` of a node: ``node.metric``."""
    match = _NODE.match(value)
    if match is None:
        raise UserError(f"wants node.metric, got {value!r}")
    source = _node(match.group(1), scope)
    _check_section(source, draft, match.group(2))
    check_metric(source, match.group(2))
    return FromNode(*match.groups())


def check_metric(source: Draft, metric: str) -> None:
    """Refuses a metric that the node is known not to have."""
    names = source.config.metric_names()
    if names is not None and metric not in names:
        raise UserError(f"node {source.name!r} has no metric {metric!r}. {closest(metric, names)}")


def _from_carry(name: str, draft: Draft, scope: Scope) -> FromCarry:
    if name not in scope.carry:
        raise UserError(f"nothing is carried by the name {name!r}. {closest(name, scope.carry)}")
    if draft.section != "body":
        raise UserError(f"carry.{name} exists only in the loop's body; after it write loop.last(...) or loop.best(...)")
    return FromCarry(name)


def _from_loop(call: str, argument: str, draft: Draft, scope: Scope) -> Edge:
    if call not in ("last", "best", "history"):
        raise UserError(f"no loop.{call}(...). {closest(call, ('last', 'best', 'history'))}")
    if draft.section != "after":
        raise UserError(f"loop.{call}(...) is known only when the loop has ended: use it in `after`")
    match = _NODE.match(argument)
    if match is None:
        raise UserError(f"loop.{call}(...) wants node.{'output' if call == 'last' else 'metric'}, got {argument!r}")
    name, what = match.groups()
    source = _node(name, scope)
    if source.section != "body":
        raise UserError(f"node {name!r} is not in the loop's body; write {name}.{what}")
    if call == "last":
        _check_output(source, what)
        return FromLast(name, what)
    check_metric(source, what)
    return FromHistory(name, what) if call == "history" else FromBest(name, what, measured_policy(name, scope.built))


def measured_policy(node: str, body: Mapping[str, PlanNode]) -> FromNode | FromCarry:
    """The edge by which a policy reached a measurement: found by walking back from the node that measured."""
    edges = {edge for _, edge in policy_readers(node, body)}
    if len(edges) > 1:
        names = ", ".join(sorted(text_of(edge) for edge in edges))
        raise UserError(f"loop.best({node}...) is ambiguous: {node!r} measures more than one policy ({names})")
    edge = next(iter(edges), None)
    if not isinstance(edge, (FromNode, FromCarry)):
        raise UserError(
            f"loop.best({node}...): no policy of the loop leads to {node!r}; "
            "give the sample node it scores a policy, such as `policy: carry.policy`"
        )
    return edge


def policy_readers(node: str, nodes: Mapping[str, PlanNode]) -> list[tuple[PlanNode, Edge]]:
    """Nodes upstream of `node` (itself too) that read a policy, and the edge of each; only within `nodes`."""
    out: list[tuple[PlanNode, Edge]] = []
    queue, seen = [node], {node}
    while queue:
        here = nodes[queue.pop(0)]
        policy = here.inputs.get("policy")
        if policy is not None and not isinstance(policy, Mapping):
            out.append((here, policy))
            continue
        sources = {edge.node for edge in here.edges() if isinstance(edge, FromNode) and edge.node in nodes} - seen
        queue += sorted(sources)
        seen |= sources
    return out


def _node(name: str, scope: Scope) -> Draft:
    if name not in scope.nodes:
        raise UserError(f"no node {name!r}. {closest(name, scope.nodes)}")
    return scope.nodes[name]


def _check_section(source: Draft, draft: Draft, output: str) -> None:
    if source.section in _READS[draft.section]:
        return
    if draft.section == "after":
        raise UserError(f"{source.name!r} is in the loop's body; write loop.last({source.name}.{output}) or loop.best")
    where = {"before": "stages", "body": "the loop's body", "after": "after"}
    raise UserError(f"{source.name!r} is in `{where[source.section]}`, which runs later than {draft.name!r}")


def _check_output(source: Draft, output: str) -> None:
    outputs = outputs_of(source.contract)
    if output not in outputs:
        raise UserError(
            f"node {source.name!r} (stage {source.stage!r}) has no output {output!r}. {closest(output, outputs)}"
        )


def type_of(edge: Edge, scope: Scope) -> type[BaseModel] | None:
    """What an edge carries; none for the base model, and for a carried value whose own edge is wrong."""
    match edge:
        case FromNode(node, output) | FromLast(node, output):
            return outputs_of(scope.nodes[node].contract)[output]
        case FromCarry(name):
            return scope.carry[name]
        case FromBest():
            return PolicyRef
        case FromHistory():
            return HistoryRef
        case FromModel():
            return None


def _check_type(edge: Edge, wanted: Any, draft: Draft, field: str, scope: Scope) -> None:
    allowed = models_in(wanted)
    names = " or ".join(kind.__name__ for kind in allowed)
    if isinstance(edge, FromModel):
        if PolicyRef not in allowed or not _optional(wanted):
            raise UserError(f"`model` is the base model, no {names}")
        return
    if isinstance(edge, FromBest) and PolicyRef not in allowed:
        raise UserError(f"loop.best(...) gives a policy; {draft.stage}.{field} wants {names}")
    kind = type_of(edge, scope)
    if kind is not None and not issubclass(kind, tuple(allowed)):
        raise UserError(
            f"{text_of(edge)} is {kind.__name__}, but {draft.stage}.{field} wants {names}"
            f"{_example(wanted, draft, scope)}"
        )


def _optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def _example(annotation: Any, reader: Draft, scope: Scope) -> str:
    """The end of a message: an edge of this flow that would fit."""
    kinds = get_args(annotation)[1:] if get_origin(annotation) is dict else (annotation,)
    allowed = tuple(kind for item in kinds for kind in models_in(item))
    for draft in scope.nodes.values():
        if draft is reader or draft.section not in _READS[reader.section]:
            continue
        for output, kind in outputs_of(draft.contract).items():
            if allowed and issubclass(kind, allowed):
                return f"; {draft.name}.{output} would fit"
    return f", {' or '.join(kind.__name__ for kind in allowed)}"
