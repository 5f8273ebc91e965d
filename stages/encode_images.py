"""Stage `encode_images`: pictures to final latents, so that losses on final latents can learn from them."""

import numpy as np
import pyarrow as pa
import torch
from torch import distributed

from schemas.artifacts import TrajectoryTable
from schemas.contracts import EncodeImagesConfig, EncodeImagesInputs, EncodeImagesOutputs
from schemas.errors import InputError
from schemas.tables import trajectory_schema
from stages.context import StageContext
from stages.models import Adapter, adapter
from stages.store import images, tables
from stages.store.tables import TableWriter

_SHARD = 256  # rows, whatever the micro-batch, so that a restart with another one finds its shards
_KEPT = ("sample_id", "prompt_id", "index", "seed")


def run(config: EncodeImagesConfig, inputs: EncodeImagesInputs, ctx: StageContext) -> EncodeImagesOutputs:
    """Writes a trajectory without steps."""
    model = adapter(config.model, inputs.pipeline)
    samples = tables.read(inputs.samples)
    shape = model.latent_shape()
    writer = TableWriter(ctx.directory, "trajectory", trajectory_schema(shape, 0))
    num_shards = -(-len(samples) // _SHARD)
    finished = writer.finished()
    mine = [k for k in range(num_shards) if k % ctx.world_size == ctx.rank and k not in finished]
    for done, k in enumerate(mine, start=1):
        rows = samples.slice(k * _SHARD, _SHARD)
        calls = k * -(-_SHARD // ctx.micro_batch) + np.arange(len(rows)) // ctx.micro_batch
        columns = {name: rows.column(name).to_pylist() for name in _KEPT}
        columns |= {"micro_batch": calls, "guidance_scale": [1.0] * len(rows), "latents": _latents(model, rows, ctx)}
        writer.write(k, columns)
        ctx.progress(done, len(mine), "shards")
    if ctx.world_size > 1 and distributed.is_initialized():
        distributed.barrier()
    facts = {"latent_shape": shape, "num_steps": 0, "sampler": {}, "policy": "", "weights": "none"}
    trajectory = writer.ref(TrajectoryTable, num_shards, **facts)
    return EncodeImagesOutputs(trajectory=trajectory, metrics={"pictures": len(samples)})


def _latents(model: Adapter, rows: pa.Table, ctx: StageContext) -> np.ndarray:
    """(rows, *latent_shape) float32."""
    wanted = (model.resolution(), model.resolution(), 3)
    pictures = []
    for sample_id, value in zip(rows.column("sample_id").to_pylist(), rows.column("image").to_pylist(), strict=True):
        picture = images.pixels(value, sample_id)
        if picture.shape != wanted:
            raise InputError(
                f"picture {sample_id!r} is {picture.shape[1]} x {picture.shape[0]} pixels, the model wants "
                f"{wanted[1]} x {wanted[0]}; set `resolution` of import_samples, resize them, or set `model.resolution`"
            )
        pictures.append(picture)
    batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    parts = [model.encode_pictures(part, torch.device(ctx.device)) for part in batch.split(ctx.micro_batch)]
    return torch.cat(parts).numpy()
