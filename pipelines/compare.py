"""Two runs side by side: settings that differ, and what came of them."""

from collections.abc import Mapping
from typing import Any

from pipelines.saved import Saved
from pipelines.terminal import duration, short, table
from schemas.fingerprint import diff

Json = dict[str, Any]
_LONGEST = 40


def diff_json(one: Saved, two: Saved) -> Json:
    """Field paths with both values, and for each metric both runs' last; of scores the best too."""
    changes = diff(_settings(one), _settings(two))
    series = [{**run.series(), **{name: {0: value} for name, value in run.results().items()}} for run in (one, two)]
    names = list(dict.fromkeys([*series[0], *series[1]]))
    return {
        "runs": [one.run.path.name, two.run.path.name],
        "settings": {path: [old, new] for path, old, new in changes},
        "results": {
            name: [_ends(run, name, points) for run, points in zip((one, two), series, strict=True)] for name in names
        },
        "iterations": [one.iterations(), two.iterations()],
        "seconds": [round(one.seconds(), 1), round(two.seconds(), 1)],
    }


def diff_text(shown: Json) -> list[str]:
    """The same for a terminal."""
    first, second = shown["runs"]
    settings = [[path, _short(old), _short(new)] for path, (old, new) in shown["settings"].items()]
    lines = table(["setting", first, second], settings) if settings else ["the settings are the same"]
    rows = [
        [name, *(f"{ends[end]:.4g}" if ends and end in ends else "" for end in ("last", "best") for ends in pair)]
        for name, pair in shown["results"].items()
    ]
    rows.append(["iterations", *map(str, shown["iterations"]), "", ""])
    rows.append(["time", *map(duration, shown["seconds"]), "", ""])
    head = ["result", *(f"{end} {run}" for end in ("last", "best") for run in shown["runs"])]
    return [*lines, "", *table(head, rows)]


def _settings(run: Saved) -> Json:
    plan = run.plan
    nodes = {
        name: {
            **node["config"],
            **{f"<- {key}": source for key, source in node["inputs"].items()},
            **{key: node[key] for key in ("every", "when") if node[key] is not None},
        }
        for name, node in run.nodes.items()
    }
    whole = {key: plan.get(key) for key in ("flow", "seed", "times", "carry", "guards", "resources")}
    return {**nodes, **whole}


def _ends(run: Saved, name: str, series: Mapping[str, Mapping[int, float]]) -> Json | None:
    points = series.get(name)
    if not points:
        return None
    score = run.nodes[name.partition(".")[0]]["stage"] == "score"
    return {"last": points[max(points)]} | ({"best": max(points.values())} if score else {})


def _short(value: Any) -> str:
    """A whole node that one run lacks is told as such, not spelt out."""
    return "(there)" if isinstance(value, Mapping) else short(value, _LONGEST)
