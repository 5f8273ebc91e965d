"""Stage `fit_autoencoder`: the example's pipeline from a seed, its autoencoder fitted to pictures."""

import numpy as np
from torch import distributed

from schemas.artifacts import PipelineRef
from schemas.assets import digest_of
from schemas.seeds import seed_of
from schemas.shapes import FitAutoencoderConfig, FitAutoencoderInputs, FitAutoencoderOutputs
from stages.context import StageContext
from stages.shapes.autoencoder import fit_autoencoder
from stages.shapes.build import build_pipeline
from stages.store import images, tables

_FOLDER = "pipeline"


def run(config: FitAutoencoderConfig, inputs: FitAutoencoderInputs, ctx: StageContext) -> FitAutoencoderOutputs:
    """Writes the pipeline folder. Rank 0 works; the model is too small to share."""
    metrics = _fit(config, inputs, ctx) if ctx.rank == 0 else {}
    if ctx.world_size > 1 and distributed.is_initialized():
        distributed.barrier()
    pipeline = PipelineRef(path=_FOLDER, digest=digest_of(ctx.directory / _FOLDER))
    return FitAutoencoderOutputs(pipeline=pipeline, metrics=metrics)


def _fit(config: FitAutoencoderConfig, inputs: FitAutoencoderInputs, ctx: StageContext) -> dict[str, float]:
    values = tables.read(inputs.samples).column("image").to_pylist()
    pictures = np.stack([images.pixels(value) for value in values])
    pipeline = build_pipeline(seed_of(ctx.seed, "pipeline"))
    metrics = fit_autoencoder(pipeline.vae, pictures, config.steps, seed_of(ctx.seed, "autoencoder"), ctx.progress)
    pipeline.save_pretrained(ctx.directory / _FOLDER)
    return metrics
