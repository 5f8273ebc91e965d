"""Micro-batches and shards, cut by identity, never by rank."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from schemas.contracts import SampleConfig, SampleInputs
from stages.context import StageContext
from stages.engine.mesh import barrier
from stages.store import files, tables

_CUT = "micro_batches.json"  # beside the launcher's own mark, for a stage that runs alone


class MicroBatch(NamedTuple):
    """Samples of one prompt that share their model calls; `number` counts over the whole stage."""

    number: int
    prompt_id: str
    prompt: str
    metadata: str
    indices: tuple[int, ...]

    @property
    def sample_ids(self) -> list[str]:
        """One a sample."""
        return [f"{self.prompt_id}/{index}" for index in self.indices]


class Turn(NamedTuple):
    """A shard on this rank. All ranks make `calls` micro-batches in a turn; what does not count is dropped."""

    shard: int
    counts: bool
    calls: int


def micro_batches(config: SampleConfig, inputs: SampleInputs, size: int) -> list[MicroBatch]:
    """All work of the stage: prompts in the table's order, at most `size` samples each."""
    table = tables.read(inputs.prompts)
    out: list[MicroBatch] = []
    for row in table.to_pylist():
        for first in range(0, config.per_prompt, size):
            indices = tuple(range(first, min(first + size, config.per_prompt)))
            out.append(MicroBatch(len(out), row["prompt_id"], row["prompt"], row["metadata"], indices))
    return out


def turns(missing: Sequence[int], shards: Sequence[Sequence[MicroBatch]], ctx: StageContext) -> list[Turn]:
    """This rank's shards; a short rank repeats one and drops it, so that all make equally many model calls."""
    out = []
    for first in range(0, len(missing), ctx.lanes):
        now = missing[first : first + ctx.lanes]
        works = ctx.lane < len(now)
        longest = max(len(shards[shard]) for shard in now)
        out.append(Turn(now[ctx.lane] if works else missing[0], works and ctx.leads, longest))
    return out


def drop_other_cut(ctx: StageContext, names: Sequence[str]) -> None:
    """Shards that a stopped run left in the folders `names` are kept only if they were cut in the same way."""
    cut = {"micro_batch": ctx.micro_batch, "shard_micro_batches": ctx.resources.shard_micro_batches}
    path = Path(ctx.directory) / _CUT
    if ctx.rank == 0 and not (path.is_file() and path.read_text() == json.dumps(cut)):
        for name in names:
            shutil.rmtree(Path(ctx.directory) / name, ignore_errors=True)
        with files.written(path) as temporary:
            temporary.write_text(json.dumps(cut))
    barrier()
