"""The commands `rerun`, `remove` and `prune`."""

import argparse
import os
import shutil
from typing import NamedTuple

from pipelines.adopt import EVERY, adopters, begin, start_of
from pipelines.lock import locked
from pipelines.plan import Plan
from pipelines.prune import Pruner, prune
from pipelines.saved import saved
from pipelines.terminal import size
from pipelines.trackers.kinds import check_installed
from pipelines.unroll import Unrolled
from schemas.errors import UserError
from schemas.flow import Keep

_PRUNE = """\
Removes trajectories, samples, embeddings and policies of iterations that `keep: {last: N, every: M}` lets go. Records
stay, and so does what the loop's end may read (the best policy), what a kept iteration began from, and what another run
adopted.
"""
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


class Parsers(NamedTuple):
    """What they share with `run` is added by the caller."""

    rerun: argparse.ArgumentParser
    remove: argparse.ArgumentParser
    prune: argparse.ArgumentParser


def rerun_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> Parsers:
    """`rerun`, `remove` and `prune`."""
    kind = argparse.RawDescriptionHelpFormatter
    rerun = commands.add_parser(
        "rerun", help="a new run from a stage of an old one", description=_ABOUT, formatter_class=kind
    )
    rerun.add_argument("base", metavar="RUN", help="the old run's name")
    rerun.add_argument("--from", dest="start", required=True, metavar="ITERATION/STAGE", help="where to begin")
    rerun.add_argument("--only", action="store_true", help="this stage only, nothing that follows from it")
    removal = commands.add_parser("remove", help="remove a run, unless another one needs it")
    removal.add_argument("base", metavar="RUN", help="the run's name")
    pruning = commands.add_parser(
        "prune", help="remove heavy outputs of old iterations; records stay", description=_PRUNE
    )
    pruning.add_argument("base", metavar="RUN", help="the run's name")
    pruning.add_argument(
        "--last", type=_count, metavar="N", help="keep the newest N iterations (default: the flow's keep)"
    )
    pruning.add_argument("--every", type=_count, metavar="M", help="keep every M-th iteration too")
    pruning.add_argument("--dry-run", action="store_true", help="only tell what would go")
    return Parsers(rerun, removal, pruning)


def prepared(arguments: argparse.Namespace, run_name: str) -> tuple[Plan, list[str]]:
    """The plan of a re-run and all its overrides; its directory is there with a run.json."""
    old = saved(arguments.runs, arguments.base)
    plan = old.planned(arguments.file, arguments.set)
    check_installed(plan.trackers)
    start = start_of(arguments.start, plan)
    begin(plan, old.run, arguments.runs / run_name, start, arguments.set, only=arguments.only)
    return plan, [*old.sets, *arguments.set]


def remove(arguments: argparse.Namespace) -> int:
    """Refuses while a re-run needs it or a process works on it."""
    run = saved(arguments.runs, arguments.base).run.path
    needing = sorted(name for name, _ in adopters(run))
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


def prune_run(arguments: argparse.Namespace) -> int:
    """Removes, or only lists, what `keep` lets go."""
    run = saved(arguments.runs, arguments.base)
    plan = run.planned(arguments.file)
    keep = plan.keep
    if arguments.last is not None or arguments.every is not None:
        keep = Keep(last=arguments.last or 2, every=arguments.every)
    if keep is None:
        raise UserError(f"the flow {plan.flow!r} has no `keep`; say what to keep with --last N and --every M")
    with locked(run.run.path, print, patience=0):
        world = Unrolled(plan, run.run)
        heavy = Pruner(run.run.path, keep).found(world, run.iterations() - 1) if run.iterations() else []
        for one in heavy:
            print(f"{one.address.path}.{one.output}  {size(one.size)}")
        total = sum(one.size for one in heavy) if arguments.dry_run else prune(heavy)
    print(f"{'would free' if arguments.dry_run else 'freed'} {size(total)} in {len(heavy)} outputs")
    holding = sorted(name for name, _ in adopters(run.run.path))
    if holding:
        print(f"kept beside: what {', '.join(holding)} adopted")
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a whole number of at least 1, got {text!r}")
    return int(text)
