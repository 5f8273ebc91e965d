"""Ranks as actors of a Ray cluster, one in each bundle of a placement group. Ray is an extra and loaded when needed."""

import importlib
import importlib.util
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.crews.crew import Inbox
from pipelines.crews.local import ROOT, environment
from schemas.engine import Resources
from schemas.errors import RewardflowError, UserError, WorkerLost
from schemas.pulse import interval

_ACTOR = ("stages.transports.actor", "Actor")  # by name: it runs elsewhere
_LOOK = 0.2  # seconds
_TAKE = 1.0  # seconds in which an actor waits for something to tell
_STORE = 100 * 2**20  # bytes of a local Ray's object store; only short texts go through it
_OWN_FAULT = "creation task"  # in what Ray says of an actor that could not begin, such as code that is not there
_ANSWER = 10.0  # seconds
_MOST = 1500  # characters of what Ray says


class RayCrews:
    """Crews in one cluster, to which it connects when the first is begun."""

    def __init__(self, resources: Resources, logs: Path) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserError("resources.launcher is 'ray', which is not installed; pip install 'rewardflow[ray]'")
        hiding = [name for name in ("schemas", "stages") if Path.cwd() != ROOT and Path(name).exists()]
        if hiding:
            raise UserError(f"{Path(hiding[0]).absolute()} would hide our own on Ray's workers; run in another folder")
        self._resources, self._logs = resources, logs
        self._connected = False
        # Processes of a local Ray ask the kernel to die with the thread that made them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")

    def begin(self) -> "RayCrew":
        """Asks for a placement group."""
        if not self._connected:
            self._thread.submit(_connect, self._resources).result()
            self._connected = True
        return RayCrew(self._resources, self._logs.resolve())

    def close(self) -> None:
        """Leaves the cluster; one that was started for this run ends."""
        if self._connected:
            importlib.import_module("ray").shutdown()
        self._thread.shutdown(wait=True)


