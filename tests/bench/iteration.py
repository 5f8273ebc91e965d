"""A whole warm iteration of `shapes` through the runner against a bare script that makes the same policy."""

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import torch
from ruamel.yaml import YAML

from pipelines.compile import compile_flow
from pipelines.execute import Outcome
from pipelines.launch import launcher
from pipelines.load import load
from pipelines.plan import Plan
from pipelines.run import BRANCHES, ThreadCaller, run_in
from pipelines.rundir import Address, RunDirectory
from schemas.contracts import PromptsConfig, ScoreConfig
from schemas.seeds import seed_of
from stages.engine.sharded import whole
from stages.prompts import choose
from stages.rewards import reward
from stages.store import tables
from tests.bench.bare import Batch, transformer
from tests.bench.ground import FLOWS, ROOT, Ground
from tests.bench.measure import Row, Scale
from tests.bench.sampling import bare
from tests.bench.training import Data, Trainer, distance, second
from tests.pipelines.prefect_server import environment

_BODY = ("prompts", "sample", "score", "advantage", "update")


def rows(scale: Scale) -> Iterator[Row]:
    """Plain: the ratio to the bare script, and what the runner itself takes."""
    with TemporaryDirectory(prefix="rewardflow-bench-") as folder:
        plan = _plan(Path(folder), scale)
        pause = Pause(plan, Path(folder), scale.repetitions + 1)
        with ThreadPoolExecutor(BRANCHES) as pool:
            caller = Pausing(ThreadCaller(pool), pause)
            begin = partial(launcher, plan.resources, pause.run / "logs", 0)
            run_in(plan, pause.run, caller, begin, say=lambda _: None, on_change="stop")
        offs = [*pause.offs, pause.off(plan.times - 1)]
        # Rounding grows from policy to policy: Adam divides small gradients by their own size.
        assert offs[0] < 1e-3, f"the bare script's first policy differs by {offs[0]}"
        assert max(offs) < 0.1, f"the bare script's policies differ by {offs}"
        walls, stages = pause.walls()[1:], stage_seconds(pause.run, plan.times)[1:]
        ratios = [wall / taken for wall, taken in zip(walls, pause.bare[1:], strict=True)]
        absolute = {"iteration": statistics.median(walls), "bare": statistics.median(pause.bare[1:])}
        what = f"one warm iteration through the runner, 1 worker / bare script in one process ({', '.join(_BODY)})"
        told = f"policies, off by {offs[0]:.0e} of their way after one iteration, {offs[-1]:.0e} after {plan.times}"
        yield Row("iteration", what, ratios, 1.15, absolute=absolute, parts=_by_stage(stages), checked=told)
        yield _orchestration("orchestration", "without Prefect", walls, stages)


def prefect_rows(scale: Scale) -> Iterator[Row]:
    """What the runner takes under Prefect, by the command."""
    with TemporaryDirectory(prefix="rewardflow-bench-") as folder:
        plan = _plan(Path(folder), scale)
        words = ["run", "shapes", "--file", f"{folder}/flows.yaml", "--runs", folder, "--as", "prefect"]
        with (Path(folder) / "log").open("wb") as log:
            settings = [word for one in _sets(scale) for word in ("--set", one)]
            subprocess.run(
                [sys.executable, "-m", "pipelines.cli", *words, *settings],
                cwd=ROOT,
                env=environment(Path(folder) / "home"),
                stdout=log,
                stderr=log,
                check=True,
            )
        run = Path(folder) / "prefect"
        ends = commits(run, plan.times)
        walls = [b - a for a, b in pairwise(ends)]
        yield _orchestration("orchestration_prefect", "under Prefect", walls, stage_seconds(run, plan.times)[1:])


class Pause:
    """The bare script's iterations, each before the runner's own of the same number, and when that was."""

    def __init__(self, plan: Plan, folder: Path, times: int) -> None:
        self.plan, self.run = plan, folder / "iteration"
        self.bare: list[float] = []
        self.offs: list[float] = []
        self._begun: list[float] = []
        self._resumed: list[float] = []
        (folder / "bare").mkdir()
        base = Ground(plan, folder / "bare")
        module = transformer(str(base.updating.model.path))
        self.start = {name: value.clone() for name, value in module.named_parameters()}
        self.script = Script(base, Trainer(module, second(module), base.updating, plan.seed, 0))

    def __call__(self, iteration: int) -> None:
        self._begun.append(time.time())
        if iteration:
            self.offs.append(self.off(iteration - 1))
        gc.collect()
        begun = time.perf_counter()
        self.script.iteration(iteration)
        self.bare.append(time.perf_counter() - begun)
        self._resumed.append(time.time())

    def walls(self) -> list[float]:
        """Of each iteration: from the last commit of the one before to its own last one, the pause left out."""
        ends = commits(self.run, self.plan.times)
        before = [self._begun[0], *ends[:-1]]
        parts = zip(before, self._begun, self._resumed, ends, strict=True)
        return [begun - last + end - resumed for last, begun, resumed, end in parts]

    def off(self, iteration: int) -> float:
        """How far the bare script's weights are from the policy of an iteration, by what that moved from the base."""
        saved = whole(self.run / f"{iteration:04d}" / "update" / "policy", "raw")
        return distance(self.script.trainer.leaves, saved) / distance(self.start, saved)


