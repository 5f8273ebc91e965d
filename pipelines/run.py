"""Runs a plan, without Prefect: `before`, the loop one iteration at a time, `after`; branches side by side."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from pipelines import preflight
from pipelines.adopt import anew, start_of
from pipelines.decide import OnChange
from pipelines.describe import as_json
from pipelines.digests import AssetDigests
from pipelines.disk import check_space
from pipelines.execute import Executor, Outcome
from pipelines.guards import Guards, sentence
from pipelines.launch import Launcher, launcher
from pipelines.lock import locked
from pipelines.memory import check_memory
from pipelines.overlap import forget
from pipelines.plan import Plan, PlanNode
from pipelines.progress import Lines
from pipelines.prune import Pruner, prune
from pipelines.report import Report, as_lines, report
from pipelines.rundir import Address, RunDirectory
from pipelines.trackers.kinds import check_installed
from pipelines.trackers.mirror import Mirror
from pipelines.unroll import Unrolled
from schemas.errors import Collapsed, UserError, WorkerLost

BRANCHES = 8  # stages at work at once; those of one group of workers take turns
say_aloud = partial(print, flush=True)


class Caller(Protocol):
    """Calls a stage run in another thread. Prefect comes in here: it makes each call a task."""

    def submit(self, address: Address, upstream: Sequence[Address], work: Callable[[], Outcome]) -> "Future[Outcome]":
        """Starts `work`, all of whose inputs are there."""
        ...


class ThreadCaller:
    """Plain threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, address: Address, upstream: Sequence[Address], work: Callable[[], Outcome]) -> "Future[Outcome]":
        """Starts `work` in a thread of the pool."""
        return self._pool.submit(work)


def run_plan(
    plan: Plan, directory: Path, *, say: Callable[[str], None] = say_aloud, on_change: OnChange = "stop"
) -> Path:
    """Runs or goes on with the run in `directory`, and tells what came of it."""
    pool = ThreadPoolExecutor(BRANCHES, thread_name_prefix="stage")
    try:
        begin = partial(launcher, plan.resources, directory / "logs", plan.resources.retries)
        run_in(plan, directory, ThreadCaller(pool), begin, say=say, on_change=on_change)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return directory


def run_in(
    plan: Plan,
    directory: Path,
    caller: Caller,
    begin: Callable[[], Launcher],
    *,
    say: Callable[[str], None],
    on_change: OnChange,
) -> Report:
    """The same with a caller and a launcher of one's own. Holds the run's lock and ends the launcher."""
    begun = time.monotonic()
    check_installed(plan.trackers)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, say):
        run = RunDirectory.open(directory)
        digests = _opened(run, plan)
        lines, world = Lines(say), Unrolled(plan, run)
        only = _asked_for(world)
        check_space(world, only)
        check_memory(plan)
        forget(directory)
        workers = begin()
        mirror = Mirror(plan, directory, plan.trackers, lines.note)
        try:
            runner = Runner(Executor(world, workers, digests, lines, on_change), caller, mirror, only)
            if preflight.wanted(world):
                runner = _flown(runner)
            world = runner.run()
        finally:
            workers.close()
            mirror.close()
            lines.flush()
    result = report(world, only)
    for line in as_lines(result):
        say(line)
    say(f"run {directory} is complete ({time.monotonic() - begun:.0f} s)")
    return result


def _flown(runner: "Runner") -> "Runner":
    """After the preflight, with what it made of the run itself."""
    executor = runner.executor
    small, same = preflight.least(executor.world.plan)
    runner = runner.ahead(same)

    def go(world: Unrolled) -> None:
        rehearsal = replace(executor, world=world, lines=Lines(lambda _: None), on_change="stop", rehearsal=True)
        mirror = Mirror(small, world.run.path, {}, executor.lines.note)
        with ThreadPoolExecutor(BRANCHES, thread_name_prefix="preflight") as pool:
            flight = Runner(rehearsal, ThreadCaller(pool), mirror)
            for _ in range(small.resources.retries):
                try:
                    flight.run()
                    return
                except WorkerLost as error:
                    executor.lines.note(f"{error}; trying again on fresh workers")
            flight.run()

    preflight.fly(executor.world, small, same, go, executor.lines.note)
    return runner


