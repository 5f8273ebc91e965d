"""Why a stage would run, or be reused, if the run were continued now. The runner's own rules, without running."""

from collections.abc import Iterator
from typing import Any

from pipelines.adopt import behind
from pipelines.decide import defaults_of, payload
from pipelines.digests import AssetDigests
from pipelines.facts import git
from pipelines.plan import Plan
from pipelines.rundir import Address
from pipelines.saved import Saved
from pipelines.unroll import Unrolled
from schemas.errors import RewardflowError
from schemas.fingerprint import diff

Json = dict[str, Any]


def why_json(run: Saved, plan: Plan, address: Address) -> Json:
    """`verdict`: reused, adopted, skipped, missing, unfinished or changed; what differs, and what it stands on."""
    world = Unrolled(plan, run.run).after(run.ended if run.nodes else plan.times)
    digests = AssetDigests(dict(run.facts.get("assets", {})))
    out = {"run": run.run.path.name, "address": address.path, **_judged(world, digests, address)}
    above = {a.path: _judged(world, digests, a)["verdict"] for a in _upstream(world, address)}
    out["stands_on"] = {path: verdict for path, verdict in above.items() if verdict not in _STANDING}
    return out


def why_text(shown: Json) -> list[str]:
    """The same for a terminal."""
    lines = [f"{shown['run']}/{shown['address']}: {_VERDICTS[shown['verdict']]}"]
    lines += [f"  {shown['note']}"] if shown["note"] else []
    lines += [f"  {kind} {path}: {old} -> {new}" for kind, path, old, new in shown["changes"]]
    lines += [f"  it stands on {path}, which {_VERDICTS[verdict]}" for path, verdict in shown["stands_on"].items()]
    if shown["code"]:
        lines.append(f"  code: made by {shown['code'][0]}, now {shown['code'][1]}; that alone is no reason to run")
    return lines


_STANDING = ("reused", "adopted", "skipped")
_VERDICTS = {
    "reused": "would be reused",
    "adopted": "is adopted and never made again here",
    "skipped": "is skipped",
    "missing": "would run: it was never made",
    "unfinished": "would run: it was begun and not finished",
    "changed": "was made by another recipe: --on-change decides",
}


def _judged(world: Unrolled, digests: AssetDigests, address: Address) -> Json:
    run, node = world.run, world.plan.nodes[address.node]
    record = run.stage(address).record()
    if address.path in run.adopted:
        run.verify(address)
        return _verdict("adopted", f"from {run.place(address)}")
    if record is None:
        partial = run.stage(address).partial
        if not partial.exists():
            return _verdict("missing")
        shards = len(list(partial.glob("*/shard-*.json")))
        return _verdict("unfinished", f"{shards} shards are there and would be kept")
    try:
        unwanted = world.unwanted(node, address.iteration)
        resolved = world.resolve(node, address.iteration)
    except RewardflowError as error:
        return _verdict("changed", f"cannot be compared: {error}")
    if unwanted or resolved.missing:
        return _verdict("skipped", unwanted or resolved.missing)
    wanted = payload(node, resolved.identity, world.plan.seed, address.iteration, digests)
    changes = [[_kind(path), path, old, new] for path, old, new in diff(record.payload, wanted, defaults_of(node))]
    code = [record.volatile.git, git()]
    return _verdict("changed" if changes else "reused", "", changes, code if code[0] != code[1] else [])


def _verdict(verdict: str, note: str = "", changes: list[Any] | None = None, code: list[str] | None = None) -> Json:
    return {"verdict": verdict, "note": note, "changes": changes or [], "code": code or []}


def _kind(path: str) -> str:
    head = path.partition(".")[0]
    return {"config": "config", "inputs": "input", "version": "version"}.get(head, "setting")


def _upstream(world: Unrolled, address: Address) -> Iterator[Address]:
    """What a stage run stands on within its own iteration and before the loop, and its newest carried inputs."""
    seen: set[Address] = set()
    waiting = [address]
    while waiting:
        here = waiting.pop()
        node = world.plan.nodes[here.node]
        for edge in node.reads():
            for found in list(behind(world, edge, here.iteration))[:1]:
                if found not in seen:
                    seen.add(found)
                    if found.iteration == address.iteration or found.section == "before":
                        waiting.append(found)
    yield from sorted(seen, key=lambda a: (a.iteration or 0, a.path))
