"""Retention: heavy outputs of old iterations go, their records stay and say so. What another run adopted never goes."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pipelines.adopt import adopters
from pipelines.plan import FromBest, FromCarry
from pipelines.rundir import Address, bytes_in, write_text
from pipelines.unroll import Found, Unrolled
from schemas.artifacts import ConditioningTable, PolicyRef, SamplesTable, TrajectoryTable, refs
from schemas.doors import StageOutputs
from schemas.flow import Keep

PRUNED = "pruned.json"  # in a stage's directory: what is gone, by output, in bytes
_HEAVY = (TrajectoryTable, SamplesTable, ConditioningTable, PolicyRef)


class Heavy(NamedTuple):
    """An output that may go."""

    address: Address
    output: str
    path: Path
    size: int


@dataclass
class Pruner:
    """Looks at an iteration until nothing heavy is left of it, so that a long run does not look at all of them."""

    run: Path
    keep: Keep
    _clean: set[int] = field(default_factory=set)

    def found(self, world: Unrolled, now: int) -> list[Heavy]:
        """Heavy outputs of iterations up to `now` that may go."""
        kept = {i for i in range(now + 1) if i > now - self.keep.last or (self.keep.every and i % self.keep.every == 0)}
        adopted = [addresses for _, addresses in adopters(self.run)]
        needed = set(_needed(world, kept, now)).union(*adopted)
        out: list[Heavy] = []
        for iteration in sorted(set(range(now + 1)) - kept - self._clean):
            heavy = [h for a in _addresses(world, iteration) for h in _heavy(world, a)]
            out += [h for h in heavy if h.address.path not in needed]
            if not any(h.address.path in needed for h in heavy):
                self._clean.add(iteration)
        return out


def prune(found: list[Heavy]) -> int:
    """Removes them and gives the bytes; each stage's note of it is written first."""
    for heavy in found:
        directory = heavy.path.parent
        # A removal that was killed has noted the whole size already.
        gone = {heavy.output: heavy.size, **pruned(directory)}
        write_text(directory / PRUNED, json.dumps(gone, indent=1) + "\n")
        shutil.rmtree(heavy.path, ignore_errors=True)
    return sum(heavy.size for heavy in found)


def pruned(directory: Path) -> dict[str, int]:
    """What has gone from a stage's directory, in bytes by output."""
    file = directory / PRUNED
    return json.loads(file.read_text()) if file.is_file() else {}


def _needed(world: Unrolled, kept: set[int], now: int) -> Iterator[str]:
    """The newest run of every node, what kept iterations were carried, and the best policies so far."""
    body = world.plan.section("body")
    for node in body:
        yield world.address(node.name, now).path
    carried = {edge for node in body for edge in node.edges() if isinstance(edge, FromCarry)}
    for edge in carried:
        for iteration in [*kept, now + 1]:
            yield from _source(world.follow(edge, iteration))
    bests = {edge for node in world.plan.nodes.values() for edge in node.edges() if isinstance(edge, FromBest)}
    # Once more as if the loop went on: a longer loop may not measure where this one ends.
    longer = replace(world, plan=replace(world.plan, times=now + 2))
    for edge in bests:
        yield from _source(world.after(now + 1).follow(edge, None))
        yield from _source(longer.after(now + 1).follow(edge, None))


def _source(found: object) -> Iterator[str]:
    if isinstance(found, Found):
        yield found.source.rpartition(".")[0]


def _addresses(world: Unrolled, iteration: int) -> Iterator[Address]:
    """The iteration's own stage runs."""
    for node in world.body(iteration):
        address = Address("body", node.name, iteration)
        if address.path not in world.run.adopted:
            yield address


def _heavy(world: Unrolled, address: Address) -> Iterator[Heavy]:
    record = world.run.stage(address).record()
    if record is None or record.status == "skipped":
        return
    place = world.run.place(address)
    for output, path in _paths(world.outputs(address, record), place):
        if path.exists():
            yield Heavy(address, output, path, bytes_in(path))


def _paths(outputs: StageOutputs, place: Path) -> Iterator[tuple[str, Path]]:
    for output, value in outputs:
        if isinstance(value, _HEAVY):
            yield output, place / value.path


def lost_input(inputs: Mapping[str, object], sources: Mapping[str, object]) -> str | None:
    """The first input whose data are no longer there, for people."""
    for name, value in inputs.items():
        for ref in refs(value):
            if not Path(ref.path).exists():
                why = "was pruned (keep)" if pruned(Path(ref.path).parent) else "is gone"
                return f"its input {name!r}, {sources.get(name)} at {ref.path}, {why}"
    return None
