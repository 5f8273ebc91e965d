"""What a run did, one iteration of it, or one stage: as JSON, and as text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.progress import main_metrics
from pipelines.prune import pruned
from pipelines.rundir import Address, bytes_in
from pipelines.saved import Saved
from pipelines.terminal import duration, flat, size, table
from schemas.errors import UserError, closest
from schemas.record import StageRecord

Json = dict[str, Any]
_ROWS = 40  # of the table of a long loop


def runs_json(runs: Sequence[Saved]) -> list[Json]:
    """One line a run."""
    return [_run_line(run) for run in runs]


def runs_text(lines: Sequence[Json]) -> list[str]:
    """The same for a terminal."""
    head = ["run", "flow", "state", "iterations", "best", "time", "size", "began"]
    rows = []
    for line in lines:
        best = "" if line["best"] is None else f"{line['best']['metric']} {line['best']['value']:.4g}"
        done = f"{line['iterations']} of {line['times']}"
        rows.append(
            [
                line["run"],
                line["flow"],
                f"{line['state']}, {line['damaged']} damaged" if line["damaged"] else line["state"],
                done,
                best,
                duration(line["seconds"]),
                size(line["bytes"]),
                line["created"],
            ]
        )
    return table(head, rows)


def run_json(run: Saved) -> Json:
    """A whole run."""
    base = run.facts.get("base")
    return {
        **_run_line(run),
        "base": None if base is None else {key: base[key] for key in ("run", "from", "only")},
        "path": str(run.run.path),
        "sets": run.sets,
        "loop": {name: {str(i): value for i, value in points.items()} for name, points in run.series().items()},
        "results": run.results(),
        "stages": [
            _stage_line(run, address, record) for address, record in run.records.items() if address.iteration is None
        ],
        "outputs": {a.path: str(run.run.place(a)) for a in run.records if a.section == "after"},
        "damaged": dict(run.damaged),
    }


def run_text(shown: Json) -> list[str]:
    """The same for a terminal; a long loop is thinned out, its first, best and last iterations stay."""
    facts = f"{shown['run']}: {shown['flow']}, {shown['state']}, {shown['iterations']} of {shown['times']} iterations"
    lines = [f"{facts}, {duration(shown['seconds'])} at work, {size(shown['bytes'])}"]
    if shown["base"]:
        only = ", that stage only" if shown["base"]["only"] else ""
        lines.append(f"a re-run of {shown['base']['run']} from {shown['base']['from']}{only}")
    lines += [f"--set {text}" for text in shown["sets"]]
    for section in ("before", "after"):
        rows = [line for line in shown["stages"] if line["section"] == section]
        if section == "after" and shown["loop"]:
            lines += ["", *_loop(shown["loop"])]
        if rows:
            lines += ["", *_stages(rows)]
    lines += ["", *(f"{place}  {path}" for place, path in shown["outputs"].items())] if shown["outputs"] else []
    return [*lines, *_damage(shown["damaged"])]


def iteration_json(run: Saved, folder: str) -> Json:
    """One iteration, or `before` or `after`."""
    wanted = run.folder(folder)
    stages = [_stage_line(run, a, r) for a, r in run.records.items() if a.folder == wanted]
    if not stages:
        known = sorted({address.folder for address in run.records})
        raise UserError(f"the run {run.run.path} has no {folder!r}. {closest(folder, known[:20])}")
    return {"run": run.run.path.name, "folder": wanted, "stages": stages, "damaged": dict(run.damaged)}


def iteration_text(shown: Json) -> list[str]:
    """The same for a terminal."""
    return [f"{shown['run']}/{shown['folder']}", *_stages(shown["stages"]), *_damage(shown["damaged"])]


def stage_json(run: Saved, address: Address) -> Json:
    """One stage: what ran, on what, from what, what came out and who reads it."""
    record = run.records.get(address)
    if record is None:
        raise UserError(
            run.damaged.get(address.path) or f"{run.run.path.name}/{address.path} has no record: it has not run"
        )
    place = run.run.place(address)
    return {
        "run": run.run.path.name,
        "address": address.path,
        "adopted": address.path in run.run.adopted,
        "path": str(place),
        "bytes": bytes_in(place),
        "pruned": pruned(place),
        "readers": sorted(reader.path for reader in run.readers(address)),
        "lineage": lineage(run, address),
        **record.model_dump(mode="json"),
    }


def stage_text(shown: Json) -> list[str]:
    """The same for a terminal."""
    volatile = shown["volatile"]
    adopted = " (adopted)" if shown["adopted"] else ""
    lines = [f"{shown['run']}/{shown['address']}{adopted}: stage {shown['stage']}, {shown['status']}"]
    lines += [f"  {shown['why']}"] if shown["why"] else []
    resources = volatile["resources"]
    lines.append(
        f"  ran {volatile['started']} for {volatile['seconds']:.1f} s on {volatile['host']}, {volatile['ranks']} of "
        f"{resources['processes']} processes, {resources['device']}, code {volatile['git'][:12] or 'unknown'}"
    )
    lines += [f"  {shown['path']}, {size(shown['bytes'])}", "config"]
    lines += [f"  {path}: {value}" for path, value in flat(shown["payload"].get("config", {}))]
    lines.append("inputs")
    lines += [f"  {name} <- {source}" for name, source in flat(shown["sources"])]
    lines.append("outputs")
    for name, value in shown["outputs"].items():
        if isinstance(value, Mapping) and "digest" in value:
            rows = f", {value['rows']} rows in {len(value['shards'])} shards" if "rows" in value else ""
            gone = ", pruned" if name in shown["pruned"] else ""
            lines.append(f"  {name}: {value['path']}{rows}, digest {value['digest'][:12]}{gone}")
    lines += [f"  {name} {value:.6g}" for name, value in shown["outputs"].get("metrics", {}).items()]
    lines += ["measured", *(f"  {name} {value:.6g}" for name, value in volatile["measured"].items())]
    lines.append(f"lineage  {' <- '.join(shown['lineage'])}")
    lines.append(f"read by  {', '.join(shown['readers']) or 'nothing yet'}")
    return lines


def lineage(run: Saved, address: Address) -> list[str]:
    """From a stage back to the base along its policy, or its first input."""
    path, seen = address.path, [address.path]
    by_path = {a.path: record for a, record in run.records.items()}
    while (record := by_path.get(path)) is not None and record.sources:
        sources = dict(flat(record.sources))
        source = str(sources.get("policy") or next(iter(sources.values())))
        path = source.rpartition(".")[0] or source
        if path in seen:
            break
        seen.append(path)
    return seen


def address_of(run: Saved, folder: str, node: str) -> Address:
    """A stage's address by the words a user writes; UserError names the closest node."""
    if node not in run.nodes:
        raise UserError(f"the run {run.run.path} has no stage {node!r}. {closest(node, run.nodes)}")
    wanted, section = run.folder(folder), run.nodes[node]["section"]
    if wanted.isdigit() != (section == "body") or (section != "body" and wanted != section):
        where = "an iteration" if section == "body" else section
        raise UserError(f"{node!r} is not in {folder!r}; write {where}/{node}")
    return Address(section, node, int(wanted) if wanted.isdigit() else None)


