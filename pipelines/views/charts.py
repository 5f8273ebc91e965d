"""Curves as inline SVG: text stays text, and colours of text and lines follow the page, light or dark."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Mapping[int, float]

COLOURS = ("#3b82c4", "#d9822b", "#2f9e6e", "#c2508f", "#8c6bd1", "#b0851f", "#4aa8a8", "#c8553d")
_INK, _LINE = "#010203", "#040506"  # stand for the page's colours
_SMOOTH = 60  # a curve of more points is drawn thin, with a moving mean over it
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def lines(name: str, series: Mapping[str, Points], logarithmic: bool = False, legend: bool = False) -> str:
    """Curves over iterations; few points get markers. `name` tells this chart's ids from those of others."""

    def paint(axes: "Axes") -> None:
        for (label, points), colour in zip(series.items(), cycle(COLOURS), strict=False):
            x, y = list(points), list(points.values())
            many = len(x) > _SMOOTH
            marker = "o" if len(x) <= 12 else None
            axes.plot(x, y, color=colour, linewidth=0.7 if many else 1.5, alpha=0.4 if many else 1, marker=marker, ms=3)
            smooth = moving_mean(y, len(y) // 20) if many else y
            axes.plot(x, smooth, color=colour, linewidth=1.6, label=label)
        if not any(value for points in series.values() for value in points.values()):
            axes.set_ylim(0, 1)
        if logarithmic and all(value > 0 for points in series.values() for value in points.values()):
            axes.set_yscale("log")
        else:
            axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-3, 4))

    return _svg(name, paint, legend=legend or len(series) > 1)


def stacked(name: str, series: Mapping[str, Points]) -> str:
    """Areas one upon the other over iterations; an iteration that a series lacks counts as 0 there."""

    def paint(axes: "Axes") -> None:
        x = sorted({i for points in series.values() for i in points})
        values = [[points.get(i, 0.0) for i in x] for points in series.values()]
        colours = [colour for colour, _ in zip(cycle(COLOURS), values, strict=False)]
        if len(x) > 40:
            axes.stackplot(x, values, labels=list(series), colors=colours, linewidth=0)
        else:
            floor = [0.0] * len(x)
            for label, heights, colour in zip(series, values, colours, strict=True):
                axes.bar(x, heights, bottom=floor, label=label, color=colour, width=0.8)
                floor = [a + b for a, b in zip(floor, heights, strict=True)]
        axes.set_ylabel("seconds")

    return _svg(name, paint, legend=True)


def moving_mean(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and up to `reach` neighbours on either side."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ends = [(max(i - reach, 0), min(i + reach + 1, len(values))) for i in range(len(values))]
    return [(sums[b] - sums[a]) / (b - a) for a, b in ends]


def _svg(name: str, paint: Callable[["Axes"], None], legend: bool) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # The salt keeps ids of one SVG from meeting those of another in the page; groups' ids are the same in all.
    with rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(4.3, 2.5), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        axes.set_axisbelow(True)
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if legend:
            figure.legend(loc="outside lower center", ncols=4)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor").replace(_LINE, "var(--line)")
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'class="chart" role="img"', text, count=1)
