"""`rewardflow logs`: what a run's workers printed, all ranks in one view or one log as it is."""

import argparse
import heapq
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipelines.saved import saved
from schemas.errors import UserError, closest

_ABOUT = """\
What the workers of RUN printed, tracebacks among it, all ranks in the order of time, each line after its log's name:
`compute-rank0` and so on, and `light-rank0` for stages without a model. --rank shows one log as it lies in RUN/logs.
"""
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ")  # of a line that Python wrote


def logs_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`logs`."""
    kind = argparse.RawDescriptionHelpFormatter
    logs = commands.add_parser("logs", help="what a run's workers printed", description=_ABOUT, formatter_class=kind)
    logs.set_defaults(command=_logs)
    logs.add_argument("run", metavar="RUN")
    logs.add_argument("--rank", metavar="LOG", help="this log only, such as compute-rank0")
    logs.add_argument("--lines", type=int, default=40, metavar="N", help="the last lines (default: 40); 0: all")
    return logs


class Line(NamedTuple):
    """A line of a log. What C code wrote has no time of its own and takes that of the line before."""

    stamp: str
    name: str
    text: str


def merged(logs: dict[str, Path]) -> list[Line]:
    """Lines of all logs in the order of time; those of one log stay in theirs."""
    return list(heapq.merge(*(_lines(name, file) for name, file in logs.items()), key=lambda line: line.stamp))


def _lines(name: str, file: Path) -> Iterator[Line]:
    stamp = ""
    for text in _text(file):
        found = _STAMP.match(text)
        stamp = max(stamp, found[0]) if found else stamp  # clocks may be set back
        yield Line(stamp, name, text)


def _text(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


def _logs(arguments: argparse.Namespace) -> int:
    run = saved(arguments.runs, arguments.run)
    found = {file.stem: file for file in sorted(run.run.logs.glob("*-rank*.log"))}
    if not found:
        raise UserError(f"the run {run.run.path} has no logs: no worker process was started for it yet")
    if arguments.rank is not None and arguments.rank not in found:
        raise UserError(f"--rank: no log {arguments.rank!r}. {closest(arguments.rank, found)}")
    if arguments.rank is not None:
        lines = [f"==> {found[arguments.rank]} <==", *_text(found[arguments.rank])[-arguments.lines :]]
    else:
        width = max(len(name) for name in found)
        lines = [f"{line.name:<{width}} | {line.text}" for line in merged(found)[-arguments.lines :]]
    print("\n".join(lines))
    return 0
