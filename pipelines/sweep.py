"""`rewardflow sweep`: a flow run several times with other settings, and one table of what came of it."""

import argparse
import itertools
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.plan import Plan
from pipelines.rundir import RunDirectory
from pipelines.saved import Saved
from pipelines.show import best_of
from pipelines.terminal import duration, number, table
from schemas.errors import UserError

_ABOUT = """\
Runs NAME once for each combination of the values that --over lists, one after the other, as RUN-1, RUN-2, ... Each is a
run like any other: the same command goes on where it stopped, `show`, `diff` and `report` look into it. One that fails
does not stop the others. In the end, and with --dry-run at any time, a table shows settings and results side by side.
"""
_EXAMPLES = """\
examples:
  rewardflow sweep shapes --as rate --over update.optimizer.learning_rate.start=3e-5,1e-4,3e-4 --set times=40
  rewardflow sweep shapes --as two --over update.loss.beta=0.5,1 --over seed=1,2,3 --dry-run
"""
_RESULTS = 3  # columns of results outside the loop that a terminal has room for


class Trial(NamedTuple):
    """One run of the sweep: its name, its own settings (PATH=VALUE), and the checked plan."""

    run_name: str
    settings: dict[str, Any]
    sets: list[str]
    plan: Plan


def sweep_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`sweep`; what it shares with `run` is added by the caller."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "sweep", help="a flow with several settings", description=_ABOUT, epilog=_EXAMPLES, formatter_class=kind
    )
    parser.add_argument("flow", metavar="NAME", help="a flow of the file")
    values = "values of a field, again and again for every combination; VALUES is YAML: 1,2,3 or [a, b]"
    parser.add_argument("--over", action="append", required=True, metavar="PATH=VALUES", help=values)
    parser.add_argument("--dry-run", action="store_true", help="only the table, as far as the runs are")
    parser.add_argument("--json", action="store_true", help="the table as JSON, with all results")
    return parser


def trials(arguments: argparse.Namespace, run_name: str) -> list[Trial]:
    """Every combination, all of them checked before the first one runs."""
    axes = [_axis(text) for text in arguments.over]
    given = [*(name for name, _ in axes), *(text.partition("=")[0] for text in arguments.set)]
    twice = next((name for name, _ in axes if given.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--over {twice}: given twice; list all values in one --over, and none in --set")
    out = []
    for place, values in enumerate(itertools.product(*(values for _, values in axes)), start=1):
        settings = {name: value for (name, _), value in zip(axes, values, strict=True)}
        sets = [*arguments.set, *(f"{name}={json.dumps(value)}" for name, value in settings.items())]
        plan = compile_flow(load(arguments.file, arguments.flow, sets), arguments.flow)
        out.append(Trial(f"{run_name}-{place}", settings, sets, plan))
    return out


def as_json(runs: Path, all_of: Sequence[Trial], failed: Collection[str]) -> list[dict[str, Any]]:
    """A line for each trial: settings, state, best value, results. What is there of a failed one counts for nothing."""
    lines = [_line(runs, trial) for trial in all_of]
    return [
        {**line, "state": "failed", "best": None, "results": {}} if line["run"] in failed else line for line in lines
    ]


def as_text(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The same for a terminal; the highest best value is marked."""
    names = list(dict.fromkeys(name for line in lines for name in line["results"]))[:_RESULTS]
    metric = next((line["best"]["metric"] for line in lines if line["best"]), "best")
    top = max((line["best"]["value"] for line in lines if line["best"]), default=None)
    rows = []
    for line in lines:
        best = line["best"]
        rows.append(
            [
                line["run"],
                *(str(value) for value in line["settings"].values()),
                line["state"],
                str(line["iterations"]),
                number(best["value"]) if best else "",
                *(number(line["results"][name]) if name in line["results"] else "" for name in names),
                duration(line["seconds"]),
                "<- best" if best and best["value"] == top else "",
            ]
        )
    head = ["run", *lines[0]["settings"], "state", "iterations", metric, *names, "time", ""]
    return table(head, rows)


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not name or not values.strip():
        raise UserError(f"--over {text}: wants PATH=VALUES, such as update.loss.beta=0.5,1")
    listed = values if values.lstrip().startswith("[") else f"[{values}]"
    try:
        found = YAML(typ="safe", pure=True).load(listed)
    except YAMLError as error:
        raise UserError(f"--over {text}: the values are no YAML list: write 1,2,3 or [a, b]") from error
    if not found:
        raise UserError(f"--over {text}: wants at least one value")
    if len({json.dumps(value) for value in found}) < len(found):
        raise UserError(f"--over {text}: a value is there twice")
    return name, list(found)


def _line(runs: Path, trial: Trial) -> dict[str, Any]:
    line: dict[str, Any] = {"run": trial.run_name, "settings": trial.settings}
    directory = runs / trial.run_name
    if not (directory / "run.json").is_file():
        return {**line, "state": "not begun", "iterations": 0, "best": None, "results": {}, "seconds": 0.0}
    run = Saved(RunDirectory.open(directory))
    return {
        **line,
        "state": run.state(),
        "iterations": run.iterations(),
        "best": best_of(run),
        "results": run.results(),
        "seconds": round(run.seconds(), 1),
    }
