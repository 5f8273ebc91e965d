from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from schemas.artifacts import ConditioningTable, PromptsTable, SamplesTable, TableRef, TrajectoryTable
from schemas.errors import InputError
from schemas.tables import conditioning_schema, prompts_schema, samples_schema, tensor_field, trajectory_schema
from stages.store import images, tables
from stages.store.digests import columns_digest

SHAPES = [(6,), (5, 4), (3, 4, 4), (2, 3, 4, 4)]  # 1-D, packed (L, C), picture, video (C, F, H, W)


def _trajectory(rows: range, shape: tuple[int, ...], steps: int, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(rows.start)
    per_step = rng.random((len(rows), steps), np.float32)
    return {
        "sample_id": [f"p/{i}" for i in rows],
        "prompt_id": ["p"] * len(rows),
        "index": list(rows),
        "seed": [2**62 + i for i in rows],
        "micro_batch": [0] * len(rows),
        "guidance_scale": [1.5] * len(rows),
        "latents": rng.standard_normal((len(rows), *shape), np.float32),
        "states": rng.standard_normal((len(rows), steps + 1, *shape), np.float32).astype(dtype),
        "step_index": np.tile(np.arange(steps), (len(rows), 1)),
        **dict.fromkeys(("sigma", "sigma_next", "sigma_max", "timestep", "log_prob"), per_step),
    }


def _written(directory: Path, shape: tuple[int, ...] = (3, 4, 4), dtype: Any = "float32") -> TrajectoryTable:
    writer = tables.TableWriter(directory, "trajectory", trajectory_schema(shape, 2, dtype))
    writer.write(1, _trajectory(range(2, 5), shape, 2, dtype))
    writer.write(0, _trajectory(range(0, 2), shape, 2, dtype))
    ref = writer.ref(TrajectoryTable, 2, latent_shape=shape, num_steps=2, sampler={}, policy="", weights="raw")
    return ref.under(directory)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_come_back_bit_by_bit_in_the_order_of_shards(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    ref = _written(tmp_path, shape, dtype)
    table = tables.read(ref)
    wanted = [_trajectory(range(0, 2), shape, 2, dtype), _trajectory(range(2, 5), shape, 2, dtype)]
    states = tables.tensors(table, "states")
    assert states.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(states, np.concatenate([w["states"] for w in wanted]))
    np.testing.assert_array_equal(tables.tensors(table, "latents"), np.concatenate([w["latents"] for w in wanted]))
    np.testing.assert_array_equal(tables.tensors(table, "log_prob"), np.concatenate([w["log_prob"] for w in wanted]))
    np.testing.assert_array_equal(tables.tensors(table, "states", [4, 0, 4]), states[[4, 0, 4]])
    assert table.column("seed").to_pylist() == [2**62 + i for i in range(5)]
    assert tables.positions(table, "sample_id") == {f"p/{i}": i for i in range(5)}
    tables.verify(ref)


def test_a_column_of_one_shard_is_not_copied(tmp_path: Path) -> None:
    writer = tables.TableWriter(tmp_path, "t", pa.schema([tensor_field("x", (3, 2))]))
    writer.write(0, {"x": np.ones((4, 3, 2), np.float32)})
    x = tables.tensors(tables.read(writer.ref(TableRef, 1).under(tmp_path)), "x")
    assert not x.flags.owndata
    assert not x.flags.writeable


def test_ragged_tensors_come_back_with_their_shapes(tmp_path: Path) -> None:
    writer = tables.TableWriter(tmp_path, "conditioning", conditioning_schema(("embeds", "pooled")))
    embeds = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) for n in (2, 5, 1)]
    pooled = [np.full(4, n, np.float32) for n in (1, 2, 3)]
    for index, rows in enumerate((slice(0, 2), slice(2, 3))):
        keys = {"prompt_id": ["a", "b", ""][rows], "role": ["positive", "positive", "negative"][rows]}
        writer.write(index, {**keys, "embeds": embeds[rows], "pooled": pooled[rows]})
    table = tables.read(writer.ref(ConditioningTable, 2, names=("embeds", "pooled")).under(tmp_path))
    for got, wanted in zip(tables.ragged(table, "embeds"), embeds, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(tables.ragged(table, "pooled", [2, 0]), [pooled[2], pooled[0]], strict=True):
        np.testing.assert_array_equal(got, wanted)


def _samples(directory: Path) -> tuple[SamplesTable, np.ndarray]:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    writer = tables.TableWriter(directory, "samples", samples_schema())
    columns = {
        "sample_id": ["a/0", "a/1", "a/2"],
        "prompt_id": ["a"] * 3,
        "prompt": ["one red circle"] * 3,
        "metadata": ["{}"] * 3,
        "index": [0, 1, 2],
        "seed": [2**62, 5, 6],
        "image": [images.png(picture) for picture in pictures],
    }
    writer.write(0, columns)
    return writer.ref(SamplesTable, 1).under(directory), pictures


def _opened(path: Path, how: str, cache: Path) -> datasets.Dataset:
    if how == "from_file":
        return datasets.Dataset.from_file(str(path))
    loaded = datasets.load_dataset("arrow", data_files=str(path), split="train", cache_dir=str(cache))
    assert isinstance(loaded, datasets.Dataset)
    return loaded


@pytest.mark.parametrize("how", ["from_file", "load_dataset"])
def test_datasets_opens_samples_and_decodes_their_pictures(tmp_path: Path, how: str) -> None:
    ref, pictures = _samples(tmp_path)
    data = _opened(Path(ref.path) / ref.shards[0].file, how, tmp_path / "cache")
    assert isinstance(data.features["image"], datasets.Image)
    assert data["seed"][0] == 2**62
    np.testing.assert_array_equal(np.asarray(data[1]["image"]), pictures[1])
    np.testing.assert_array_equal(images.pixels(tables.read(ref).column("image")[2].as_py()), pictures[2])


@pytest.mark.parametrize("how", ["from_file", "load_dataset"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_datasets_opens_trajectories(tmp_path: Path, how: str, dtype: str) -> None:
    ref = _written(tmp_path, (5, 4), dtype)
    data = _opened(Path(ref.path) / ref.shards[1].file, how, tmp_path / "cache")
    wanted = _trajectory(range(2, 5), (5, 4), 2, dtype)
    got = np.asarray(data.with_format("numpy")["states"][:]).reshape(3, 3, 5, 4)
    np.testing.assert_array_equal(got.astype(dtype), wanted["states"])
    assert data["sample_id"][:] == wanted["sample_id"]


def test_digest_covers_values_names_types_and_not_buffers() -> None:
    schema = pa.schema([tensor_field("x", (2,)), ("s", pa.string()), ("n", pa.float64()), ("l", pa.list_(pa.int32()))])
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8, dtype=np.float32)), type=schema.field("x").type)
    columns = [x, pa.array(["a", None, "", "dé"]), pa.array([1.0, None, 0.0, 2.0]), pa.array([[1], None, [], [2, 3]])]
    whole = pa.table([c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    halves = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    rebuilt = pa.Table.from_pylist(whole.slice(1, 2).to_pylist(), schema=schema)
    assert columns_digest(whole) == columns_digest(halves) == columns_digest(whole.combine_chunks())
    assert columns_digest(rebuilt) == columns_digest(whole.slice(1, 2))
    renamed = whole.rename_columns(["y", "s", "n", "l"])
    nulled = whole.set_column(1, "s", pa.array(["a", "", "", "dé"]))
    zeroed = whole.set_column(2, "n", pa.array([1.0, 0.0, 0.0, 2.0]))
    moved = whole.set_column(1, "s", pa.array(["a", None, "d", "é"]))
    others = [renamed, nulled, zeroed, moved, whole.slice(1), whole.select(["x", "n", "s", "l"])]
    assert len({columns_digest(t) for t in [whole, *others]}) == 1 + len(others)


def test_equal_content_has_an_equal_table_digest_and_other_content_another(tmp_path: Path) -> None:
    first, second = _written(tmp_path / "a"), _written(tmp_path / "b")
    assert first.digest == second.digest
    assert first.digest != _written(tmp_path / "c", dtype="float16").digest


def test_only_whole_shards_count_as_finished(tmp_path: Path) -> None:
    ref = _written(tmp_path)
    schema = trajectory_schema((3, 4, 4), 2)
    assert tables.TableWriter(tmp_path, "trajectory", schema).finished() == {0, 1}
    assert tables.TableWriter(tmp_path, "trajectory", trajectory_schema((3, 4, 4), 1)).finished() == set()
    shard = Path(ref.path) / "shard-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-200])
    (Path(ref.path) / "shard-00002.arrow.tmp").write_bytes(b"half")
    (Path(ref.path) / "shard-00003.json").write_text("{}")
    writer = tables.TableWriter(tmp_path, "trajectory", schema)
    assert writer.finished() == {0}
    with pytest.raises(InputError, match="shard 2 was not committed"):
        writer.ref(TableRef, 3)
    writer.write(1, _trajectory(range(2, 5), (3, 4, 4), 2))
    assert writer.finished() == {0, 1}
    assert writer.ref(TableRef, 2).digest == ref.digest


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garble(path: Path) -> None:
    path.write_bytes(b"this is not an Arrow stream, but long enough to be taken for one")


def _shorten(path: Path) -> None:
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.slice(1))


@pytest.mark.parametrize("damage", [_remove, _truncate, _empty, _garble, _shorten])
def test_a_damaged_shard_is_named_with_its_remedy(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    ref = _written(tmp_path / "sample")
    damage(Path(ref.path) / "shard-00001.arrow")
    with pytest.raises(InputError) as caught:
        tables.read(ref)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "sample" / "trajectory" / "shard-00001.arrow"))
    assert message.endswith(f"Delete the stage's directory {tmp_path / 'sample'} and run again.")


