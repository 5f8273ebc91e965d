"""Arrow schemas of every table on disk. IPC stream format, readable by `datasets` with no code of ours.

Tensors of one shape are ``FixedSizeList<float32|float16>`` with the shape as JSON in the field's metadata
(key ``shape``); ragged ones are ``LargeList<float32>`` beside an ``int32`` list column ``NAME_shape``.
Images are ``struct<bytes, path>`` (PNG) and the ``huggingface`` schema metadata names them, so they decode.
"""

import hashlib
import json
from collections.abc import Sequence
from math import prod
from typing import Literal

import pyarrow as pa

from schemas.artifacts import Shard

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_ARROW_FLOAT = {"float32": pa.float32(), "float16": pa.float16()}


def tensor_field(name: str, shape: tuple[int, ...], dtype: Literal["float32", "float16"] = "float32") -> pa.Field:
    """A column of tensors that all have `shape`, e.g. ``(16, 64, 64)``."""
    kind = pa.list_(_ARROW_FLOAT[dtype], prod(shape))
    return pa.field(name, kind, metadata={"shape": json.dumps(list(shape))})


def tensor_shape(field: pa.Field) -> tuple[int, ...]:
    """The shape that `tensor_field` noted."""
    return tuple(json.loads((field.metadata or {})[b"shape"]))


def ragged_fields(name: str) -> list[pa.Field]:
    """Two columns for tensors of differing shape: flat values and shape."""
    return [pa.field(name, pa.large_list(pa.float32())), pa.field(f"{name}_shape", pa.list_(pa.int32()))]


def prompts_schema() -> pa.Schema:
    """A prompt is known by its id; two prompts may have the same text. `metadata` is JSON for rewards."""
    return pa.schema([("prompt_id", pa.string()), ("prompt", pa.string()), ("metadata", pa.string())])


def conditioning_schema(names: tuple[str, ...]) -> pa.Schema:
    """One row a prompt plus one of role `negative` (prompt_id ""); a tensor for each name, e.g. embeds, pooled."""
    keys = [pa.field("prompt_id", pa.string()), pa.field("role", pa.string())]
    return pa.schema(keys + [field for name in names for field in ragged_fields(name)])


def samples_schema() -> pa.Schema:
    """Finished pictures. `index` counts within the prompt's group; `seed` is the seed of the initial noise."""
    schema = pa.schema(
        [
            ("sample_id", pa.string()),
            ("prompt_id", pa.string()),
            ("prompt", pa.string()),
            ("metadata", pa.string()),
            ("index", pa.int32()),
            ("seed", pa.int64()),
            ("image", IMAGE),
        ]
    )
    return schema.with_metadata(_huggingface(schema))


def trajectory_schema(
    latent_shape: tuple[int, ...], num_steps: int, dtype: Literal["float32", "float16"] = "float32"
) -> pa.Schema:
    """One row a sample. `latents` are final; the other tensors cover the `num_steps` stochastic steps, if any.

    `states` has ``num_steps + 1`` latents: before the first stochastic step, then after each one. Per-step
    lists have ``num_steps`` entries. `micro_batch` is the number of the model call that drew the sample.
    """
    fields = [
        pa.field("sample_id", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("index", pa.int32()),
        pa.field("seed", pa.int64()),
        pa.field("micro_batch", pa.int32()),
        pa.field("guidance_scale", pa.float32()),
        tensor_field("latents", latent_shape),
    ]
    if num_steps:
        fields += [
            tensor_field("states", (num_steps + 1, *latent_shape), dtype),
            pa.field("step_index", pa.list_(pa.int32(), num_steps)),
            pa.field("sigma", pa.list_(pa.float32(), num_steps)),
            pa.field("sigma_next", pa.list_(pa.float32(), num_steps)),
            pa.field("sigma_max", pa.list_(pa.float32(), num_steps)),
            pa.field("timestep", pa.list_(pa.float32(), num_steps)),
            pa.field("log_prob", pa.list_(pa.float32(), num_steps)),
        ]
    return pa.schema(fields)


def rewards_schema(names: tuple[str, ...]) -> pa.Schema:
    """One row a sample, one nullable float64 column a reward: a missing reward is null, never 0."""
    keys = [pa.field("sample_id", pa.string()), pa.field("prompt_id", pa.string())]
    return pa.schema(keys + [pa.field(name, pa.float64()) for name in names])


def advantages_schema() -> pa.Schema:
    """One row a sample. `advantage` is null where the sample left the statistics; `reward` is the weighted sum."""
    names = [("sample_id", pa.string()), ("prompt_id", pa.string())]
    return pa.schema([*names, ("reward", pa.float64()), ("advantage", pa.float64())])


def table_digest(schema: pa.Schema, shards: Sequence[Shard]) -> str:
    """SHA-256 over names, types and the shards' digests in order."""
    digest = hashlib.sha256(fields_of(schema))
    for shard in shards:
        digest.update(f"{shard.rows}:{shard.digest};".encode())
    return digest.hexdigest()


def fields_of(schema: pa.Schema) -> bytes:
    """Names, types and shapes of the columns, for digests."""
    told = ((field.name, field.type, (field.metadata or {}).get(b"shape", b"").decode()) for field in schema)
    return "".join(f"{name!r}:{kind}:{shape};" for name, kind, shape in told).encode()


def _huggingface(schema: pa.Schema) -> dict[str, str]:
    kinds = {pa.string(): "string", pa.int32(): "int32", pa.int64(): "int64"}
    features = {
        field.name: {"_type": "Image"} if field.type == IMAGE else {"dtype": kinds[field.type], "_type": "Value"}
        for field in schema
    }
    return {"huggingface": json.dumps({"info": {"features": features}})}
