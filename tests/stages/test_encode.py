"""Stages `encode` and `encode_images` on a real tiny pipeline."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from schemas.artifacts import ConditioningTable, PromptsTable, SamplesTable
from schemas.contracts import EncodeConfig, EncodeImagesConfig, EncodeImagesInputs, EncodeInputs
from schemas.engine import Resources
from schemas.errors import InputError
from schemas.models import Sd3Model
from schemas.tables import prompts_schema, samples_schema
from stages import encode, encode_images
from stages.context import StageContext
from stages.models.sd3 import Sd3
from stages.store import images, tables
from stages.store.tables import TableWriter

CPU = torch.device("cpu")


def context(directory: Path, rank: int = 0, world_size: int = 1, micro_batch: int = 8) -> StageContext:
    directory.mkdir(exist_ok=True)
    return StageContext(directory, "encode", 0, None, Resources(), micro_batch, rank, world_size)


def prompts(directory: Path, texts: list[str]) -> PromptsTable:
    writer = TableWriter(directory, "chosen", prompts_schema())
    ids = [f"p{i}" for i in range(len(texts))]
    writer.write(0, {"prompt_id": ids, "prompt": texts, "metadata": ["{}"] * len(texts)})
    return writer.ref(PromptsTable, 1).under(directory)


def pictures(directory: Path, num: int, size: int = 16) -> SamplesTable:
    writer = TableWriter(directory, "samples", samples_schema())
    drawn = np.random.default_rng(0).integers(0, 256, (num, size, size, 3), dtype=np.uint8)
    columns = {name: [f"{name}{i}" for i in range(num)] for name in ("sample_id", "prompt_id", "prompt", "metadata")}
    numbers = list(range(num))
    writer.write(0, {**columns, "index": numbers, "seed": numbers, "image": [images.png(p) for p in drawn]})
    return writer.ref(SamplesTable, 1).under(directory)


def rows_of(ref: ConditioningTable) -> dict[str, dict[str, np.ndarray]]:
    table = tables.read(ref)
    columns = {name: tables.ragged(table, name) for name in ref.names}
    ids = table.column("prompt_id").to_pylist()
    return {key: {name: columns[name][row] for name in ref.names} for row, key in enumerate(ids)}


def test_a_row_a_prompt_and_one_negative(sd3_folder: Path, tmp_path: Path) -> None:
    model = Sd3Model(path=str(sd3_folder), max_sequence_length=8)
    given = prompts(tmp_path, ["one", "two red circles", "one"])
    outputs = encode.run(
        EncodeConfig(model=model, negative_prompt="no"), EncodeInputs(prompts=given), context(tmp_path)
    )
    found = rows_of(outputs.embeddings.under(tmp_path))
    expected: list[dict[str, Tensor]] = Sd3(model, str(sd3_folder)).encode(["no", "one", "two red circles", "one"], CPU)
    for key, row in zip(["", "p0", "p1", "p2"], expected, strict=True):
        for name in ("embeds", "pooled"):
            np.testing.assert_array_equal(found[key][name], row[name].numpy())
    roles = tables.read(outputs.embeddings.under(tmp_path)).column("role").to_pylist()
    assert roles == ["negative", "prompt", "prompt", "prompt"]
    assert outputs.embeddings.names == ("embeds", "pooled")


def test_ranks_share_the_shards_and_a_restart_keeps_them(sd3_folder: Path, tmp_path: Path) -> None:
    config = EncodeConfig(model=Sd3Model(path=str(sd3_folder), max_sequence_length=8))
    inputs = EncodeInputs(prompts=prompts(tmp_path, [f"{'abc'[i % 3]} {'xyz'[i % 2]}" for i in range(150)]))
    whole = encode.run(config, inputs, context(tmp_path / "one"))
    two = tmp_path / "two"
    with pytest.raises(InputError, match="shard 1"):  # rank 1's shard is not there yet
        encode.run(config, inputs, context(two, 0, 2))
    written = (two / "embeddings" / "shard-00000.arrow").stat().st_mtime_ns
    shared = encode.run(config, inputs, context(two, 1, 2))
    assert shared == whole
    assert len(whole.embeddings.shards) == 3
    assert encode.run(config, inputs, context(two)) == whole
    assert (two / "embeddings" / "shard-00000.arrow").stat().st_mtime_ns == written


def test_images_become_latents(sd3_folder: Path, tmp_path: Path) -> None:
    config = EncodeImagesConfig(model=Sd3Model(path=str(sd3_folder)))
    given = pictures(tmp_path, 5)
    outputs = encode_images.run(config, EncodeImagesInputs(samples=given), context(tmp_path, micro_batch=2))
    trajectory = outputs.trajectory.under(tmp_path)
    table = tables.read(trajectory)
    values = tables.read(given).column("image").to_pylist()
    batch = torch.from_numpy(np.stack([images.pixels(value) for value in values])).permute(0, 3, 1, 2) / 255
    expected = Sd3(config.model, str(sd3_folder)).encode_pictures(batch, CPU)
    np.testing.assert_allclose(tables.tensors(table, "latents"), expected.numpy(), atol=1e-5)
    assert table.column("sample_id").to_pylist() == tables.read(given).column("sample_id").to_pylist()
    assert table.column("micro_batch").to_pylist() == [0, 0, 1, 1, 2]
    assert (trajectory.latent_shape, trajectory.num_steps, trajectory.sampler) == ((4, 8, 8), 0, {})
    assert (trajectory.policy, trajectory.weights) == ("", "none")


def test_images_of_a_wrong_size(sd3_folder: Path, tmp_path: Path) -> None:
    config = EncodeImagesConfig(model=Sd3Model(path=str(sd3_folder)))
    with pytest.raises(InputError, match=r"'sample_id0' is 24 x 24.*wants 16 x 16.*model\.resolution"):
        encode_images.run(config, EncodeImagesInputs(samples=pictures(tmp_path, 2, 24)), context(tmp_path))