def test_verify_sees_a_changed_byte(tmp_path: Path) -> None:
    ref = _written(tmp_path)
    path = Path(ref.path) / "shard-00000.arrow"
    raw = bytearray(path.read_bytes())
    at = raw.index(_trajectory(range(0, 2), (3, 4, 4), 2)["latents"].tobytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    tables.read(ref)
    with pytest.raises(InputError, match=r"shard-00000\.arrow: wanted content of digest"):
        tables.verify(ref)


def test_wrong_shape_dtype_and_double_ids_are_refused(tmp_path: Path) -> None:
    writer = tables.TableWriter(tmp_path, "t", pa.schema([tensor_field("x", (2, 2), "float16")]))
    with pytest.raises(ValueError, match=r"'x': wanted shape .*got \(3, 4\)"):
        writer.write(0, {"x": np.zeros((3, 4), np.float16)})
    with pytest.raises(ValueError, match="wanted float16, got float32"):
        writer.write(0, {"x": np.zeros((3, 2, 2), np.float32)})
    assert writer.finished() == set()
    with pytest.raises(InputError, match="'a' more than once"):
        tables.positions(pa.table({"prompt_id": ["a", "b", "a"]}), "prompt_id")
    with pytest.raises(InputError, match="at least one shard"):
        tables.read(PromptsTable(path=str(tmp_path), digest="", rows=0, shards=()))


def test_an_empty_shard_reads_as_no_rows(tmp_path: Path) -> None:
    writer = tables.TableWriter(tmp_path, "prompts", prompts_schema())
    writer.write(0, {"prompt_id": [], "prompt": [], "metadata": []})
    assert tables.read(writer.ref(PromptsTable, 1).under(tmp_path)).num_rows == 0