class Pausing:
    """A caller that lets the bare script have its turn before the first stage of every iteration."""

    def __init__(self, caller: ThreadCaller, pause: Callable[[int], None]) -> None:
        self._caller, self._pause = caller, pause

    def submit(self, address: Address, upstream: Sequence[Address], work: Callable[[], Outcome]) -> "Future[Outcome]":
        if address.node == _BODY[0] and address.iteration is not None:
            self._pause(address.iteration)
        return self._caller.submit(address, upstream, work)


class Script:
    """The iteration in one process: everything stays in memory; shards and weights are written as by the stages."""

    def __init__(self, base: Ground, trainer: Trainer) -> None:
        assert trainer.old is not None
        self.base, self.trainer, self.embedded = base, trainer, base.embeddings()
        self.sampler = bare(base, trainer.old)
        self.everyone = tables.read(base.everyone).to_pylist()
        self.choose = cast(PromptsConfig, base.plan.nodes["prompts"].config).choose or len(self.everyone)

    def iteration(self, number: int) -> None:
        """Prompts, samples, rewards, advantages, update."""
        chosen = choose(len(self.everyone), self.choose, self.base.plan.seed, number)
        self.sampler.prompts = [self.everyone[i] for i in chosen]
        self.sampler.iteration = self.trainer.iteration = number
        drawn = self.sampler.run(self.base.emptied("samples"))
        self.trainer.run(data := self._data(drawn), self._parts(data), self.base.emptied("policy"))

    def _data(self, drawn: list[Batch]) -> Data:
        ids = [f"{batch.prompt_id}/{i}" for batch in drawn for i in batch.indices]
        prompt_ids = [batch.prompt_id for batch in drawn for _ in batch.indices]
        latents = torch.cat([batch.latents for batch in drawn if batch.latents is not None])
        return Data(ids, prompt_ids, self._advantages(drawn, prompt_ids), latents, self.embedded)

    def _advantages(self, drawn: list[Batch], prompt_ids: list[str]) -> torch.Tensor:
        pixels = [one for batch in drawn if batch.pixels is not None for one in batch.pixels]
        texts = [batch.prompt for batch in drawn for _ in batch.indices]
        total = np.zeros(len(texts))
        for config in cast(ScoreConfig, self.base.plan.nodes["score"].config).rewards.values():
            function, settings = reward(config)
            total += config.weight * np.array(function(settings, pixels, texts, [{}] * len(texts)), dtype=float)
        groups = np.array(prompt_ids)
        values = np.zeros(len(texts))
        for group in dict.fromkeys(prompt_ids):
            mine = total[groups == group]
            spread = mine.std()
            values[groups == group] = (mine - mine.mean()) / (spread + 1e-4) if spread > 1e-6 else 0.0
        return torch.from_numpy(values.clip(-5, 5)).float()

    def _parts(self, data: Data) -> list[list[list[int]]]:
        """The samples in the order that the stage draws, in even parts, in micro-batches."""
        plan, ids = self.base.plan, data.sample_ids
        key = (plan.seed, self.trainer.iteration, 0, "order")
        order = sorted(range(len(ids)), key=lambda row: (seed_of(*key, ids[row]), ids[row]))
        steps, size = self.base.updating.steps, plan.resources.micro_batch_of("update", "update")
        cuts = [len(order) * i // steps for i in range(steps + 1)]
        parts = [order[a:b] for a, b in pairwise(cuts)]
        return [[part[i : i + size] for i in range(0, len(part), size)] for part in parts]


def commits(run: Path, times: int) -> list[float]:
    """When each iteration's last stage came to its place: the folder above it changed then."""
    return [(run / f"{iteration:04d}").stat().st_mtime for iteration in range(times)]


def stage_seconds(run: Path, times: int) -> list[dict[str, float]]:
    """By iteration and stage, from the records."""
    out = []
    for iteration in range(times):
        records = {name: RunDirectory(run).stage(Address("body", name, iteration)).record() for name in _BODY}
        out.append({name: record.volatile.seconds for name, record in records.items() if record is not None})
    return out


def _plan(folder: Path, scale: Scale) -> Plan:
    """`shapes` without evaluations and without what stands before and after its loop."""
    yaml = YAML()
    flow = yaml.load(FLOWS)["flows"]["shapes"]
    flow["stages"] = {name: flow["stages"][name] for name in ("all_prompts", "encode")}
    flow["loop"]["body"] = {name: flow["loop"]["body"][name] for name in _BODY}
    flow["loop"].pop("stop")
    flow.pop("after")
    file = folder / "flows.yaml"
    with file.open("w") as stream:
        yaml.dump({"flows": {"shapes": flow}}, stream)
    return compile_flow(load(file, "shapes", _sets(scale)), "shapes")


def _sets(scale: Scale) -> tuple[str, ...]:
    own = (f"times={scale.repetitions + 1}", f"resources.threads={scale.threads}", "resources.preflight=false")
    return (*scale.sets, *own)


def _by_stage(stages: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in stages) for name in _BODY}


def _orchestration(name: str, how: str, walls: Sequence[float], stages: Sequence[dict[str, float]]) -> Row:
    values = [(wall - sum(taken.values())) / len(taken) for wall, taken in zip(walls, stages, strict=True)]
    what = f"per stage, {how}: wall time of a warm iteration less the seconds of its stages"
    return Row(name, what, values, 0.05, "s", {"iteration": statistics.median(walls)}, _by_stage(stages))
