"""`rewardflow samples`: the pictures of an iteration as one PNG, best and worst of each group, and as JSON."""

import argparse
import io
import json
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.saved import saved
from pipelines.terminal import short
from pipelines.views.gallery import Gallery, Group, Picture, deviation, evenly, gallery
from schemas.errors import InputError, UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ABOUT = """\
The pictures of RUN in ITERATION (a number, `last`, `before` or `after`) as one PNG: a row a prompt, the best pictures
of its group on the left and the worst on the right, each with its reward (the weighted sum) and its advantage. Rows go
from the prompt of the highest mean reward to that of the lowest; of many prompts an even spread is shown.
"""
_CJK = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "PingFang SC", "SimHei")
_PIXELS = 256  # longest side of a picture in the grid
_INK, _FAINT = "#222222", "#777777"


class Layout(NamedTuple):
    """Inches of the grid."""

    picture: float = 1.05
    caption: float = 0.34
    label: float = 2.3
    gap: float = 0.25  # between best and worst
    head: float = 0.55


def samples_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`samples`; what it shares with other commands is added by the caller."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("samples", help="best and worst pictures", description=_ABOUT, formatter_class=kind)
    parser.set_defaults(command=_samples)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("iteration", metavar="ITERATION")
    parser.add_argument("--stage", metavar="NODE", help="whose pictures (default: those that advantages came from)")
    parser.add_argument("--prompts", type=int, default=12, metavar="N", help="rows (default: 12); 0: all prompts")
    parser.add_argument("--each", type=int, default=4, metavar="N", help="best and worst of each (default: 4)")
    parser.add_argument("--out", type=Path, metavar="PNG", help="where it goes (default: RUN/views/...)")
    parser.add_argument("--json", action="store_true", help="every group, sorted, as JSON on standard output as well")
    return parser


