"""Scores shards as they commit, beside sampling. The score stage then finds them as if a stopped run had left them.

What is made early lies in RUN/early until the stage that wants it takes it; nothing there is ever trusted by its name
alone: a shard is taken when it was made from a shard of the same content.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.launch import Launcher
from pipelines.plan import FromNode, PlanNode
from pipelines.rundir import Address
from pipelines.unroll import Unrolled
from schemas.artifacts import SamplesTable, Shard
from schemas.contracts import SampleConfig, ScoreConfig
from schemas.errors import RewardflowError
from schemas.record import StageRequest

_FOLDER, _OF = "early", "of.json"
_LOOK = 0.2  # seconds between looks for new shards


def forget(run: Path) -> None:
    """What a stopped run made early and nobody took."""
    shutil.rmtree(run / _FOLDER, ignore_errors=True)


@contextmanager
def beside(world: Unrolled, launcher: Launcher, node: PlanNode, iteration: int | None, partial: Path) -> Iterator[None]:
    """Inside, a sample stage writes shards into `partial`, which its score stages score at once."""
    readers = _readers(world, node, iteration)
    if not world.plan.resources.overlap or not readers:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_score, args=(world, launcher, readers, iteration, partial, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def take(world: Unrolled, node: PlanNode, iteration: int | None, partial: Path, samples: Mapping[str, Any]) -> int:
    """Gives a score stage the shards that were scored early; the number of them."""
    folder, taken = _place(world, node, iteration), 0
    for number, shard in enumerate(samples["shards"]):
        made = folder / f"{number:05d}"
        if not (made / _OF).is_file() or json.loads((made / _OF).read_text()) != shard["digest"]:
            continue
        target = partial / "rewards"
        target.mkdir(exist_ok=True)
        for kind in ("arrow", "json"):  # what commits it comes last
            os.replace(made / "rewards" / f"shard-00000.{kind}", target / f"shard-{number:05d}.{kind}")
        taken += 1
    shutil.rmtree(folder, ignore_errors=True)
    return taken


def _readers(world: Unrolled, node: PlanNode, iteration: int | None) -> list[PlanNode]:
    if not isinstance(node.config, SampleConfig):
        return []
    wanted = FromNode(node.name, "samples")
    nodes = world.plan.section(node.section) if iteration is None else world.body(iteration)
    return [n for n in nodes if isinstance(n.config, ScoreConfig) and n.inputs.get("samples") == wanted and not n.when]


def _score(
    world: Unrolled,
    launcher: Launcher,
    readers: list[PlanNode],
    iteration: int | None,
    partial: Path,
    ended: threading.Event,
) -> None:
    done: set[Path] = set()
    while not ended.wait(_LOOK):
        for sidecar in sorted(set((partial / "samples").glob("shard-*.json")) - done):
            for reader in readers:
                if ended.is_set():
                    return
                try:
                    _score_one(world, launcher, reader, iteration, sidecar)
                except (RewardflowError, OSError, ValueError):
                    return  # the stage itself meets the same, and tells it
            done.add(sidecar)


def _score_one(world: Unrolled, launcher: Launcher, reader: PlanNode, iteration: int | None, sidecar: Path) -> None:
    from schemas.tables import samples_schema, table_digest  # pyarrow, which most commands do without

    told = json.loads(sidecar.read_text())
    shard = Shard(file=sidecar.with_suffix(".arrow").name, rows=told["rows"], digest=told["digest"])
    digest = table_digest(samples_schema(), [shard])
    table = SamplesTable(path=str(sidecar.parent.resolve()), digest=digest, rows=shard.rows, shards=(shard,))
    number = int(sidecar.stem.rpartition("-")[2])
    folder = _place(world, reader, iteration) / f"{number:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    request = StageRequest(
        stage=reader.stage,
        node=reader.name,
        config=reader.config.model_dump(mode="json"),
        inputs={"samples": table.model_dump(mode="json")},
        directory=str(folder.resolve()),
        seed=world.plan.seed,
        iteration=iteration,
        resources=world.plan.resources,
        python_path=world.plan.python_path,
    )
    launcher.run(request, lambda done, total, unit: None)
    (folder / _OF).write_text(json.dumps(shard.digest))


def _place(world: Unrolled, node: PlanNode, iteration: int | None) -> Path:
    return world.run.path / _FOLDER / Address(node.section, node.name, iteration).path.replace("/", "-")
