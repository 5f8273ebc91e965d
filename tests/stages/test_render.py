"""Stages `render` and `fit_autoencoder`: the example's data and its pipeline."""

from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.artifacts import PipelineRef, PromptsTable
from schemas.contracts import (
    EncodeImagesConfig,
    EncodeImagesInputs,
    FitAutoencoderConfig,
    FitAutoencoderInputs,
    RenderConfig,
    RenderInputs,
)
from schemas.engine import Resources
from schemas.errors import InputError
from schemas.models import Sd3Model
from schemas.tables import prompts_schema
from stages import encode_images, fit_autoencoder, render
from stages.context import StageContext
from stages.models.sd3 import Sd3
from stages.shapes.check import check
from stages.shapes.scenes import parse
from stages.store import images, tables
from stages.store.tables import TableWriter


def context(directory: Path, iteration: int | None = None, seed: int = 0) -> StageContext:
    return StageContext(directory, "render", seed, iteration, Resources(), 8)


def prompts(directory: Path, texts: list[str]) -> PromptsTable:
    writer = TableWriter(directory, "chosen", prompts_schema())
    ids = [f"p{i}" for i in range(len(texts))]
    writer.write(0, {"prompt_id": ids, "prompt": texts, "metadata": ["{}"] * len(texts)})
    return writer.ref(PromptsTable, 1).under(directory)


def test_pictures_show_their_prompts(tmp_path: Path) -> None:
    given = prompts(tmp_path, ["two red circles", "three blue squares"])
    outputs = render.run(RenderConfig(per_prompt=6), RenderInputs(prompts=given), context(tmp_path))
    table = tables.read(outputs.samples.under(tmp_path))
    drawn = np.stack([images.pixels(value) for value in table.column("image").to_pylist()])
    texts = table.column("prompt").to_pylist()
    assert texts == ["two red circles"] * 6 + ["three blue squares"] * 6
    assert check(drawn, [parse(text) for text in texts]).strict.mean() >= 0.9
    assert len({picture.tobytes() for picture in drawn}) == 12
    assert len(set(table.column("sample_id").to_pylist())) == 12
    assert table.column("index").to_pylist() == [*range(6), *range(6)]


def test_pictures_depend_on_seed_and_iteration_alone(tmp_path: Path) -> None:
    inputs = RenderInputs(prompts=prompts(tmp_path, ["one red circle"]))
    digests = [
        render.run(RenderConfig(per_prompt=3), inputs, context(tmp_path / str(i), iteration, seed)).samples.digest
        for i, (iteration, seed) in enumerate([(0, 0), (0, 0), (1, 0), (0, 1), (None, 0)])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_a_prompt_that_is_not_the_examples(tmp_path: Path) -> None:
    inputs = RenderInputs(prompts=prompts(tmp_path, ["a horse"]))
    with pytest.raises(InputError, match=r"`prompts`.*a horse.*two red circles"):
        render.run(RenderConfig(), inputs, context(tmp_path))


def test_the_fitted_pipeline_is_one_the_adapter_reads(tmp_path: Path) -> None:
    given = prompts(tmp_path, ["two red circles", "one blue square"])
    samples = render.run(RenderConfig(per_prompt=4), RenderInputs(prompts=given), context(tmp_path)).samples
    inputs = FitAutoencoderInputs(samples=samples.under(tmp_path))
    outputs = fit_autoencoder.run(FitAutoencoderConfig(steps=3), inputs, context(tmp_path))
    assert all(np.isfinite(value) for value in outputs.metrics.values())
    pipeline: PipelineRef = outputs.pipeline.under(tmp_path)
    model = Sd3Model(max_sequence_length=8)
    adapter = Sd3(model, pipeline.path)
    (row,) = adapter.encode(["two red circles"], torch.device("cpu"))
    assert row["embeds"].shape[0] == 16
    latents = encode_images.run(
        EncodeImagesConfig(model=model),
        EncodeImagesInputs(samples=samples.under(tmp_path), pipeline=pipeline),
        context(tmp_path),
    ).trajectory
    found = tables.tensors(tables.read(latents.under(tmp_path)), "latents")
    assert abs(float(found.mean())) < 0.05
    assert float(found.std()) == pytest.approx(1.0, abs=0.05)
