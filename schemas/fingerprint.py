"""Canonical JSON, its hash, and the diff of two payloads. Strict: what it cannot canonicalise it refuses."""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

from schemas.assets import Asset

Json = dict[str, Any]


def canonical(payload: Json) -> str:
    """One text for one meaning: sorted keys, no spaces, no NaN."""
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(payload: Json) -> str:
    """SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(payload).encode()).hexdigest()


def identity(model: BaseModel, digest: Callable[[str], str]) -> Json:
    """`model` as JSON with every asset's path replaced by ``digest(path)``: where it lies is not identity."""
    out = model.model_dump(mode="json")
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, str) and any(isinstance(m, Asset) for m in field.metadata):
            out[name] = digest(value)
        elif isinstance(value, BaseModel):
            out[name] = identity(value, digest)
        elif isinstance(value, dict):
            out[name] = {k: identity(v, digest) if isinstance(v, BaseModel) else v for k, v in value.items()}
    return out


def assets(model: BaseModel) -> Iterator[tuple[str, str]]:
    """Field path and value of every asset in `model`."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, str) and any(isinstance(m, Asset) for m in field.metadata):
            yield name, value
        elif isinstance(value, BaseModel):
            yield from ((f"{name}.{inner}", path) for inner, path in assets(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, BaseModel):
                    yield from ((f"{name}.{key}.{inner}", path) for inner, path in assets(item))


ABSENT = "(absent)"


def diff(recorded: Json, wanted: Json, defaults: Json | None = None) -> list[tuple[str, Any, Any]]:
    """Field paths that differ, with recorded and wanted value.

    A field that is absent from the record and equals today's default is no change: the field is new.
    """
    return list(_diff(recorded, wanted, defaults or {}, ""))


def _diff(old: Any, new: Any, defaults: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            yield path, old, new
        return
    for key in sorted(old.keys() | new.keys()):
        below = f"{path}.{key}" if path else key
        default = defaults.get(key, ABSENT) if isinstance(defaults, dict) else ABSENT
        if key not in old:
            if new[key] != default:
                yield below, ABSENT, new[key]
        elif key not in new:
            yield below, old[key], ABSENT
        else:
            yield from _diff(old[key], new[key], default, below)
