"""Stage `summarise`: evaluations before and after as a table, and pictures that show at a glance what improved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from schemas.artifacts import FileRef, HistoryRef, RewardsTable, SamplesTable
from schemas.assets import digest_of
from schemas.contracts import SummariseConfig, SummariseInputs, SummariseOutputs
from schemas.errors import InputError, closest
from stages.context import StageContext
from stages.store import images, tables

_MAX_ROWS = 12  # prompts in the grid
_GREEN, _RED, _INK, _FAINT = "#2e8b57", "#c8553d", "#222222", "#8a8a8a"


class Mean(NamedTuple):
    """Mean of `num` scores and its standard error, std (ddof 1) / sqrt(num); samples count as independent."""

    value: float
    error: float
    num: int


class Group(NamedTuple):
    """Pictures of one prompt, each with its score if it has one."""

    prompt: str
    pictures: list[NDArray[np.uint8]]
    scores: list[float | None]


def run(config: SummariseConfig, inputs: SummariseInputs, ctx: StageContext) -> SummariseOutputs:
    """Writes summary.md, and grid.png and curve.png where their inputs are there."""
    if inputs.before.keys() != inputs.after.keys():
        names = f"before: {', '.join(inputs.before)}; after: {', '.join(inputs.after)}"
        raise InputError(f"`before` and `after` must name the same evaluations, got {names}")
    rows = {
        name: (mean(scores_of(inputs.before[name], config.metric)), mean(scores_of(inputs.after[name], config.metric)))
        for name in inputs.before
    }
    (ctx.directory / "summary.md").write_text(markdown(config.metric, rows, inputs.curves), encoding="utf-8")
    grid, curve = None, None
    if inputs.samples_before is not None and inputs.samples_after is not None:
        before = _groups(inputs.samples_before, inputs.before, config)
        after = _groups(inputs.samples_after, inputs.after, config)
        draw_grid(before, after, config).savefig(ctx.directory / "grid.png", dpi=150)
        grid = _file(ctx.directory, "grid.png")
    if inputs.curves:
        draw_curves(inputs.curves).savefig(ctx.directory / "curve.png", dpi=150)
        curve = _file(ctx.directory, "curve.png")
    return SummariseOutputs(summary=_file(ctx.directory, "summary.md"), grid=grid, curve=curve, metrics=_metrics(rows))


def scores_of(ref: RewardsTable, metric: str) -> dict[str, float]:
    """Scores by sample id, without missing ones."""
    table = tables.read(ref)
    if metric not in ref.weights:
        raise InputError(f"`metric` {metric!r} is no reward of the table {ref.path}. {closest(metric, ref.weights)}")
    pairs = zip(table.column("sample_id").to_pylist(), table.column(metric).to_pylist(), strict=True)
    return {sample_id: score for sample_id, score in pairs if score is not None}


def mean(scores: Mapping[str, float]) -> Mean:
    """Mean and standard error; InputError if there is no score."""
    if not scores:
        raise InputError("an evaluation has no scores at all; look at the node that scored it")
    values = np.array(list(scores.values()))
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return Mean(float(values.mean()), float(error), len(values))


def gain(before: Mean, after: Mean) -> tuple[float, float]:
    """Difference of the means and its standard error."""
    return after.value - before.value, float(np.hypot(before.error, after.error))


def markdown(metric: str, rows: Mapping[str, tuple[Mean, Mean]], curves: Mapping[str, HistoryRef]) -> str:
    """The summary's text."""
    lines = [f"# {metric}: before and after", "", "| evaluation | before | after | gain | pictures |"]
    lines.append("|---|---|---|---|---|")
    for name, (before, after) in rows.items():
        difference, error = gain(before, after)
        num = str(after.num) if before.num == after.num else f"{before.num}, then {after.num}"
        cells = [name, _pm(before), _pm(after), f"**{difference:+.3f}** ± {error:.3f}", num]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Mean ± standard error over pictures."]
    for name, curve in curves.items():
        if curve.points:
            best = max(curve.points, key=lambda point: point[1])
            first, last = curve.points[0], curve.points[-1]
            lines += ["", f"Curve `{name}`: {first[1]:.3f} at iteration {first[0]}, best {best[1]:.3f} at {best[0]},"]
            lines[-1] += f" last {last[1]:.3f} at {last[0]}."
    return "\n".join(lines) + "\n"


