"""The commands that look into runs: `runs`, `show`, `why` and `diff`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.compare import diff_json, diff_text
from pipelines.rundir import RunDirectory
from pipelines.saved import Saved, saved
from pipelines.show import (
    address_of,
    iteration_json,
    iteration_text,
    run_json,
    run_text,
    runs_json,
    runs_text,
    stage_json,
    stage_text,
)
from pipelines.why import why_json, why_text
from schemas.errors import InputError, UserError

_SHOW = """\
RUN                the whole run: stages outside the loop, metrics by iteration, results
RUN/ITERATION      one iteration (a number, `last`, `before` or `after`)
RUN/ITERATION/STAGE   one stage: what ran, on what, from what, what came out, who reads it
"""
_WHY = """\
Why RUN/ITERATION/STAGE would run, or be reused, if its flow were run now with these --set (besides those it ran with).
Nothing is computed or changed.
"""


class Parsers(NamedTuple):
    """What they share with other commands is added by the caller."""

    runs: argparse.ArgumentParser
    show: argparse.ArgumentParser
    why: argparse.ArgumentParser
    diff: argparse.ArgumentParser


def look_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> Parsers:
    """`runs`, `show`, `why` and `diff`."""
    kind = argparse.RawDescriptionHelpFormatter
    runs = commands.add_parser("runs", help="the runs there are")
    runs.set_defaults(command=_runs)
    about: dict[str, Any] = {"description": _SHOW, "formatter_class": kind}
    show = commands.add_parser("show", help="what a run, an iteration or a stage did", **about)
    show.add_argument("place", metavar="RUN[/ITERATION[/STAGE]]")
    show.set_defaults(command=_show)
    why = commands.add_parser("why", help="why a stage would run or be reused", description=_WHY, formatter_class=kind)
    why.add_argument("place", metavar="RUN/ITERATION/STAGE")
    why.set_defaults(command=_why)
    compare = commands.add_parser("diff", help="settings and results of two runs side by side")
    compare.add_argument("one", metavar="RUN1")
    compare.add_argument("two", metavar="RUN2")
    compare.set_defaults(command=_diff)
    parsers = Parsers(runs, show, why, compare)
    for parser in parsers:
        parser.add_argument("--json", action="store_true", help="as JSON")
    return parsers


def _runs(arguments: argparse.Namespace) -> int:
    found, broken = [], []
    for file in sorted(arguments.runs.glob("*/run.json")):
        try:
            found.append(Saved(RunDirectory.open(file.parent)))
        except InputError as error:
            broken.append(str(error))
    if not found and not broken:
        raise UserError(f"no runs in {arguments.runs}; make one with `rewardflow run`, or name their folder by --runs")
    lines = runs_json(sorted(found, key=lambda run: str(run.facts.get("created", ""))))
    return _said(arguments, {"runs": lines, "damaged": broken}, [*runs_text(lines), *(f"damaged: {b}" for b in broken)])


def _show(arguments: argparse.Namespace) -> int:
    run, rest = _place(arguments.runs, arguments.place)
    if not rest:
        shown = run_json(run)
        return _said(arguments, shown, run_text(shown))
    if len(rest) == 1:
        shown = iteration_json(run, rest[0])
        return _said(arguments, shown, iteration_text(shown))
    shown = stage_json(run, address_of(run, *rest))
    return _said(arguments, shown, stage_text(shown))


def _why(arguments: argparse.Namespace) -> int:
    run, rest = _place(arguments.runs, arguments.place)
    if len(rest) != 2:
        raise UserError(f"why {arguments.place}: wants RUN/ITERATION/STAGE, such as {run.run.path.name}/3/update")
    plan, address = run.planned(arguments.file, arguments.set), address_of(run, *rest)
    if address.iteration is not None and address.iteration >= plan.times:
        raise UserError(f"why {arguments.place}: the loop runs {plan.times} times, so the last is {plan.times - 1}")
    shown = why_json(run, plan, address)
    return _said(arguments, shown, why_text(shown))


def _diff(arguments: argparse.Namespace) -> int:
    shown = diff_json(saved(arguments.runs, arguments.one), saved(arguments.runs, arguments.two))
    return _said(arguments, shown, diff_text(shown))


def _place(runs: Path, place: str) -> tuple[Saved, Sequence[str]]:
    """A run, and what stands behind it: `mine`, `mine/3`, `mine/3/update`."""
    name, *rest = place.strip("/").split("/")
    if len(rest) > 2:
        raise UserError(f"{place}: wants RUN[/ITERATION[/STAGE]], with --runs for the folder of the runs")
    return saved(runs, name), rest


def _said(arguments: argparse.Namespace, shown: Any, lines: Sequence[str]) -> int:
    print(json.dumps(shown, indent=2) if arguments.json else "\n".join(lines))
    return 0
