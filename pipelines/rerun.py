"""The commands `rerun` and `remove`."""

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipelines.adopt import EVERY, begin, start_of
from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.lock import locked
from pipelines.plan import Plan
from pipelines.saved import saved
from schemas.errors import UserError

_ABOUT = f"""\
Makes a new run from an old one: what stands before the chosen stage is adopted, not copied; the chosen stage and what
follows it are made anew. The settings are those of the old run (its --set, and today's flows.yaml) with --set on top.
The old run stays as it is.

  --from 7/update                  from iteration 7 on, for instance with another learning rate
  --from 0/score                   other rewards on the samples of iteration 0, and what follows from them
  --from {EVERY}/score --only           other rewards on all saved samples, and nothing else
  --from {EVERY}/update --only          another loss on the saved trajectories: off policy, as each record says
  --from {EVERY}/eval_score --only      every saved policy judged by another reward
"""


def rerun_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """`rerun` and `remove`; what they share with `run` is added by the caller."""
    kind = argparse.RawDescriptionHelpFormatter
    rerun = commands.add_parser(
        "rerun", help="a new run from a stage of an old one", description=_ABOUT, formatter_class=kind
    )
    rerun.add_argument("base", metavar="RUN", help="the old run's name")
    rerun.add_argument("--from", dest="start", required=True, metavar="ITERATION/STAGE", help="where to begin")
    rerun.add_argument("--only", action="store_true", help="this stage only, nothing that follows from it")
    removal = commands.add_parser("remove", help="remove a run, unless another one needs it")
    removal.add_argument("base", metavar="RUN", help="the run's name")
    return rerun, removal


def prepared(arguments: argparse.Namespace, run_name: str) -> tuple[Plan, list[str]]:
    """The plan of a re-run and all its overrides; its directory is there with a run.json."""
    base = saved(arguments.runs, arguments.base).run
    facts = base.read()
    sets = [*facts.get("plan", {}).get("sets", []), *arguments.set]
    flow = str(facts.get("flow", ""))
    plan = compile_flow(load(arguments.file, flow, sets), flow)
    begin(plan, base, arguments.runs / run_name, start_of(arguments.start, plan), arguments.set, only=arguments.only)
    return plan, sets


def remove(arguments: argparse.Namespace) -> int:
    """Refuses while a re-run needs it or a process works on it."""
    run = saved(arguments.runs, arguments.base).run.path
    needing = sorted(_needing(arguments.runs, run))
    if needing:
        raise UserError(
            f"the run {run} is needed by {', '.join(needing)}, which adopted stages of it; remove these first"
        )
    with locked(run, print, patience=0):
        gone = run.with_name(f".{run.name}.removed")
        os.replace(run, gone)
    shutil.rmtree(gone)
    print(f"removed {run}")
    return 0


def _needing(runs: Path, run: Path) -> Iterator[str]:
    for file in runs.glob("*/run.json"):
        with suppress(ValueError):  # a broken run.json says nothing of what it adopted
            base = json.loads(file.read_bytes()).get("base") or {}
            if any((file.parent / owner).resolve() == run.resolve() for owner in base.get("adopted", {})):
                yield file.parent.name
