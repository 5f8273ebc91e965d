"""Stage `render`: pictures of the built-in example's prompts, drawn from seeds. Loads no torch."""

import numpy as np

from schemas.artifacts import SamplesTable
from schemas.errors import InputError
from schemas.seeds import seed_of
from schemas.shapes import RenderConfig, RenderInputs, RenderOutputs
from schemas.tables import samples_schema
from stages.context import StageContext
from stages.shapes.render import render
from stages.shapes.scenes import Scene, parse
from stages.store import images, tables
from stages.store.tables import TableWriter

_SHARD = 16  # prompts


def run(config: RenderConfig, inputs: RenderInputs, ctx: StageContext) -> RenderOutputs:
    """Writes `per_prompt` pictures of each prompt; shards that are there already are kept."""
    prompts = tables.read(inputs.prompts).to_pylist()
    scenes = [_scene(prompt["prompt"]) for prompt in prompts]
    writer = TableWriter(ctx.directory, "samples", samples_schema())
    num_shards = -(-len(prompts) // _SHARD)
    finished = writer.finished()
    for k in range(num_shards):
        if k not in finished:
            rows: list[dict[str, object]] = []
            for i in range(k * _SHARD, min((k + 1) * _SHARD, len(prompts))):
                for index in range(config.per_prompt):
                    rows.append(_row(prompts[i], scenes[i], index, ctx))
                    ctx.progress(i * config.per_prompt + index + 1, len(prompts) * config.per_prompt, "pictures")
            writer.write(k, {name: [row[name] for row in rows] for name in rows[0]})
    samples = writer.ref(SamplesTable, num_shards)
    return RenderOutputs(samples=samples, metrics={"pictures": samples.rows})


def _scene(prompt: str) -> Scene:
    try:
        return parse(prompt)
    except ValueError as error:
        raise InputError(f"`prompts`: {error}") from error


def _row(prompt: dict[str, str], scene: Scene, index: int, ctx: StageContext) -> dict[str, object]:
    iteration = "fixed" if ctx.iteration is None else ctx.iteration
    seed = seed_of(ctx.seed, iteration, prompt["prompt_id"], index, "render")
    picture = render(scene, np.random.default_rng(seed))
    keys = {"sample_id": f"{prompt['prompt_id']}-{index}", "index": index, "seed": seed}
    return {**prompt, **keys, "image": images.png(picture)}
