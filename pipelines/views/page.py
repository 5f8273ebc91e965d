"""The page: a section for each question that one has of a run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines import metrics
from pipelines.saved import Saved
from pipelines.show import lineage, run_json
from pipelines.terminal import duration, flat, number, short, size
from pipelines.views import curves, pictures
from pipelines.views.gallery import galleries
from pipelines.views.html import Html, element, folded, table, tag
from schemas.record import Volatile

_STYLE = Path(__file__).with_name("page.css")


def page(run: Saved) -> str:
    """The whole file. Nothing in it is fetched from anywhere."""
    shown = run_json(run)
    sections = list(_sections(run, shown))
    links = [tag("a", title, href=f"#{_anchor(title)}") for title, _ in sections]
    body = [
        *_head(run, shown),
        element("nav", links),
        *(tag("p", text, css="warning") for text in run.damaged.values()),
        *(element("section", [tag("h2", title), content], id=_anchor(title)) for title, content in sections),
    ]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{shown['run']} - rewardflow"),
        tag("style", Html(_STYLE.read_text(encoding="utf-8"))),
    ]
    html = element("html", [element("head", head), element("body", body)], lang="en")
    return f"<!doctype html>\n{html}\n"


def _head(run: Saved, shown: dict[str, Any]) -> Iterator[Html]:
    yield tag("h1", shown["run"])
    yield tag("p", run.plan.get("description", ""), css="faint")
    done = f"{shown['iterations']} of {shown['times']} iterations"
    took = f"{duration(shown['seconds'])} at work, {size(shown['bytes'])}, begun {shown['created']}"
    yield tag("p", f"Flow {shown['flow']}, {shown['state']}, {done}, {took}.")
    if shown["best"]:
        best = shown["best"]
        yield tag("p", f"Best {best['metric']}: {best['value']:.4g} at iteration {best['iteration']}.")
    if shown["base"]:
        only = ", that stage only" if shown["base"]["only"] else ""
        adopted = f"{len(run.run.adopted)} stage runs adopted"
        yield tag("p", f"A re-run of {shown['base']['run']} from {shown['base']['from']}{only}; {adopted}.")


def _sections(run: Saved, shown: dict[str, Any]) -> Iterator[tuple[str, Html]]:
    tables = metrics.tables(run)
    if shown["results"]:
        yield (
            "Results",
            table(["outside the loop", ""], [[name, number(value)] for name, value in shown["results"].items()]),
        )
    charts = {
        "Rewards": curves.rewards(run, tables),
        "Groups": curves.groups(run, tables),
        "Updates": curves.updates(run, tables),
    }
    yield from ((title, _cards(found)) for title, found in charts.items() if found)
    found = list(_pictures(run))
    if found:
        yield "Pictures", element("div", found)
    yield "Time", element("div", [_cards(curves.time(run, tables)), _times(run)])
    yield "Settings", _settings(run, shown)
    yield "Lineage", _lineage(run)


def _cards(charts: Sequence[curves.Chart]) -> Html:
    return element(
        "div",
        [element("div", [tag("h3", c.title), tag("p", c.about), Html(c.svg)], css="card") for c in charts],
        css="cards",
    )


def _pictures(run: Saved) -> Iterator[Html]:
    there = [found for found in galleries(run) if found.there]
    for strip in pictures.strips(there):
        nodes = ", ".join(dict.fromkeys(found.address.node for found in strip.runs))
        yield tag("h3", f"{nodes}: the same noise")
        yield tag("p", "The first pictures of each prompt, with their rewards.", css="faint")
        yield element("div", [pictures.over_iterations(strip)], css="wide")
    newest = pictures.best_and_worst(run, there)
    if newest is not None:
        yield tag("h3", f"{newest[0]}: best and worst of each group")
        yield tag("p", "Reward and, in brackets, advantage.", css="faint")
        yield element("div", [newest[1]], css="wide")


def _times(run: Saved) -> Html:
    """What each node took in all."""
    rows = []
    whole = sum(record.volatile.seconds for record in run.records.values()) or 1.0
    for name, node in run.nodes.items():
        records = [record for address, record in run.records.items() if address.node == name]
        seconds = [record.volatile.seconds for record in records]
        if not records:
            continue
        measured = [record.volatile.measured for record in records]
        rates = [found["images_per_second"] for found in measured if "images_per_second" in found]
        used = [found["mfu"] for found in measured if "mfu" in found]
        peak = max((found.get("memory/peak_bytes", 0.0) for found in measured), default=0.0)
        rows.append(
            [
                name,
                node["stage"],
                str(len(records)),
                duration(sum(seconds)),
                f"{sum(seconds) / whole:.1%}",
                duration(sum(seconds) / len(seconds)),
                number(sum(rates) / len(rates)) if rates else "",
                f"{sum(used) / len(used):.2%}" if used else "",
                size(peak) if peak else "",
            ]
        )
    head = ["", "stage", "runs", "in all", "share", "mean", "pictures/s", "MFU", "peak memory"]
    return element("div", [table(head, rows)], css="wide")


def _settings(run: Saved, shown: dict[str, Any]) -> Html:
    plan = run.plan
    whole = {key: plan.get(key) for key in ("seed", "times", "resources", "keep", "guards", "carry")}
    codes = [tag("code", text) for text in shown["sets"]]
    changed = element("p", [Html("Changed by --set: "), Html(", ".join(codes))])
    parts = [changed if codes else tag("p", "As the flow file has them.", css="faint")]
    parts.append(folded("the flow", table([], [[path, short(value, 200)] for path, value in flat(whole)])))
    for name, node in run.nodes.items():
        values = {**node["config"], **{key: node[key] for key in ("every", "when") if node[key] is not None}}
        rows = [[path, short(value, 200)] for path, value in flat(values)]
        parts.append(folded(f"{name} ({node['stage']})", table([], rows)))
    return element("div", parts)


def _lineage(run: Saved) -> Html:
    """Edges of the DAG, and how the last stage run came from the base."""
    edges = [[name, node["stage"], node["section"], _inputs(node)] for name, node in run.nodes.items()]
    parts = [table(["", "stage", "section", "inputs"], edges)]
    if run.records:
        steps = lineage(run, next(reversed(run.records)))
        text = steps if len(steps) <= 24 else [*steps[:12], f"({len(steps) - 24} more)", *steps[-12:]]
        parts.append(tag("p", f"The last result comes from: {' ← '.join(text)}"))
        made = {
            (
                record.volatile.host,
                record.volatile.git[:12] or "unknown",
                str(record.volatile.versions.get("torch", "")),
            )
            for record in run.records.values()
        }
        parts += [
            tag("p", f"Made on {host} by code {git} with torch {torch}.", css="faint") for host, git, torch in made
        ]
    return element("div", parts)


def _inputs(node: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} ← {source}" for key, source in flat(node["inputs"]) if node["inputs"])


def _maker(volatile: Volatile) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in volatile.versions.items())
    return f"Made on {volatile.host} by code {volatile.git[:12] or 'unknown'} with {versions or 'unknown versions'}."


def _anchor(title: str) -> str:
    return title.lower()
