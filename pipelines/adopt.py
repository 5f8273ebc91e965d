"""Re-running from a stage of another run: what is made anew, and what is adopted from that run, not copied.

    run.json: base: {run: ../one, from: 7/update, only: false, adopted: {../one: {0000/sample: digest of its record}}}

An adopted record is an input: verified by its digest, never compared with the plan.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipelines.plan import Edge, FromBest, FromCarry, FromHistory, FromLast, FromModel, FromNode, Plan, PlanNode
from pipelines.rundir import RECORD, Address, RunDirectory, file_digest
from pipelines.unroll import Unrolled
from schemas.errors import UserError, closest

EVERY = "all"


class Start(NamedTuple):
    """A stage to begin at: `7/update`, `all/score`, `before/encode`. `iteration` is none outside the loop."""

    text: str
    node: str
    iteration: int | None
    every: bool

    def chosen(self, address: Address, only: bool) -> bool:
        """Whether this stage run is one that is asked for: from the iteration on, or that one only."""
        if address.node != self.node:
            return False
        if self.iteration is None or address.iteration is None or self.every:
            return True
        return address.iteration == self.iteration if only else address.iteration >= self.iteration


def start_of(text: str, plan: Plan) -> Start:
    """Reads ITERATION/STAGE; UserError names what is known."""
    folder, slash, name = text.partition("/")
    if not slash:
        raise UserError(f"--from {text}: wants ITERATION/STAGE, such as 7/update, {EVERY}/score or after/export")
    if name not in plan.nodes:
        raise UserError(f"--from {text}: the flow {plan.flow!r} has no stage {name!r}. {closest(name, plan.nodes)}")
    section = plan.nodes[name].section
    if section != "body":
        if folder != section:
            raise UserError(f"--from {text}: {name!r} is not in the loop; write {section}/{name}")
        return Start(text, name, None, every=False)
    if folder == EVERY:
        return Start(text, name, 0, every=True)
    if not folder.isdigit():
        raise UserError(f"--from {text}: {name!r} is in the loop; write an iteration or {EVERY!r} before it")
    if int(folder) >= plan.times:
        raise UserError(f"--from {text}: the loop runs {plan.times} times, so the last iteration is {plan.times - 1}")
    return Start(text, name, int(folder), every=False)


def addresses(world: Unrolled) -> Iterator[Address]:
    """Every stage run of the plan, in an order in which they could run."""
    plan = world.plan
    yield from (Address("before", node.name) for node in plan.section("before"))
    for iteration in range(plan.times):
        yield from (Address("body", node.name, iteration) for node in world.body(iteration))
    yield from (Address("after", node.name) for node in plan.section("after"))


def anew(world: Unrolled, start: Start, only: bool) -> set[Address]:
    """The stage runs that are made anew: the chosen ones and, unless `only`, all that stands on them."""
    found: set[Address] = set()
    for address in addresses(world):
        node = world.plan.nodes[address.node]
        if start.chosen(address, only) or (
            not only and any(a in found for a in _reads(world, node, address.iteration))
        ):
            found.add(address)
    if not found:
        raise UserError(f"--from {start.text}: {start.node!r} does not run in that iteration (every: N)")
    return found


def _reads(world: Unrolled, node: PlanNode, iteration: int | None) -> Iterator[Address]:
    for edge in node.reads():
        yield from behind(world, edge, iteration)


def behind(world: Unrolled, edge: Edge, iteration: int | None) -> Iterator[Address]:
    """Every stage run that an edge may lead to."""
    plan = world.plan
    match edge:
        case FromModel():
            return
        case FromNode(node, _):
            yield world.address(node, iteration)
        case FromCarry(name):
            carry = plan.carry[name]
            earlier = range((iteration or 0) - 1, -1, -1)
            made = (i for i in earlier if world.due(plan.nodes[carry.next.node], i))
            yield from (Address("body", carry.next.node, i) for i in made)
            yield from behind(world, carry.start, None)
        case FromLast(node, _) | FromHistory(node, _):
            yield from _runs(world, node)
        case FromBest(node, _, policy):
            for address in _runs(world, node):
                yield address
                yield from behind(world, policy, address.iteration)


def _runs(world: Unrolled, node: str) -> Iterator[Address]:
    return (Address("body", node, i) for i in range(world.plan.times) if world.due(world.plan.nodes[node], i))


def begin(plan: Plan, base: RunDirectory, run: Path, start: Start, sets: Sequence[str], *, only: bool) -> None:
    """Makes the new run's run.json, or finds it there, made by the same order. `sets` are those that are new."""
    new = RunDirectory(run)
    world = Unrolled(plan, base)
    wanted = {"run": _relative(base.path, run), "from": start.text, "only": only}
    facts = new.read()
    if facts:
        told = facts.get("base") or {}
        if {key: told.get(key) for key in wanted} != wanted:
            was = f"a re-run of {told['run']} from {told['from']}" if told else "a run of its own"
            raise UserError(f"--as {run.name}: {run} is there already, {was}; choose another name")
        return
    fresh = anew(world, start, only)
    _refuse_idle_sets(plan, fresh, sets)
    adopted: dict[str, dict[str, str]] = {}
    for address in addresses(world):
        record = base.place(address) / RECORD
        if address not in fresh and record.is_file():
            owner = _relative(record.parents[2], run)
            adopted.setdefault(owner, {})[address.path] = file_digest(record)
    run.mkdir(parents=True, exist_ok=True)
    new.write({"format": 1, "flow": plan.flow, "base": {**wanted, "adopted": adopted}})


def adopters(run: Path) -> Iterator[tuple[str, set[str]]]:
    """Re-runs beside a run that have adopted stages of it: their names and the addresses."""
    for file in run.parent.glob("*/run.json"):
        with suppress(ValueError):  # a broken run.json says nothing of what it adopted
            base = json.loads(file.read_bytes()).get("base") or {}
            for owner, records in base.get("adopted", {}).items():
                if (file.parent / owner).resolve() == run.resolve():
                    yield file.parent.name, set(records)


def _refuse_idle_sets(plan: Plan, fresh: set[Address], sets: Sequence[str]) -> None:
    """A setting of a stage that is only adopted would change nothing, in silence."""
    made = {address.node for address in fresh}
    for text in sets:
        node = text.partition("=")[0].split(".")[0]
        if node in plan.nodes and node not in made:
            raise UserError(
                f"--set {text}: {node!r} is adopted as it was made; begin at it (--from .../{node}) to change it"
            )


def _relative(path: Path, run: Path) -> str:
    return os.path.relpath(path.resolve(), run.resolve())