class RayCrew:
    """A Crew."""

    def __init__(self, resources: Resources, logs: Path) -> None:
        self._ray = importlib.import_module("ray")
        self._resources, self._logs = resources, logs
        self._bundle = {"CPU": resources.ray.cpus_per_worker, "GPU": _gpus(self._ray, resources)}
        self.inbox = Inbox(resources.processes)
        self._endings: dict[int, str] = {}
        self._serving = False
        self._placement = importlib.import_module("ray.util.placement_group")
        self._ask()

    def missing(self) -> str:
        """Places, then actors, then their meeting."""
        if not self._actors:
            if not self._group.wait(timeout_seconds=_LOOK):
                return f"Ray to place {self._wanted()}"
            self._actors = [self._actor(rank) for rank in range(self.inbox.ranks)]
            self._calls = [actor.place.remote() for actor in self._actors]
        if not self._serving and self._all_ready():
            self._serve()
        unheard = self.inbox.unheard()
        return f"Ray's actors of rank {', '.join(map(str, unheard))}" if unheard else ""

    def late(self, missing: str, seconds: float) -> RewardflowError:
        """What cannot be placed is the user's to mend."""
        if self._actors:
            return WorkerLost(f"{missing} did not start within {seconds:g} s (resources.start_timeout)")
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        each = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in ("CPU", "GPU")) for node in nodes)
        free = self._ray.available_resources()
        return UserError(
            f"resources.ray: wanted {self._wanted()}, and Ray did not place them within {seconds:g} s "
            f"(resources.start_timeout). The cluster has {len(nodes)} nodes ({each}), of which {free.get('CPU', 0):g} "
            f"CPU, {free.get('GPU', 0):g} GPU are free; add nodes, or lower resources.processes or resources.ray"
        )

    def send(self, request: str) -> None:
        """As a method call; an actor that is gone is noticed by its listener."""
        for actor in self._actors:
            actor.order.remote(request)

    def log(self, rank: int) -> Path:
        """In the run's folder, on the file system that all nodes share."""
        return self._logs / f"compute-rank{rank}.log"

    def ending(self, rank: int) -> str:
        """As Ray tells it."""
        return f"was lost: {self._endings.get(rank, 'its actor does not answer')}"

    def write_stacks(self) -> None:
        """A frozen one cannot."""
        calls = [actor.stacks.remote() for actor in self._actors]
        self._ray.wait(calls, num_returns=len(calls), timeout=2.0)

    def end(self, grace: float) -> None:
        """Kills the actors, also those amid a call, and gives their places back."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._placement.remove_placement_group(self._group)

    def _ask(self) -> None:
        """For places."""
        self._actors: list[Any] = []
        self._calls: list[Any] = []  # their first answers, to come: each rank's address
        bundles = [{name: count for name, count in self._bundle.items() if count}] * self.inbox.ranks
        self._group = self._placement.placement_group(bundles, strategy=self._resources.ray.placement)

    def _wanted(self) -> str:
        each = ", ".join(f"{count} {name}" for name, count in self._bundle.items() if count)
        return f"{self.inbox.ranks} workers of {each} each ({self._resources.ray.placement})"

    def _actor(self, rank: int) -> Any:
        scheduling = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        module, name = _ACTOR
        threads = self._resources.threads or self._resources.ray.cpus_per_worker
        # Ray shows an actor its own devices only, so the first that it sees is its own.
        variables = {**environment(rank, self.inbox.ranks, threads), "LOCAL_RANK": "0"}
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle["GPU"],
            "scheduling_strategy": scheduling(self._group, rank),
            "runtime_env": {"env_vars": variables},
            "max_concurrency": 4,
            "max_restarts": 0,
        }
        kind = self._ray.remote(getattr(importlib.import_module(module), name))
        return kind.options(**options).remote(str(self.log(rank)), os.getcwd())

    def _all_ready(self) -> bool:
        ready, pending = self._ray.wait(self._calls, num_returns=len(self._calls), timeout=_LOOK)
        for call in ready:
            try:
                self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                if _OWN_FAULT in str(error):
                    self._ended(self._calls.index(call), error)
                    return False
                # For some seconds Ray also gives places on a node that has just died.
                self.end(0)
                self._ask()
                return False
        return not pending

    def _serve(self) -> None:
        address, port = self._ray.get(self._calls[0])
        for actor in self._actors:
            actor.begin.remote(address, port, interval(self._resources.heartbeat))
        self._serving = True
        for rank in range(self.inbox.ranks):
            threading.Thread(target=self._listen, args=(rank,), name=f"ray-{rank}", daemon=True).start()

    def _listen(self, rank: int) -> None:
        try:
            while True:
                for line in self._ray.get(self._actors[rank].take.remote(_TAKE)):
                    self.inbox.put(rank, json.loads(line))
        except Exception as error:  # a dead actor, or we have left the cluster
            self._ended(rank, error)

    def _ended(self, rank: int, error: Exception) -> None:
        told = " ".join(line.strip() for line in str(error).splitlines() if not line.startswith("\t"))
        self._endings[rank] = told[-_MOST:]
        self.inbox.put(rank, None)


def _connect(resources: Resources) -> None:
    """To the cluster that is named, or to one of this run's own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # it would take SIGTERM from us
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = importlib.import_module("ray")
    address, quiet = resources.ray.address, {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # as other launchers' workers
        cores = max(len(os.sched_getaffinity(0)), resources.processes * resources.ray.cpus_per_worker)
        own = {"num_cpus": cores, "object_store_memory": _STORE, "include_dashboard": False}
        ray.init(address="local", **own, **quiet)
        return
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _ANSWER).close()
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"resources.ray.address: no Ray cluster answers at {address!r} ({' '.join(str(error).split())[:300]}); "
            "start one with `ray start --head`, or leave the address out for a local one"
        ) from error


def _gpus(ray: Any, resources: Resources) -> int:
    if resources.ray.gpus_per_worker is not None:
        return resources.ray.gpus_per_worker
    if resources.device != "auto":
        return int(resources.device == "cuda")
    return int(ray.cluster_resources().get("GPU", 0) >= resources.processes)
