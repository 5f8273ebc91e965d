"""Tables on disk: a folder of Arrow IPC streams, each with a sidecar of its rows and digest. No torch here.

``shard-00000.arrow`` opens with `datasets.Dataset.from_file`; the sidecar ``shard-00000.json`` commits it: a stream
that was cut at a batch border reads as a shorter table without an error.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from schemas.artifacts import Shard, TableRef
from schemas.errors import InputError
from schemas.tables import table_digest, tensor_shape
from stages.store.digests import columns_digest
from stages.store.files import written

T = TypeVar("T", bound=TableRef)


class TableWriter:
    """Writes the shards of one table. Any rank may write any shard; finished ones survive a restart."""

    def __init__(self, directory: Path, name: str, schema: pa.Schema) -> None:
        self.folder = directory / name
        self.name = name
        self.schema = schema
        self.folder.mkdir(parents=True, exist_ok=True)

    def finished(self) -> set[int]:
        """Numbers of the shards that are committed and whole."""
        numbers = [int(p.stem.removeprefix("shard-")) for p in self.folder.glob("shard-*.json")]
        return {number for number in numbers if self._whole(number)}

    def write(self, index: int, columns: Mapping[str, Any]) -> None:
        """Commits one shard.

        `columns` by field name: arrays (rows, *shape) for tensor fields, a list of arrays of any shape for ragged
        ones (their ``NAME_shape`` column follows from it), lists or arrays for the others. CPU tensors will do.
        """
        table = pa.table([_column(field, columns, self.schema) for field in self.schema], schema=self.schema)
        with written(self._file(index)) as temporary:
            _write_stream(temporary, table)
        sidecar = {"rows": table.num_rows, "digest": columns_digest(table)}
        with written(self._sidecar(index)) as temporary:
            temporary.write_text(json.dumps(sidecar))

    def ref(self, kind: type[T], num_shards: int, **extra: Any) -> T:
        """The pointer to the shards 0 to `num_shards` - 1; its path is relative to the stage's directory."""
        shards = tuple(self._shard(index) for index in range(num_shards))
        digest = table_digest(self.schema, shards)
        rows = sum(shard.rows for shard in shards)
        return kind(path=self.name, digest=digest, rows=rows, shards=shards, **extra)

    def _file(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.arrow"

    def _sidecar(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.json"

    def _shard(self, index: int) -> Shard:
        try:
            sidecar = json.loads(self._sidecar(index).read_text())
            return Shard(file=self._file(index).name, rows=sidecar["rows"], digest=sidecar["digest"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(_broken(self._sidecar(index), f"shard {index} was not committed: {error}")) from error

    def _whole(self, index: int) -> bool:
        try:
            return _open(self.folder, self._shard(index)).schema.equals(self.schema)
        except InputError:
            return False


def read(ref: TableRef) -> pa.Table:
    """All shards in order, memory-mapped: bytes are read when they are used.

    Raises InputError for a missing, truncated or broken shard and for a wrong number of rows.
    """
    if not ref.shards:
        raise InputError(_broken(Path(ref.path), "wanted a table with at least one shard, got none"))
    return pa.concat_tables([_open(Path(ref.path), shard) for shard in ref.shards])


def verify(ref: TableRef) -> None:
    """Reads every byte and compares with the digests: for tables that another run made. Raises InputError."""
    schema = read(ref).schema
    for shard in ref.shards:
        got = columns_digest(_open(Path(ref.path), shard))
        if got != shard.digest:
            path = Path(ref.path) / shard.file
            raise InputError(_broken(path, f"wanted content of digest {shard.digest[:12]}, got {got[:12]}"))
    if table_digest(schema, ref.shards) != ref.digest:
        raise InputError(_broken(Path(ref.path), "its shards do not make up the table's digest"))


def tensors(table: pa.Table, column: str, rows: Sequence[int] | None = None) -> np.ndarray:
    """Tensors (rows, *shape) of a fixed-size list column in their storage dtype; only the chosen `rows` if given.

    The whole column of a one-shard table is a read-only view of the file, without a copy.
    """
    field = table.schema.field(column)
    shape = tensor_shape(field) if b"shape" in (field.metadata or {}) else (field.type.list_size,)
    if table.column(column).null_count:
        raise InputError(
            f"column {column!r}: wanted a tensor in every row, got {table.column(column).null_count} nulls"
        )
    parts = [_numbers(chunk.flatten()).reshape(len(chunk), *shape) for chunk in table.column(column).chunks]
    if rows is None:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    starts = np.cumsum([0] + [len(part) for part in parts])
    out = np.empty((len(rows), *shape), parts[0].dtype)
    for i, row in enumerate(rows):
        part = _chunk_of(row, starts)
        out[i] = parts[part][row - starts[part]]
    return out


def ragged(table: pa.Table, column: str, rows: Sequence[int] | None = None) -> list[np.ndarray]:
    """Tensors of differing shape from ``NAME`` and ``NAME_shape``, as read-only views; only `rows` if given."""
    values, shapes = table.column(column), table.column(f"{column}_shape")
    chosen = range(table.num_rows) if rows is None else rows
    return [_numbers(values[row].values).reshape(shapes[row].as_py()) for row in chosen]


def positions(table: pa.Table, column: str) -> dict[str, int]:
    """Row number by id, for joins. Raises InputError when an id comes twice."""
    ids = table.column(column).to_pylist()
    by_id = {key: row for row, key in enumerate(ids)}
    if len(by_id) != len(ids):
        twice = next(key for row, key in enumerate(ids) if by_id[key] != row)
        raise InputError(f"column {column!r}: wanted every id once, got {twice!r} more than once")
    return by_id


def _chunk_of(row: int, starts: np.ndarray) -> int:
    if not 0 <= row < starts[-1]:
        raise IndexError(f"row {row} of a table of {starts[-1]} rows")
    return int(np.searchsorted(starts, row, side="right")) - 1


def _numbers(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=True)


def _write_stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def _open(folder: Path, shard: Shard) -> pa.Table:
    path = folder / shard.file
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_stream(source).read_all()
        table.validate()
    except FileNotFoundError as error:
        raise InputError(_broken(path, "the file is missing")) from error
    except (pa.ArrowException, OSError) as error:
        raise InputError(_broken(path, f"wanted an Arrow stream, got: {error}")) from error
    if table.num_rows != shard.rows:
        raise InputError(_broken(path, f"wanted {shard.rows} rows, got {table.num_rows}: the file was cut"))
    return table


def _broken(path: Path, what: str) -> str:
    stage = path.parent.parent if path.suffix else path.parent
    return f"{path}: {what}. Delete the stage's directory {stage} and run again."


def _column(field: pa.Field, columns: Mapping[str, Any], schema: pa.Schema) -> pa.Array:
    ragged_of = field.name.removesuffix("_shape")
    if field.name not in columns and ragged_of in columns and ragged_of != field.name:
        return pa.array([list(np.shape(value)) for value in columns[ragged_of]], field.type)
    value = columns[field.name]
    if pa.types.is_fixed_size_list(field.type):
        return _fixed(field, value)
    if pa.types.is_large_list(field.type) and f"{field.name}_shape" in schema.names:
        return pa.array([np.asarray(item, np.float32).reshape(-1) for item in value], field.type)
    return pa.array(value, field.type)


def _fixed(field: pa.Field, value: Any) -> pa.Array:
    array = np.asarray(value)
    shape = tensor_shape(field) if b"shape" in (field.metadata or {}) else (field.type.list_size,)
    wanted = np.dtype(field.type.value_type.to_pandas_dtype())
    if array.shape[1:] != shape:
        raise ValueError(f"column {field.name!r}: wanted shape (rows, {shape}), got {array.shape}")
    if array.dtype != wanted and b"shape" in (field.metadata or {}):
        # A silent cast would round what a log-prob was already computed from.
        raise ValueError(f"column {field.name!r}: wanted {wanted}, got {array.dtype}; round before use, not here")
    flat = np.ascontiguousarray(array, dtype=wanted).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, field.type.value_type), type=field.type)
