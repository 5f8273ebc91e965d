"""The command `rewardflow`. It answers --help, list and plan in about a second: torch and Prefect stay out of it."""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType

from pipelines.compile import compile_flow
from pipelines.describe import as_json, as_text
from pipelines.disk import as_lines as disk_lines
from pipelines.generate import generate_command
from pipelines.imports import import_command, prepared_import, say_imported
from pipelines.init import init_command
from pipelines.load import load
from pipelines.logs import logs_command
from pipelines.look import look_commands
from pipelines.memory import as_json as memory_json
from pipelines.memory import as_lines as memory_lines
from pipelines.metrics import metrics_command
from pipelines.plan import Plan
from pipelines.rerun import prepared, prune_run, remove, rerun_commands
from pipelines.sweep import as_json as sweep_json
from pipelines.sweep import as_text as sweep_text
from pipelines.sweep import sweep_command, trials
from pipelines.track import track_command
from pipelines.trackers.kinds import check_installed
from pipelines.views.report import report_command
from pipelines.views.samples import samples_command
from schemas.errors import DiskFull, RewardflowError, ServerLost, UserError

_ABOUT = """\
Post-trains diffusion and flow-matching models with reinforcement learning.
Pipelines are declared in flows.yaml; each is a DAG of stages such as
prompts, encode, sample, score, advantage and update, some of them in a loop.
"""
_EXAMPLES = """\
examples:
  rewardflow init mine                      a flow of your own to start from
  rewardflow list                           the flows of flows.yaml
  rewardflow plan shapes                    what a flow will do, checked, without running it
  rewardflow run shapes --as demo           run it; the same command goes on where it stopped
  rewardflow run shapes --as more --set times=100 --set sample.per_prompt=16
  rewardflow show demo                      what it did; also runs, why, diff, metrics, samples, report, logs
  rewardflow import-samples pictures --as mine --rewards size=jpeg_size
  rewardflow rerun demo --from 20/update --as lower --set update.optimizer.learning_rate.start=3e-5

A run lives in one directory, runs/NAME. Every stage leaves a folder there,
runs/NAME/ITERATION/STAGE, with its request, its outputs (Arrow tables, safetensors)
and a record. A folder is complete or not there, so a run may be stopped at any
moment, even by kill -9, and started again.

exit codes: 0 done, 1 the run failed, 2 the input is wrong, 130 stopped by Ctrl-C or SIGTERM
"""
_SET = """\
set a field of the flow, again and again if you like. PATH begins at a node (sample.per_prompt), at a field of the
loop (times) or of the flow (seed, resources.processes); VALUE is YAML
"""
_CHANGE = """\
when a finished stage was made by another recipe than the one wanted now: stop and show the difference (default),
rerun it (its old outputs move aside), or keep it
"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = _parser().parse_args(words)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"rewardflow: {error}", file=sys.stderr)
        return 2
    except ServerLost as error:
        print(f"rewardflow: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # an ordinary exit would try for minutes to hand Prefect's last events to the server that is gone
    except RewardflowError as error:
        print(f"rewardflow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rewardflow: stopped; the same command goes on from the last finished stage", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has left; Python's own flush at exit would fail again, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        full = DiskFull.is_why(error)
        hint = "; the run's folder is that of --runs and --as" if hasattr(arguments, "run_name") else ""
        what = DiskFull(str(error)) if full else f"{error}{hint}"
        print(f"rewardflow: {what}", file=sys.stderr)
        return 1 if full else 2


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="rewardflow", description=_ABOUT, epilog=_EXAMPLES, formatter_class=kind)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    init_command(commands)
    listing = commands.add_parser("list", help="the flows of the file, with what they are for")
    listing.set_defaults(command=_list)
    plan = commands.add_parser("plan", help="check a flow and show its stages, edges and settings")
    plan.set_defaults(command=_plan)
    plan.add_argument("flow", metavar="NAME", help="a flow of the file")
    plan.add_argument("--json", action="store_true", help="as JSON")
    run = commands.add_parser("run", help="run a flow, or go on with a run that was stopped")
    run.set_defaults(command=_run)
    run.add_argument("flow", metavar="NAME", help="a flow of the file")
    again = rerun_commands(commands)
    again.rerun.set_defaults(command=_rerun)
    again.remove.set_defaults(command=remove)
    again.prune.set_defaults(command=prune_run)
    taking = import_command(commands)
    taking.set_defaults(command=_import, plain=True)
    sweep = sweep_command(commands)
    sweep.set_defaults(command=_sweep)
    looking = look_commands(commands)
    measured = (metrics_command(commands), logs_command(commands))
    views = (samples_command(commands), report_command(commands), generate_command(commands))
    track = track_command(commands)
    for command in (run, again.rerun, taking, sweep):
        by_default = "; the flow's by default" if command is run else ""
        command.add_argument("--as", dest="run_name", metavar="RUN", help=f"name of the run's directory{by_default}")
        command.add_argument("--on-change", choices=("stop", "rerun", "keep"), default="stop", help=_CHANGE)
    for command in (run, again.rerun, sweep):
        command.add_argument(
            "--plain", action="store_true", help="without Prefect: no task states and no UI, the same results"
        )
    for command in (run, taking, sweep, *again, *looking, *measured, *views, track):
        command.add_argument(
            "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)"
        )
    for command in (listing, plan, run, sweep, again.rerun, again.prune, looking.why, track):
        command.add_argument(
            "--file", type=Path, default=Path("flows.yaml"), metavar="FILE", help="the flow file (default: flows.yaml)"
        )
    for command in (plan, run, sweep, again.rerun, taking, looking.why, track):
        command.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help=_SET)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    flows = load(arguments.file).spec.flows
    width = max(len(name) for name in flows)
    for name, flow in flows.items():
        print(f"{name:<{width}}  {flow.description}")
    return 0


def _compiled(arguments: argparse.Namespace) -> Plan:
    return compile_flow(load(arguments.file, arguments.flow, arguments.set), arguments.flow)


def _plan(arguments: argparse.Namespace) -> int:
    plan = _compiled(arguments)
    if arguments.json:
        print(json.dumps({**json.loads(as_json(plan)), "memory": memory_json(plan)}, indent=2))
        return 0
    disk = ["", "disk, estimated", *(f"  {line}" for line in disk_lines(plan))]
    memory = ["", "memory of a rank, estimated", *(f"  {line}" for line in memory_lines(plan))]
    print("\n".join([as_text(plan), *disk, *memory]))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    plan = _compiled(arguments)
    check_installed(plan.trackers)
    run_name = arguments.flow if arguments.run_name is None else arguments.run_name
    return _started(plan, _checked(run_name), arguments, arguments.set)


def _rerun(arguments: argparse.Namespace) -> int:
    plan, sets = prepared(arguments, _checked(arguments.run_name))
    return _started(plan, arguments.run_name, arguments, sets)


def _import(arguments: argparse.Namespace) -> int:
    run_name = _checked(arguments.run_name)
    code = _started(prepared_import(arguments, run_name), run_name, arguments, [])
    say_imported(arguments.runs, run_name)
    return code


def _sweep(arguments: argparse.Namespace) -> int:
    everything = trials(arguments, _checked(arguments.run_name))
    failed: dict[str, RewardflowError] = {}
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        for trial in [] if arguments.dry_run else everything:
            print(f"sweep: {trial.run_name}, {', '.join(f'{name}={value}' for name, value in trial.settings.items())}")
            try:
                _started(trial.plan, trial.run_name, arguments, trial.sets)
            except ServerLost:
                raise
            except RewardflowError as error:
                print(f"rewardflow: {trial.run_name}: {error}", file=sys.stderr)
                failed[trial.run_name] = error
    lines = sweep_json(arguments.runs, everything, failed)
    print(json.dumps(lines, indent=2) if arguments.json else "\n".join(sweep_text(lines)))
    if not failed:
        return 0
    return 2 if all(isinstance(error, UserError) for error in failed.values()) else 1


def _checked(run_name: str | None) -> str:
    if run_name is None:
        raise UserError("--as: the new run needs a name of its own")
    if not re.fullmatch(r"\w[\w.-]*", run_name):
        raise UserError(f"--as: a run's name has letters, digits, '.', '_' and '-', got {run_name!r}")
    return run_name


def _started(plan: Plan, run_name: str, arguments: argparse.Namespace, sets: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    for warning in plan.warnings:
        print(f"rewardflow: warning: {warning}", file=sys.stderr)
    if arguments.plain:
        from pipelines.run import run_plan

        run_plan(plan, arguments.runs / run_name, on_change=arguments.on_change)
    else:
        from pipelines.flows import run_flow

        run_flow(plan, run_name, arguments.runs, sets, on_change=arguments.on_change)
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """Winds up the run; a second Ctrl-C does not wait for that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
