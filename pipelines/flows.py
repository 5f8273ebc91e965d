"""Flows of flows.yaml as Prefect flows, and stage runs as Prefect tasks. The only file that loads Prefect.

``pipelines.flows.NAME`` is a Prefect flow for each entry of flows.yaml (``REWARDFLOW_FILE``, or the one here).
Prefect shows and starts runs; what is true about them is in the run directory, so its own caching is off.
"""

import os

# Read by Prefect when it is imported. Its console log is left to us; the server's log has everything.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL", "CRITICAL")

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow, Task, flow, get_client, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import refresh_global_settings_context
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import task_run
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner

from pipelines.compile import compile_flow
from pipelines.decide import OnChange
from pipelines.execute import Outcome
from pipelines.launch import Launcher, launcher
from pipelines.load import load
from pipelines.plan import Plan
from pipelines.report import Report
from pipelines.run import BRANCHES, run_in, say_aloud
from pipelines.rundir import Address
from pipelines.server import begin_server
from schemas.errors import RunError, ServerLost, UserError, WorkerLost


def run_flow(
    plan: Plan, run_name: str, runs_dir: Path, sets: Sequence[str] = (), *, on_change: OnChange = "stop"
) -> Path:
    """Runs a plan as a Prefect flow run called `run_name`; errors come out as they were raised."""
    directory = runs_dir / run_name
    workers = launcher(plan.resources, directory / "logs", 0)

    def compiled(_: Sequence[str]) -> Plan:
        return plan

    try:
        if not PREFECT_API_URL.value():
            workers.warm()  # a server of our own takes as long to start as they do
        _reach_server(directory / "logs" / "prefect.log")
        workers.warm()
        built = _flow(plan.flow, plan.description, compiled, lambda _: directory, on_change, run_name, workers)
        built(run=run_name, sets=list(sets))
    except TerminationSignal as signal:
        raise KeyboardInterrupt from signal
    except (httpx.HTTPError, PrefectException) as error:
        message = f"Prefect's server at {PREFECT_API_URL.value()} failed: {type(error).__name__}: {error}"
        raise ServerLost(f"{message}; the same command goes on from the last finished stage") from error
    finally:
        workers.close()
    return directory


def _reach_server(log: Path) -> None:
    """The server that PREFECT_API_URL or Prefect's profile names, else one of our own."""
    # A server that goes away is told once, by us.
    logging.raiseExceptions = False
    url = PREFECT_API_URL.value()
    if url:
        with get_client(sync_client=True) as client:
            error = client.api_healthcheck()
        if error is not None:
            message = f"no Prefect server answers at {url} (PREFECT_API_URL): {error}"
            raise UserError(f"{message}; start it with `prefect server start`, or run with --plain")
        return
    if not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        raise UserError("PREFECT_API_URL names no server and Prefect may not start one of its own; run with --plain")
    say_aloud("starting Prefect (about 10 s; --plain runs without it, PREFECT_API_URL names a running server)")
    os.environ["PREFECT_API_URL"] = begin_server(log)
    refresh_global_settings_context()


def flow_of(name: str, file: Path) -> Flow[..., str]:
    """The Prefect flow of an entry of flows.yaml, with the run's name and overrides as parameters."""
    entry = load(file).flow(name)

    def compiled(sets: Sequence[str]) -> Plan:
        return compile_flow(load(file, name, sets), name)

    runs = file.resolve().parent / "runs"
    return _flow(name, entry.description, compiled, lambda run: runs / (run or name), "stop", None, None)


