"""The command."""

import argparse
import sys
from pathlib import Path

from pipelines.rundir import write_text
from pipelines.saved import saved
from pipelines.terminal import size
from pipelines.views.samples import file_for

_ABOUT = """\
RUN as one HTML file that opens from disk, without a network: results, reward and evaluation curves, statistics of
groups, ratio, clip fraction, KL and gradient norm, the same noise drawn over the iterations, time of each stage,
settings and lineage. A run that is at work is shown as far as it is.
"""


def report_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`report`; what it shares with other commands is added by the caller."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("report", help="a run as one HTML file", description=_ABOUT, formatter_class=kind)
    parser.set_defaults(command=_report)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="HTML", help="where it goes (default: RUN/views/report.html)")
    return parser


def _report(arguments: argparse.Namespace) -> int:
    from pipelines.views.page import page

    run = saved(arguments.runs, arguments.run)
    path: Path = file_for(arguments.out, ".html") or run.run.path / "views" / "report.html"
    text = page(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    for told in run.damaged.values():
        print(f"damaged: {told}", file=sys.stderr)
    print(f"{path} ({size(path.stat().st_size)})")
    return 0