def _run_line(run: Saved) -> Json:
    return {
        "run": run.run.path.name,
        "flow": run.facts.get("flow", ""),
        "state": run.state(),
        "iterations": run.iterations() if run.nodes else 0,
        "times": run.ended if run.nodes and run.times else 0,
        "best": best_of(run),
        "seconds": round(run.seconds(), 1),
        "bytes": run.size(),
        "created": run.facts.get("created", ""),
        "damaged": len(run.damaged),
    }


def best_of(run: Saved) -> Json | None:
    """The best value of the metric that the first guard watches, else of the first that `loop.best` names."""
    guards = [guard["guard"]["metric"] for guard in run.plan.get("guards", {}).values()]
    edges = [
        edge for node in run.nodes.values() for _, edge in flat(node["inputs"]) if str(edge).startswith("loop.best(")
    ]
    metric = next(iter([*guards, *(str(edge)[len("loop.best(") : -1] for edge in edges)]), None)
    if metric is None:
        return None
    node, _, name = metric.partition(".")
    points = {
        a.iteration: r.outputs["metrics"][name]
        for a, r in run.records.items()
        if a.node == node and a.iteration is not None and name in r.outputs.get("metrics", {})
    }
    if not points:
        return None
    best = max(points, key=lambda i: (points[i], -i))
    return {"metric": metric, "value": points[best], "iteration": best}


def _stage_line(run: Saved, address: Address, record: StageRecord) -> Json:
    return {
        "section": address.section,
        "address": address.path,
        "node": address.node,
        "status": _status(run, address, record),
        "why": record.why,
        "seconds": record.volatile.seconds,
        "metrics": record.outputs.get("metrics", {}),
    }


def _status(run: Saved, address: Address, record: StageRecord) -> str:
    if address.path in run.run.adopted:
        return "adopted"
    return "pruned" if pruned(run.run.place(address)) else record.status


def _stages(rows: Sequence[Json]) -> list[str]:
    lines = []
    for row, name in zip(
        rows,
        table(["stage", "status", "seconds"], [[r["address"], r["status"], f"{r['seconds']:.1f}"] for r in rows])[1:],
        strict=True,
    ):
        metrics = "  ".join(f"{key} {value:.4g}" for key, value in main_metrics(row["metrics"]).items())
        lines.append("  ".join(filter(None, [name, metrics, row["why"]])))
    return lines


def _loop(series: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Rows by iteration. Which are left out of a long loop is evenly spread."""
    numbers = sorted({int(i) for points in series.values() for i in points})
    bests = {max(points, key=lambda i: (points[i], -int(i))) for points in series.values()}
    step = -(-len(numbers) // _ROWS)
    kept = [
        i for place, i in enumerate(numbers) if place % step == 0 or i == numbers[-1] or (step > 1 and str(i) in bests)
    ]
    rows = [
        [str(i), *(f"{points[str(i)]:.4g}" if str(i) in points else "" for points in series.values())] for i in kept
    ]
    lines = table(["iteration", *series], rows)
    return (
        [*lines, f"({len(numbers) - len(kept)} iterations between are not shown; --json has all)"]
        if len(kept) < len(numbers)
        else lines
    )


def _damage(damaged: Mapping[str, str]) -> list[str]:
    return [f"damaged: {text}" for text in damaged.values()]
