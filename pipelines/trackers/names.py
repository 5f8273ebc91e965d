"""What a stage's metrics are called in a tracker."""

from pipelines.plan import Plan
from schemas.record import StageRecord

_COMMON = ("train/", "reward/", "advantage/")


def named(plan: Plan, record: StageRecord) -> dict[str, float]:
    """Metrics of a record by the tracker's names, ``time/NODE`` in seconds, and what was measured of its parts.

    ``train/loss`` of the only update of the body keeps its name; others are ``NODE/METRIC``.
    """
    if record.status == "skipped":
        return {}
    node = plan.nodes[record.node]
    alone = [other.name for other in plan.section("body") if other.stage == node.stage] == [node.name]
    metrics: dict[str, float] = record.outputs.get("metrics", {})
    out = {
        name if alone and name.startswith(_COMMON) else f"{node.name}/{name}": value for name, value in metrics.items()
    }
    for name, value in record.volatile.measured.items():
        part = name.removeprefix("time/")
        out[f"{node.name}/{name}" if part == name else f"time/{node.name}/{part}"] = value
    return {**out, f"time/{node.name}": record.volatile.seconds}
