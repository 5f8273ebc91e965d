"""Digest of Arrow columns by content: equal names, types and values give equal digests, whatever the buffers."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables import fields_of


def columns_digest(table: pa.Table) -> str:
    """SHA-256 over names, types and values. Offsets, slices, chunks and what lies under a null do not count."""
    digest = hashlib.sha256()
    digest.update(fields_of(table.schema))
    for column in table.columns:
        whole = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        _add(digest, whole)
    return digest.hexdigest()


def _add(digest: Any, array: pa.Array) -> None:
    digest.update(f"[{len(array)},{array.null_count}]".encode())
    if array.null_count:
        digest.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)))
    kind = array.type
    if pa.types.is_struct(kind):
        for child in array.flatten():
            _add(digest, child)
    elif pa.types.is_fixed_size_list(kind):
        _add(digest, array.flatten())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _add(digest, pc.fill_null(pc.call_function("list_value_length", [array]), 0))
        _add(digest, array.flatten())
    elif pa.types.is_primitive(kind):
        _add_numbers(digest, array)
    else:  # strings and bytes
        _add(digest, pc.fill_null(pc.call_function("binary_length", [array]), 0))
        for value in array:
            digest.update(value.as_buffer() or b"")


def _add_numbers(digest: Any, array: pa.Array) -> None:
    if array.null_count:
        array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    digest.update(np.ascontiguousarray(array.to_numpy(zero_copy_only=False)))
