"""From a loaded flow file to a checked Plan: typed nodes, typed edges, an order, and the rules of the losses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import BaseModel

from pipelines.checks import check
from pipelines.edges import Scope, check_metric, outputs_of, parse, parse_metric, type_of, wired
from pipelines.load import LoadedFile
from pipelines.mistakes import Mistakes
from pipelines.nodes import Draft, drafts
from pipelines.plan import CarryPlan, Edge, FromModel, FromNode, GuardPlan, Plan, PlanNode, Section
from schemas.artifacts import PolicyRef
from schemas.doors import StageConfig
from schemas.errors import UserError, closest
from schemas.flow import Carry, Flow, Guard, NodeOptions

_SECTIONS: tuple[Section, ...] = ("before", "body", "after")


def compile_flow(file: LoadedFile, name: str) -> Plan:
    """The plan of one flow; every mistake found is in the FlowFileError."""
    flow = file.flow(name)
    found = Mistakes(file.raw.error)
    nodes = drafts(file, name, found)
    found.stop()  # else every edge to a broken node would be a mistake too
    scope = Scope(nodes, _carry_types(flow, nodes), {})
    carry = _carry(name, flow, scope, found)
    guards = _guards(name, flow, scope, found)
    built: dict[str, PlanNode] = {}
    for section in _SECTIONS:
        here = [
            _built(draft, replace(scope, built=built), found) for draft in nodes.values() if draft.section == section
        ]
        # What stands after the loop walks back through the body, which must be sound by then.
        found.stop()
        built.update({node.name: node for node in _ordered(here, file, nodes)})
    plan = Plan(
        flow=name,
        description=flow.description,
        seed=flow.seed,
        times=flow.loop.times if flow.loop else 0,
        nodes=built,
        carry=carry,
        guards=guards,
        resources=flow.resources,
        python_path=file.python_path,
        base=file.base,
        keep=flow.keep,
        trackers=flow.trackers,
        schedule=flow.schedule,
        tags=flow.tags,
        sets=tuple(file.raw.sets.values()),
    )
    check(plan, found)
    found.stop()
    return replace(plan, warnings=tuple(found.warnings))


def _built(draft: Draft, scope: Scope, found: Mistakes) -> PlanNode:
    when = None
    if draft.options.when is not None:
        try:
            when = parse_metric(draft.options.when, draft, scope)
        except UserError as error:
            found.add(str(error), (*draft.at, "when"))
    inputs = wired(draft, scope, found)
    return PlanNode(draft.name, draft.stage, draft.section, draft.config, inputs, draft.options.every, when)


def _anywhere(section: Section, name: str) -> Draft:
    """A reader that stands in a section but is no node: a carry's start or next."""
    return Draft(name, section, (), "carry", NodeOptions(), StageConfig(), {})


def _carry_types(flow: Flow, nodes: Mapping[str, Draft]) -> dict[str, type[BaseModel] | None]:
    """For each carried value the type of its `next`; none where that edge is wrong, which is told elsewhere."""
    types: dict[str, type[BaseModel] | None] = {}
    for name, carry in (flow.loop.carry if flow.loop else {}).items():
        node, _, output = carry.next.partition(".")
        types[name] = outputs_of(nodes[node].contract).get(output) if node in nodes else None
    return types


def _carry(flow_name: str, flow: Flow, scope: Scope, found: Mistakes) -> dict[str, CarryPlan]:
    out: dict[str, CarryPlan] = {}
    taken: dict[str, str] = {}
    for name, carry in (flow.loop.carry if flow.loop else {}).items():
        at = ("flows", flow_name, "loop", "carry", name)
        if carry.next in taken:
            message = (
                f"{carry.next} is carried twice, as {taken[carry.next]!r} and {name!r}; one carry can have two readers"
            )
            found.add(message, (*at, "next"))
        taken[carry.next] = name
        follow = start = None
        try:
            follow = _next(name, carry, scope)
        except UserError as error:
            found.add(str(error), (*at, "next"))
        try:
            start = _start(name, carry, scope)
        except UserError as error:
            found.add(str(error), (*at, "start"))
        if start is not None and follow is not None:
            out[name] = CarryPlan(start, follow)
    return out


def _next(name: str, carry: Carry, scope: Scope) -> FromNode:
    edge = parse(carry.next, _anywhere("body", name), scope)
    if not isinstance(edge, FromNode) or scope.nodes[edge.node].section != "body":
        raise UserError(f"wants an output of a node in the loop's body, such as update.policy, got {carry.next!r}")
    return edge


def _start(name: str, carry: Carry, scope: Scope) -> FromNode | FromModel:
    edge: Edge = parse(carry.start, _anywhere("before", name), scope)
    kind, wanted = type_of(edge, scope), scope.carry[name]
    if isinstance(edge, FromModel):
        if wanted not in (None, PolicyRef):
            raise UserError(f"`model` is a policy, but {carry.next} is {wanted.__name__ if wanted else ''}")
        return edge
    if not isinstance(edge, FromNode):
        raise UserError(f"wants `model` or an output of a node in `stages`, got {carry.start!r}")
    if kind is not None and wanted is not None and not issubclass(kind, wanted):
        raise UserError(f"{carry.start} is {kind.__name__}, but {carry.next} is {wanted.__name__}")
    return edge


def _guards(flow_name: str, flow: Flow, scope: Scope, found: Mistakes) -> dict[str, GuardPlan]:
    out: dict[str, GuardPlan] = {}
    for name, guard in (flow.loop.stop if flow.loop else {}).items():
        try:
            out[name] = _guard(guard, scope)
        except UserError as error:
            found.add(str(error), ("flows", flow_name, "loop", "stop", name, "metric"))
    return out


def _guard(guard: Guard, scope: Scope) -> GuardPlan:
    node, dot, metric = guard.metric.partition(".")
    body = [draft.name for draft in scope.nodes.values() if draft.section == "body"]
    if not dot or not metric:
        raise UserError(f"wants node.metric, such as score.strict, got {guard.metric!r}")
    if node not in body:
        raise UserError(f"no node {node!r} in the loop's body. {closest(node, body)}")
    check_metric(scope.nodes[node], metric)
    return GuardPlan(guard, node, metric)


def _ordered(nodes: Sequence[PlanNode], file: LoadedFile, drafts: Mapping[str, Draft]) -> list[PlanNode]:
    """The nodes of one section so that each comes after what it reads; else in the file's order."""
    left = {node.name: node for node in nodes}
    needs = {node.name: node.near() & left.keys() for node in nodes}
    out: list[PlanNode] = []
    while left:
        ready = next((name for name in left if not needs[name] & left.keys()), None)
        if ready is None:
            cycle = _cycle({name: sorted(needs[name] & left.keys()) for name in left})
            raise file.raw.error(f"the nodes wait for each other: {' -> '.join(cycle)}", drafts[cycle[0]].at, key=True)
        out.append(left.pop(ready))
    return out


def _cycle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """A way round, first node repeated at the end; every node in `needs` reads another one of them."""
    path: list[str] = []
    here = next(iter(needs))
    while here not in path:
        path.append(here)
        here = needs[here][0]
    return [*path[path.index(here) :], here]
