"""Stage `encode`: text embeddings of prompts, each computed alone, so that no number depends on the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from schemas.artifacts import ConditioningTable
from schemas.contracts import EncodeConfig, EncodeInputs, EncodeOutputs
from schemas.tables import conditioning_schema
from stages.context import StageContext
from stages.models import adapter
from stages.store import tables
from stages.store.tables import TableWriter

_SHARD = 64  # rows of a table
_LOAD = 16  # shards between two loads of the text encoders, which bounds memory


def run(config: EncodeConfig, inputs: EncodeInputs, ctx: StageContext) -> EncodeOutputs:
    """Writes the embeddings of every prompt and, as the first row, of the negative prompt."""
    model = adapter(config.model, inputs.pipeline)
    prompts = tables.read(inputs.prompts)
    ids = ["", *prompts.column("prompt_id").to_pylist()]
    texts = [config.negative_prompt, *prompts.column("prompt").to_pylist()]
    writer = TableWriter(ctx.directory, "embeddings", conditioning_schema(model.conditioning))
    num_shards = -(-len(ids) // _SHARD)
    finished = writer.finished()
    mine = [k for k in range(num_shards) if k % ctx.world_size == ctx.rank and k not in finished]
    for start in range(0, len(mine), _LOAD):
        shards = mine[start : start + _LOAD]
        wanted = [text for k in shards for text in texts[k * _SHARD : (k + 1) * _SHARD]]
        unique = list(dict.fromkeys(wanted))
        encoded = dict(zip(unique, model.encode(unique, torch.device(ctx.device)), strict=True))
        for done, k in enumerate(shards, start=start + 1):
            rows = slice(k * _SHARD, (k + 1) * _SHARD)
            writer.write(k, _columns(model.conditioning, ids[rows], [encoded[text] for text in texts[rows]]))
            ctx.progress(done, len(mine), "shards")
    if ctx.world_size > 1 and distributed.is_initialized():
        distributed.barrier()
    ref = writer.ref(ConditioningTable, num_shards, names=model.conditioning)
    return EncodeOutputs(embeddings=ref, metrics={"prompts": len(ids) - 1})


def _columns(names: Sequence[str], ids: Sequence[str], rows: Sequence[dict[str, Tensor]]) -> dict[str, object]:
    # No prompt has an empty id, so the negative row is the one that has.
    columns: dict[str, object] = {"prompt_id": ids, "role": ["prompt" if i else "negative" for i in ids]}
    return columns | {name: [row[name].numpy() for row in rows] for name in names}