def _flow(
    name: str,
    description: str,
    compiled: Callable[[Sequence[str]], Plan],
    place: Callable[[str | None], Path],
    on_change: OnChange,
    run_name: str | None,
    workers: Launcher | None,
) -> Flow[..., str]:
    def body(run: str | None = None, sets: list[str] | None = None) -> str:
        plan, directory = compiled(sets or []), place(run)
        log = get_run_logger()

        def say(text: str) -> None:
            log.info(text)
            if workers is not None:  # somebody looks at this terminal
                say_aloud(text)

        # A lost worker is tried again by Prefect, which shows it; the launcher itself tries once.
        def begin() -> Launcher:
            return workers or launcher(plan.resources, directory / "logs", 0)

        result = run_in(plan, directory, TaskCaller(plan, say), begin, say=say, on_change=on_change)
        _show(plan, directory, result)
        return str(directory)

    body.__name__ = body.__qualname__ = name
    body.__doc__ = description
    runner = ThreadPoolTaskRunner(max_workers=BRANCHES)
    options: dict[str, Any] = {"task_runner": runner, "persist_result": False, "flow_run_name": run_name}
    return flow(name=name, description=description, **options)(body)


class TaskCaller:
    """Each stage run a task, named as in `sample[3]`, after the tasks it reads from."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._tasks = {node.name: _task(node.name, plan.resources.retries, say) for node in plan.nodes.values()}
        self._begun: dict[Address, PrefectFuture[Any]] = {}

    def submit(self, address: Address, upstream: Sequence[Address], work: Callable[[], Outcome]) -> "Future[Outcome]":
        """Submits the task; the future given back ends when the task does, retries included."""
        self._forget(address.iteration)
        bridge: Future[Outcome] = Future()
        done: list[Outcome] = []
        task = self._tasks[address.node].with_options(task_run_name=address.label)
        begun = task.submit(work, done, wait_for=[self._begun[a] for a in upstream if a in self._begun])
        self._begun[address] = begun
        begun.add_done_callback(lambda ended: _hand_over(ended, done, bridge))
        return bridge

    def _forget(self, iteration: int | None) -> None:
        """Keeps only tasks that a coming one may read from."""
        if iteration is not None:
            old = [a for a in self._begun if a.iteration is not None and a.iteration < iteration]
            for address in old:
                del self._begun[address]


def _task(name: str, retries: int, say: Callable[[str], None]) -> Task[..., Any]:
    def stage(work: Callable[[], Outcome], done: list[Outcome]) -> State[Any] | None:
        """Runs it; the state's name tells reused and skipped from computed."""
        try:
            outcome = work()
        except WorkerLost as error:
            if (task_run.run_count or 1) <= retries:
                say(f"{error}; trying again on fresh workers")
            raise
        done.append(outcome)
        if outcome.state == "done":
            return None
        return Completed(name=outcome.state.capitalize(), message=outcome.note or None)

    options: dict[str, Any] = {"retries": retries, "retry_condition_fn": _lost}
    return Task(stage, name=name, cache_policy=NO_CACHE, persist_result=False, log_prints=False, **options)


def _lost(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, WorkerLost)


def _hand_over(ended: PrefectFuture[Any], done: list[Outcome], bridge: "Future[Outcome]") -> None:
    try:
        ended.result(raise_on_failure=True)
    except BaseException as error:
        bridge.set_exception(error)
        return
    if done:
        bridge.set_result(done[0])
    else:
        bridge.set_exception(RunError(f"Prefect ended the task before it ran: {ended.state.name}"))


def _show(plan: Plan, directory: Path, result: Report) -> None:
    """The summary and the places of the results, for the UI."""
    places = "\n".join(f"- {name}: `{path}`" for name, path in result.paths.items())
    text = "\n\n".join(filter(None, [f"Run directory: `{directory}`", result.text, places]))
    create_markdown_artifact(text, key=f"{plan.flow}-summary".replace("_", "-"), description=plan.description)


def __getattr__(name: str) -> Flow[..., str]:
    file = Path(os.environ.get("REWARDFLOW_FILE", "flows.yaml"))
    if name.startswith("_") or not file.is_file() or name not in load(file).spec.flows:
        raise AttributeError(f"module {__name__!r} has no flow {name!r}; {file} has none of that name")
    return flow_of(name, file)