def _samples(arguments: argparse.Namespace) -> int:
    for option in ("prompts", "each"):
        least = 0 if option == "prompts" else 1
        if getattr(arguments, option) < least:
            raise UserError(f"--{option}: wants {least} or more, got {getattr(arguments, option)}")
    run = saved(arguments.runs, arguments.run)
    found = gallery(run, run.folder(arguments.iteration), arguments.stage)
    groups = found.groups()
    name = found.address.path.replace("/", "-")
    path: Path = file_for(arguments.out, ".png") or run.run.path / "views" / f"{name}.png"
    title = f"{run.run.path.name}/{found.address.path}"
    shown = evenly(groups, arguments.prompts)
    _save(draw(found, title, shown, arguments.each, len(groups)), path)
    for text in run.damaged.values():
        print(f"damaged: {text}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(_as_json(title, path, groups), indent=2))
        return 0
    print("\n".join([title, *(f"  {_line(group)}" for group in shown)]))
    if len(shown) < len(groups):
        print(f"({len(groups) - len(shown)} prompts between are not shown; --prompts 0 shows all)")
    print(path)
    return 0


def file_for(out: Path | None, suffix: str) -> Path | None:
    """--out, when it can be nothing else than a file of this kind: what is there already is written over."""
    if out is not None and (out.suffix.lower() != suffix or out.is_dir()):
        raise UserError(f"--out {out}: wants the name of a {suffix} file")
    return out


def ends(group: Group, each: int) -> tuple[Sequence[Picture], Sequence[Picture]]:
    """The best and the worst of a group, which share none; of the worst the last is the worst."""
    if len(group.pictures) <= 2 * each:
        half = -(-len(group.pictures) // 2)
        return group.pictures[:half], group.pictures[half:]
    scored = [picture for picture in group.pictures if picture.score is not None]
    ranked = scored if len(scored) >= 2 * each else group.pictures
    return ranked[:each], ranked[-each:]


def thumbnail(found: Gallery, picture: Picture, longest: int = _PIXELS) -> Any:
    """The picture as a PIL image, `longest` at most. InputError, which names the sample, if it does not decode."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(found.png(picture))) as image:
            small = image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        where = f"{found.run.run.path.name}/{found.address.path}"
        raise InputError(f"{where}: the picture of sample {picture.sample_id!r} does not decode ({error})") from error
    small.thumbnail((longest, longest))
    return small


def draw(found: Gallery, title: str, groups: Sequence[Group], each: int, prompts: int) -> "Figure":
    """The grid of some of the `prompts` groups."""
    from matplotlib.figure import Figure

    at, sides = Layout(), [ends(group, each) for group in groups]
    on_left = max(len(best) for best, _ in sides)
    columns = on_left + max(len(worst) for _, worst in sides)
    width = at.label + columns * at.picture + at.gap + 0.2
    height = at.head + (at.picture + at.caption) * len(groups) + 0.1
    figure = Figure(figsize=(width, height), facecolor="white")
    say = _writer(figure, width, height)
    few = "" if len(groups) == prompts else f", {len(groups)} of {prompts} prompts"
    say(0.1, 0.2, f"{title}{few}", 9, weight="bold")
    say(0.1, 0.42, "reward, advantage; best of each group on the left, worst on the right", 7, color=_FAINT)
    for place, (group, (best, worst)) in enumerate(zip(groups, sides, strict=True)):
        top = at.head + place * (at.picture + at.caption)
        lines = textwrap.wrap(group.prompt, 36, max_lines=6, placeholder=" ...")
        say(0.1, top + at.picture / 2, "\n".join(lines) or "(no words)", 7)
        say(0.1, top + at.picture + at.caption / 2, _statistics(group), 6, color=_FAINT)
        shifts = [*range(len(best)), *range(on_left, on_left + len(worst))]
        for shift, picture in zip(shifts, [*best, *worst], strict=True):
            left = at.label + shift * at.picture + (at.gap if shift >= on_left else 0)
            axes = figure.add_axes((left / width, 1 - (top + 1) / height, 1 / width, 1 / height))
            axes.imshow(thumbnail(found, picture), interpolation="nearest")
            axes.set_axis_off()
            say(left + 0.5, top + 1.12, _caption(picture), 6, ha="center")
    return figure


def _writer(figure: "Figure", width: float, height: float) -> Callable[..., None]:
    """Writes words at inches from the upper left corner; a prompt's dollar signs are no formulas."""
    from matplotlib import font_manager

    have = {font.name for font in font_manager.fontManager.ttflist}
    families = ["DejaVu Sans", *(name for name in _CJK if name in have)]

    def say(x: float, y: float, words: str, size: float, **style: Any) -> None:
        style = {"ha": "left", "va": "center", "color": _INK, "family": families, **style}
        figure.text(x / width, 1 - y / height, words, fontsize=size, parse_math=False, **style)

    return say


def _save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box stands for it
        figure.savefig(path, dpi=180, format="png")


def _as_json(title: str, path: Path, groups: Sequence[Group]) -> dict[str, Any]:
    return {
        "samples": title,
        "grid": str(path),
        "groups": [
            {
                "prompt_id": group.prompt_id,
                "prompt": group.prompt,
                "mean": group.mean,
                "pictures": [
                    {key: value for key, value in asdict(picture).items() if key not in ("prompt_id", "prompt", "row")}
                    for picture in group.pictures
                ],
            }
            for group in groups
        ],
    }


def _line(group: Group) -> str:
    ends_ = f"{group.scores[0]:.3g} to {group.scores[-1]:.3g}" if group.scores else ""
    return "  ".join(filter(None, [_statistics(group), ends_, short(group.prompt)]))


def _caption(picture: Picture) -> str:
    score = "no reward" if picture.score is None else f"{picture.score:.3g}"
    return score if picture.advantage is None else f"{score}, {picture.advantage:+.2f}"


def _statistics(group: Group) -> str:
    if group.mean is None:
        return f"{len(group.pictures)} pictures, no rewards"
    return f"{len(group.pictures)} pictures, {group.mean:.3g} ± {deviation(group.scores):.2g}"
