"""Whether a committed stage stands: the diff of its recorded payload and the payload wanted now."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from pipelines.plan import PlanNode
from pipelines.terminal import short
from schemas.errors import StaleRecord
from schemas.fingerprint import diff, identity
from schemas.record import StageRecord

OnChange = Literal["stop", "rerun", "keep"]
Json = dict[str, Any]
_NOT_DEFAULT = "(not the default)"
_MOST = 12
_CODE = ".code"


@dataclass(frozen=True)
class Decision:
    """What to do with a committed record, and one line about it when that is not to be expected."""

    action: Literal["reuse", "rerun"]
    note: str = ""


def payload(node: PlanNode, inputs: Json, seed: int, iteration: int | None, digest: Callable[[str], str]) -> Json:
    """The identity of a stage run. How it is computed, and how long the loop is, are not in it."""
    out: Json = {
        "stage": node.stage,
        "version": node.contract.version,
        "config": identity(node.config, digest),
        "inputs": inputs,
    }
    varies = node.config.varies()
    if "seed" in varies:
        out["seed"] = seed
    if "iteration" in varies:
        out["iteration"] = iteration
    return out


def defaults_of(node: PlanNode) -> Json:
    """Today's defaults of the payload's fields: a field that a record lacks and that has its default is no change."""
    return {"config": _defaults(type(node.config), node.config), "inputs": {}}


def _defaults(kind: type[BaseModel], value: BaseModel) -> Json:
    out: Json = {}
    for name, field in kind.model_fields.items():
        current = dict(value)[name]
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(current, BaseModel):
            # Fields below a nested model have the defaults of the class that is chosen now.
            out[name] = _defaults(type(current), current)
            if isinstance(default, BaseModel) and default == current:
                out[name] = to_jsonable_python(default)
            else:  # the whole must not equal the default, or a record without it would pass
                out[name][_NOT_DEFAULT] = None
        elif isinstance(current, Mapping):
            out[name] = {k: _defaults(type(v), v) for k, v in current.items() if isinstance(v, BaseModel)}
        elif default is not PydanticUndefined:
            out[name] = to_jsonable_python(default)
    return out


def decide(
    record: StageRecord, wanted: Json, defaults: Json, on_change: OnChange, label: str, follows: Callable[[str], bool]
) -> Decision:
    """Reuse, rerun, or StaleRecord. `follows(input)` tells that a changed input may be followed without asking."""
    changes = diff(record.payload, wanted, defaults)
    if not changes:
        return Decision("reuse")
    if on_change == "keep":
        return Decision("reuse", f"kept as it was made, by another recipe:\n{table(changes)}")
    other = sorted({path.split(".")[1] for path, _, _ in changes if path.startswith("inputs.")})
    inputs_only = all(path.startswith("inputs.") for path, _, _ in changes)
    if inputs_only and (on_change == "rerun" or all(follows(name) for name in other)):
        return Decision("rerun", f"made again from other {', '.join(other)}; the old result moved aside")
    if on_change == "rerun":
        return Decision("rerun", f"made again; the old result moved aside, for its recipe changed:\n{table(changes)}")
    raise StaleRecord(
        f"{label} was made by another recipe than the one wanted now:\n{table(changes)}\n"
        "go on with --on-change rerun (it is made again, and what stands on it; the old result moves aside as "
        f"{record.node}.stale-N) or with --on-change keep (the old result is used as it is); "
        "--as NAME starts another run"
    )


def _told(path: str, value: Any) -> str:
    return short(value)[:12] if path.endswith(_CODE) else short(value)


def table(changes: list[tuple[str, Any, Any]]) -> str:
    """Field paths with recorded and wanted values, one a line."""
    lines = [f"    {path}: {_told(path, old)} -> {_told(path, new)}" for path, old, new in changes[:_MOST]]
    if any(path.endswith(_CODE) for path, _, _ in changes):
        lines.append("    (`code` is the source of the reward's module: it was edited)")
    if len(changes) > _MOST:
        lines.append(f"    and {len(changes) - _MOST} more")
    return "\n".join(lines)