def _opened(run: RunDirectory, plan: Plan) -> AssetDigests:
    """run.json brought up to date."""
    facts = run.read()
    if facts and facts.get("flow") != plan.flow:
        raise UserError(
            f"the run {run.path} is of the flow {facts.get('flow')!r}, not {plan.flow!r}; choose another name with --as"
        )
    known = dict(facts.get("assets", {}))
    now = {
        "format": 1,
        "flow": plan.flow,
        "seed": plan.seed,
        "created": facts.get("created", datetime.now(UTC).isoformat("T", "seconds")),
        "plan": json.loads(as_json(plan)),
        "assets": known,
        **({"base": facts["base"]} if "base" in facts else {}),
    }
    if now != facts:
        run.write(now)
    return AssetDigests(known, changed=lambda: run.write(now))


def _asked_for(world: Unrolled) -> set[Address] | None:
    """The stage runs of a re-run of one stage only; else none, which is all."""
    base = world.run.base
    return anew(world, start_of(base["from"], world.plan), only=True) if base.get("only") else None


@dataclass(frozen=True)
class Runner:
    """Walks over the plan. Keeps nothing of past iterations: the run directory does. `only` are stage runs to make.

    `early` are nodes before the loop that have run already, with whether they were computed.
    """

    executor: Executor
    caller: Caller
    mirror: Mirror
    only: set[Address] | None = None
    early: Mapping[str, bool] = field(default_factory=dict)

    def ahead(self, names: Sequence[str]) -> "Runner":
        """Runs these nodes before the loop ahead of the others."""
        made = self._walk([self.executor.world.plan.nodes[name] for name in names], None)
        return replace(self, early={name: name in made for name in names})

    def run(self) -> Unrolled:
        """All sections; gives the world with the loop's end in it."""
        world = self.executor.world
        self._section(world.plan.section("before"), None)
        world = world.after(self._loop(world))
        last = replace(self, executor=replace(self.executor, world=world))
        last._section(world.plan.section("after"), None)
        return world

    def _loop(self, world: Unrolled) -> int:
        """Runs the body; gives the number of iterations that count."""
        guards = Guards(world)
        pruner = None if world.plan.keep is None or self.only is not None else Pruner(world.run.path, world.plan.keep)
        for iteration in range(world.plan.times):
            made = self._section(world.body(iteration), iteration)
            decision = guards.decision(iteration) if self.only is None else None
            # A walk over finished iterations leaves nothing new to prune, but for what a kill had left at their end.
            if pruner is not None and (made or decision or iteration == world.plan.times - 1):
                prune(pruner.found(world, iteration))
            if decision is None:
                continue
            text = sentence(decision, world.plan.guards[decision.guard].guard.falls)
            if decision.action == "fail":
                raise Collapsed(f"{text}; earlier policies are kept in {world.run.path}")
            self.executor.lines.note(f"{text}; leaving the loop")
            return iteration + 1
        return world.plan.times

    def _section(self, nodes: Sequence[PlanNode], iteration: int | None) -> set[str]:
        """Runs a section and hands it to the trackers; gives the nodes that were computed."""
        made = self._walk([node for node in nodes if node.name not in self.early], iteration)
        made |= {node.name for node in nodes if self.early.get(node.name)}
        self.mirror.add(self.executor.world, nodes, iteration, made)
        return made

    def _walk(self, nodes: Sequence[PlanNode], iteration: int | None) -> set[str]:
        """Every node as soon as its inputs are there; gives those that were computed.

        After a failure what runs may end, and nothing new starts.
        """
        made: set[str] = set()
        waiting = {node.name: node for node in nodes if self._wanted(node, iteration)}
        running: dict[Future[Outcome], str] = {}
        failure: BaseException | None = None
        while waiting or running:
            if failure is None:
                busy = waiting.keys() | set(running.values())
                for node in [n for n in waiting.values() if not n.near() & busy]:
                    del waiting[node.name]
                    running[self._submit(node, iteration)] = node.name
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                error = future.exception()
                if error is None and future.result().state == "done":
                    made.add(name)
                if error is not None and failure is None:
                    failure = error
                    if running:
                        self.executor.lines.note(f"{name} failed; {', '.join(running.values())} may finish")
            if failure is not None and not running:
                raise failure
        return made

    def _wanted(self, node: PlanNode, iteration: int | None) -> bool:
        return self.only is None or Address(node.section, node.name, iteration) in self.only

    def _submit(self, node: PlanNode, iteration: int | None) -> "Future[Outcome]":
        world = self.executor.world
        upstream = [world.address(name, iteration) for name in sorted(node.near())]
        address = Address(node.section, node.name, iteration)
        return self.caller.submit(address, upstream, partial(self.executor.run, node, iteration))
