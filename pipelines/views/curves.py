"""Which curves the report draws: rewards, statistics of groups, updates, and time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipelines.metrics import Row
from pipelines.saved import Saved
from pipelines.views import charts
from pipelines.views.gallery import Spread, spread
from schemas.errors import InputError

_GROUPS = {
    "reward/zero_std_ratio": "share of groups whose rewards are all equal: they teach nothing",
    "reward/std": "standard deviation of all rewards",
    "advantage/std": "standard deviation of the advantages",
    "advantage/dropped": "groups left out for missing rewards",
}
_UPDATE = {
    "train/ratio_mean": "policy ratio, mean: 1 where samples are on-policy",
    "train/ratio_max_deviation": "largest distance of a policy ratio from 1",
    "train/clip_fraction": "share of samples whose gradient the clip removes",
    "train/approx_kl": "approximate KL to the policy that sampled",
    "train/kl": "KL to the base model",
    "train/old_distance": "distance of the policy from the old one",
    "train/grad_norm": "gradient norm before clipping",
    "train/loss": "loss",
    "train/learning_rate": "learning rate",
}
_ONLY_IF_ANY = ("advantage/dropped",)
_LOGARITHMIC = ("train/approx_kl", "train/old_distance")


class Chart(NamedTuple):
    """A curve and what it shows."""

    title: str
    about: str
    svg: str


def rewards(run: Saved, tables: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """A chart for each node of the loop that scores: those that advantages come from first."""
    scorers = [name for name in tables if _of(run, name, "score")]
    judged = {str(source).partition(".")[0] for node in run.nodes.values() for source in node["inputs"].values()}
    scorers.sort(key=lambda name: name not in judged)
    about = {True: "rewards of training samples", False: "evaluation"}
    return [
        Chart(name, about[name in judged], charts.lines(f"reward-{name}", series, legend=True))
        for name in scorers
        if (series := {key: points(tables[name], key) for key in tables[name][0] if _is_reward(tables[name], key)})
    ]


def groups(run: Saved, tables: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """Statistics of groups, from metrics and from the reward tables."""
    made = _each(run, tables, "advantage", _GROUPS)
    for name in (name for name in tables if _of(run, name, "score")):
        found = _spreads(run, name)
        if not found:
            continue
        series = {
            "largest - smallest": {i: one.reach for i, one in found.items()},
            "standard deviation": {i: one.std for i, one in found.items()},
        }
        about = "within a group, mean over groups"
        made.append(Chart(f"{name}: spread", about, charts.lines(f"spread-{name}", series)))
    return made


def _spreads(run: Saved, node: str) -> dict[int, Spread]:
    """By iteration; a damaged table is noted, and stops nothing."""
    out: dict[int, Spread] = {}
    for address in run.records:
        if address.node == node and address.iteration is not None:
            try:
                found = spread(run, address)
            except InputError as error:
                run.damaged[address.path] = str(error)
                continue
            if found is not None:
                out[address.iteration] = found
    return out


def updates(run: Saved, tables: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """What updates did to the policy."""
    return _each(run, tables, "update", _UPDATE)


def time(run: Saved, tables: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """Seconds of each stage of the loop, and pictures a second."""
    body = {name: rows for name, rows in tables.items() if run.nodes[name]["section"] == "body"}
    if not body:
        return []
    seconds = {name: points(rows, "seconds") for name, rows in body.items()}
    made = [Chart("seconds", "of each stage, one upon the other", charts.stacked("seconds", seconds))]
    for key, about in {"images_per_second": "pictures a second", "mfu": "share of the device's peak FLOP/s"}.items():
        series = {name: found for name, rows in body.items() if (found := points(rows, key))}
        if series:
            made.append(Chart(key, about, charts.lines(key, series)))
    return made


def points(rows: Sequence[Row], name: str) -> dict[int, float]:
    """A metric over the iterations that have it."""
    return {
        int(row["iteration"]): float(value)
        for row in rows
        if row["iteration"] is not None and (value := row.get(name)) is not None
    }


def _each(run: Saved, tables: Mapping[str, Sequence[Row]], stage: str, wanted: Mapping[str, str]) -> list[Chart]:
    """A chart a metric, with a curve for each node of the loop that has it."""
    nodes = [name for name in tables if _of(run, name, stage)]

    def made() -> Iterator[Chart]:
        for key, about in wanted.items():
            series = {name: found for name in nodes if (found := points(tables[name], key))}
            if any(any(found.values()) or key not in _ONLY_IF_ANY for found in series.values()):
                yield Chart(key, about, charts.lines(key, series, key in _LOGARITHMIC))

    return list(made())


def _of(run: Saved, name: str, stage: str) -> bool:
    return run.nodes[name]["section"] == "body" and run.nodes[name]["stage"] == stage


def _is_reward(rows: Sequence[Row], name: str) -> bool:
    return f"{name}/std" in rows[0] and bool(points(rows, name))
