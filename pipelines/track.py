"""The command `track`: mirrors a run directory to trackers afterwards."""

import argparse
from collections.abc import Mapping

from pydantic import TypeAdapter

from pipelines.lock import locked
from pipelines.plan import PlanNode
from pipelines.rundir import Address
from pipelines.saved import Saved, saved
from pipelines.trackers.kinds import OPENERS, check_installed
from pipelines.trackers.mirror import Mirror
from pipelines.unroll import Unrolled
from schemas.errors import UserError
from schemas.trackers import TrackerConfig

_ABOUT = """\
Mirrors a run to the trackers of its flow, or to one kind of tracker: what trackers.json in the run directory does not
say they have got. The same command again sends nothing twice.
"""


def track_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`track`."""
    parser = commands.add_parser("track", help="mirror a run to experiment trackers", description=_ABOUT)
    parser.add_argument("base", metavar="RUN", help="the run's name")
    parser.add_argument(
        "--to",
        choices=sorted(OPENERS),
        metavar="KIND",
        help=f"only trackers of this kind: {', '.join(sorted(OPENERS))}",
    )
    parser.set_defaults(command=_track)
    return parser


def _track(arguments: argparse.Namespace) -> int:
    run = saved(arguments.runs, arguments.base)
    plan = run.planned(arguments.file, arguments.set)
    trackers = _chosen(plan.trackers, arguments.to)
    check_installed(trackers)
    with locked(run.run.path, print, patience=0):
        mirror = Mirror(plan, run.run.path, trackers, print)
        iterations = _mirrored(mirror, Unrolled(plan, run.run, run.ended), run)
        failed = mirror.close(None)
    if not failed:
        print(f"{', '.join(trackers)}: has {iterations} of {plan.times} iterations of {run.run.path}")
    return 1 if failed else 0


def _chosen(trackers: Mapping[str, TrackerConfig], kind: str | None) -> dict[str, TrackerConfig]:
    """The flow's trackers, or those of one kind; the kind's default when the flow has none of it."""
    if kind is None and not trackers:
        raise UserError("the flow has no trackers; name a kind with --to, or --set 'trackers.tb={kind: tensorboard}'")
    chosen = {name: config for name, config in trackers.items() if kind in (None, config.kind)}
    return chosen or {f"{kind}": TypeAdapter(TrackerConfig).validate_python({"kind": kind})}


def _mirrored(mirror: Mirror, world: Unrolled, run: Saved) -> int:
    """Hands over what is there in whole; gives the number of iterations."""
    only = bool(run.run.base.get("only"))  # a re-run of one stage: the other stages have no records

    def whole(nodes: list[PlanNode], iteration: int | None) -> bool:
        return only or all(Address(node.section, node.name, iteration) in run.records for node in nodes)

    before, after = world.plan.section("before"), world.plan.section("after")
    if not whole(before, None):
        return 0
    mirror.add(world, before, None, ())
    for iteration in range(run.ended):
        if not whole(world.body(iteration), iteration):
            return iteration
        mirror.add(world, world.body(iteration), iteration, ())
    if whole(after, None):
        mirror.add(world, after, None, ())
    return run.ended
