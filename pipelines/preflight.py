"""Before anything expensive, one prompt goes through the whole flow: every model and reward loads, every edge fits.

It runs in RUN/preflight, like a run of its own on the least of everything. What stands before the loop and is the same
in both, such as the embeddings of all prompts, is made once, in the run itself.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.describe import as_json
from pipelines.plan import FromNode, Plan, PlanNode
from pipelines.rundir import RECORD, Address, RunDirectory, file_digest, write_text
from pipelines.unroll import Unrolled
from schemas.errors import RewardflowError
from schemas.fingerprint import fingerprint

_AT_FAULT = "If only its one prompt is at fault, go without it: --set resources.preflight=false"
_FOLDER, _PASSED = "preflight", "preflight.json"


def wanted(world: Unrolled) -> bool:
    """Whether a new run has a loop whose first iteration is not whole yet, and this flow has not passed before."""
    plan, run = world.plan, world.run
    if not (plan.resources.preflight and plan.times) or run.base:
        return False
    whole = all((run.place(Address("body", node.name, 0)) / RECORD).is_file() for node in world.body(0))
    return not whole and _passed(run.path / _PASSED) != _identity(plan)


def least(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan on as little as it works on, and the nodes before the loop that are the same in both."""
    spared = _whole(plan)
    nodes = {
        name: node if name in spared else replace(node, config=node.config.least()) for name, node in plan.nodes.items()
    }
    other: set[str] = set()
    for name, node in nodes.items():
        if node.section != "before" or node.config != plan.nodes[name].config or node.near() & other:
            other.add(name)
    small = replace(plan, nodes=nodes, times=1, guards={}, keep=None, trackers={})
    return small, [name for name in nodes if name not in other]


def fly(
    world: Unrolled, small: Plan, same: list[str], go: Callable[[Unrolled], object], say: Callable[[str], None]
) -> None:
    """`go` runs the small plan in its own folder, where what is the same counts as adopted. Its errors come out."""
    begun, folder = time.monotonic(), world.run.path / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    places = [Address(world.plan.nodes[name].section, name) for name in same]
    adopted = {address.path: file_digest(world.run.place(address) / RECORD) for address in places}
    say(f"preflight: one prompt through all {len(small.nodes)} stages (resources.preflight=false leaves it out)")
    try:
        go(Unrolled(small, RunDirectory(folder, {"adopted": {"..": adopted}})))
    except RewardflowError:
        say(f"the preflight failed and nothing was trained; what it left is in {folder}. {_AT_FAULT}")
        raise
    shutil.rmtree(folder)
    write_text(world.run.path / _PASSED, json.dumps({"plan": _identity(world.plan)}) + "\n")
    say(f"preflight passed in {time.monotonic() - begun:.1f} s")


def _whole(plan: Plan) -> set[str]:
    """Nodes of prompts that must stay whole, since pictures are drawn for others whose embeddings come from them."""
    spared: set[str] = set()
    for encoder in (node for node in plan.nodes.values() if node.stage == "encode"):
        read = [node.inputs.get("prompts") for node in plan.nodes.values() if _conditioned(node, encoder.name)]
        if any(edge is not None and edge != encoder.inputs["prompts"] for edge in read):
            spared |= encoder.near()
    return spared


def _conditioned(node: PlanNode, encoder: str) -> bool:
    edge = node.inputs.get("conditioning")
    return isinstance(edge, FromNode) and edge.node == encoder


def _identity(plan: Plan) -> str:
    """Of what a change makes another flight of: stages, settings and edges."""
    told: Mapping[str, Any] = json.loads(as_json(plan))
    return fingerprint({key: told[key] for key in ("flow", "nodes", "carry")})


def _passed(file: Path) -> str:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return str(json.loads(file.read_bytes()).get("plan"))
    return ""