def draw_grid(before: Mapping[str, Group], after: Mapping[str, Group], config: SummariseConfig) -> Figure:
    """A row a prompt: its first pictures before on the left, after on the right.

    Where all scores are 0 or 1, a frame in green or red tells which. The first pictures are shown, not the best.
    """
    shown = [prompt_id for prompt_id in before if prompt_id in after][:_MAX_ROWS]
    if not shown:
        raise InputError("`samples_before` and `samples_after` share no prompt; give pictures of one prompt set")
    columns = min(config.pictures, max(len(before[p].pictures) for p in shown))
    scores = [s for p in shown for s in (*before[p].scores, *after[p].scores) if s is not None]
    framed = bool(scores) and set(scores) <= {0.0, 1.0}
    size, label, gap, top, bottom = 0.85, 1.9, 0.35, 0.6, 0.35  # inches
    width = label + 2 * columns * size + gap + 0.15
    height = top + len(shown) * size + bottom
    figure = Figure(figsize=(width, height), facecolor="white")

    def text(x: float, y: float, words: str, **style: object) -> None:
        figure.text(x / width, y / height, words, color=_INK, va="center", **style)  # pyright: ignore[reportArgumentType]

    halves = ((label, "before", before), (label + columns * size + gap, "after", after))
    for x, title, groups in halves:
        words = f"{title}: {config.metric} {_mean_score([groups[p] for p in shown])}"
        text(x + columns * size / 2, height - top / 2, words, fontsize=14, weight="bold", ha="center")
    for row, prompt_id in enumerate(shown):
        low = height - top - (row + 1) * size
        change = " \N{RIGHTWARDS ARROW} ".join(_mean_score([groups[prompt_id]]) for groups in (before, after))
        text(0.12, low + size * 0.6, before[prompt_id].prompt[:26], fontsize=10)
        text(0.12, low + size * 0.34, change, fontsize=8.5)
        for x, _, groups in halves:
            group = groups[prompt_id]
            pairs = list(zip(group.pictures, group.scores, strict=False))[:columns]
            for column, (picture, score) in enumerate(pairs):
                box = ((x + column * size) / width, low / height, size * 0.94 / width, size * 0.94 / height)
                _show(figure.add_axes(box), picture, score if framed else None)
    note = "The first pictures of each prompt, not the best ones."
    frames = f" Frame: {config.metric} is 1 (green) or 0 (red)." if framed else ""
    text(0.12, bottom / 2, note + frames, fontsize=8)
    return figure


def draw_curves(curves: Mapping[str, HistoryRef]) -> Figure:
    """A panel a curve, over iterations, with first, best and last value marked."""
    figure = Figure(figsize=(7.2, 0.6 + 2.3 * len(curves)), facecolor="white", layout="constrained")
    axes = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        _curve(axis, name, curve)
    axes[-1].set_xlabel("iteration", color=_INK)
    return figure


def _curve(axis: Axes, name: str, curve: HistoryRef) -> None:
    axis.set_title(name, loc="left", fontsize=12, weight="bold", color=_INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.margins(x=0.06, y=0.22)
    if not curve.points:
        return
    x, y = np.array(curve.points, dtype=float).T
    axis.plot(x, y, color="#2f6db5", linewidth=1.8, marker="o", markersize=3.5 if len(x) < 60 else 0)
    best = int(y.argmax())
    axis.plot(x[best], y[best], marker="o", markersize=8, color=_GREEN, zorder=3)
    # The first and the last value stand beside their points, the best one above its own.
    notes = {0: (f"{y[0]:.3f}", (0, -14), "center"), len(x) - 1: (f"{y[-1]:.3f}", (8, -3), "left")}
    notes[best] = (f"best {y[best]:.3f}", (0, 9), "center")
    for i, (words, offset, side) in notes.items():
        colour = _GREEN if i == best else _FAINT
        axis.annotate(words, (x[i], y[i]), offset, textcoords="offset points", ha=side, fontsize=9, color=colour)


def _show(axis: Axes, picture: NDArray[np.uint8], score: float | None) -> None:
    axis.imshow(picture, interpolation="nearest" if picture.shape[0] < 128 else "antialiased")
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_color("#dddddd" if score is None else _GREEN if score else _RED)
        spine.set_linewidth(0.8 if score is None else 2.2)


def _mean_score(groups: Sequence[Group]) -> str:
    """Mean score of all pictures of the groups, not only of those that are shown."""
    scores = [score for group in groups for score in group.scores if score is not None]
    return f"{np.mean(scores):.2f}" if scores else "unknown"


def _groups(ref: SamplesTable, rewards: Mapping[str, RewardsTable], config: SummariseConfig) -> dict[str, Group]:
    """Pictures by prompt id in the order of the table; only those that may be drawn are decoded."""
    scores: dict[str, float] = {}
    for table in rewards.values():
        scores |= scores_of(table, config.metric)
    found: dict[str, Group] = {}
    samples = tables.read(ref).select(["sample_id", "prompt_id", "prompt", "image"])
    for batch in samples.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            group = found.setdefault(row["prompt_id"], Group(row["prompt"], [], []))
            if len(group.pictures) < config.pictures and len(found) <= _MAX_ROWS:
                group.pictures.append(images.pixels(row["image"], row["sample_id"]))
            group.scores.append(scores.get(row["sample_id"]))
    return found


def _metrics(rows: Mapping[str, tuple[Mean, Mean]]) -> dict[str, float]:
    """`standard_error` is that of the gain."""
    metrics = {}
    for name, (before, after) in rows.items():
        difference, error = gain(before, after)
        metrics |= {f"{name}/before": before.value, f"{name}/after": after.value}
        metrics |= {f"{name}/gain": difference, f"{name}/standard_error": error}
    return metrics


def _pm(one: Mean) -> str:
    return f"{one.value:.3f} ± {one.error:.3f}"


def _file(directory: Path, name: str) -> FileRef:
    return FileRef(path=name, digest=digest_of(directory / name))
