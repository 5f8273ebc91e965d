"""The policies that a run has saved, by the words a user has for them."""

from collections.abc import Mapping
from typing import Any

from pipelines.rundir import Address, RunDirectory, located
from pipelines.saved import Saved
from pipelines.show import best_of
from schemas.artifacts import PolicyRef
from schemas.errors import InputError, UserError

Chosen = tuple[str, dict[str, Any] | None]  # a name for people and folders; the pointer, none for the base


def policy_of(run: Saved, wanted: str | None) -> Chosen:
    """`best`, `last`, `base` or the iteration that made it; without a word the best, or the last of none is best.

    UserError when there is none, or when it was pruned; InputError when what a re-run adopted is gone.
    """
    found = ((a.iteration, a) for a, record in run.records.items() if "policy" in record.outputs)
    made = {iteration: address for iteration, address in found if iteration is not None}
    _refuse_lost(run)
    best = best_of(run)
    if wanted is None:
        wanted = "best" if best else "last"
    if wanted == "base":
        return "base", None
    if wanted == "best":
        if best is None:
            message = "the run has no evaluation that a guard or loop.best names; give an iteration"
            raise UserError(f"--policy best: {message}")
        return _evaluated(run, Address("body", best["metric"].partition(".")[0], best["iteration"]))
    if wanted == "last":
        if not made:
            raise UserError(f"--policy last: the run {run.run.path} has made none yet; `--policy base` is the model")
        return _there(run, made[max(made)])
    if not wanted.isdigit() or int(wanted) not in made:
        known = f"0 to {max(made)}" if made else "none yet"
        raise UserError(f"--policy {wanted}: wants best, last, base or the iteration that made it ({known})")
    return _there(run, made[int(wanted)])


def newest_input(run: Saved, node: str, name: str) -> dict[str, Any] | None:
    """What the newest run of a node got as an input."""
    sources = [r.sources[name] for a, r in run.records.items() if a.node == node and r.sources.get(name)]
    if not sources:
        return None
    path, _, output = str(sources[-1]).rpartition(".")
    address = next(a for a in run.records if a.path == path)
    place = run.run.place(address)
    return located(getattr(run.outputs(address), output), place.resolve())


def _refuse_lost(run: Saved) -> None:
    """Without what it adopted, a re-run's best and last would be others, in silence."""
    lost = next((text for path, text in run.damaged.items() if path in run.run.adopted), None)
    if lost is not None:
        raise InputError(lost)


def _evaluated(run: Saved, address: Address) -> Chosen:
    """The policy whose pictures a stage scored. What was adopted speaks of the run that it was adopted from."""
    if address.path in run.run.adopted:
        return _of_another(*_evaluated(owner := _owner(run, address), address), owner)
    sample = _source(run, address, "samples")
    if sample is None:
        raise UserError(f"{run.run.path.name}/{address.path}: its pictures have no record; give an iteration")
    adopted = sample.path in run.run.adopted
    owner = _owner(run, sample) if adopted else run
    policy = _source(owner, sample, "policy")
    if policy is None:
        return "base", None
    return _of_another(*_there(owner, policy), owner) if adopted else _there(run, policy)


def _of_another(label: str, policy: dict[str, Any] | None, owner: Saved) -> Chosen:
    """Under a name that tells it from this run's own."""
    return (label if policy is None else f"{owner.run.path.name}-{label}"), policy


def _owner(run: Saved, address: Address) -> Saved:
    """The run that made what this one adopted."""
    return Saved(RunDirectory.open(run.run.adopted[address.path].path.parent.parent))


def _source(run: Saved, address: Address, name: str) -> Address | None:
    """The stage run that an input came from; none for the base model."""
    sources: Mapping[str, Any] = run.records[address].sources
    path = str(sources.get(name, "")).rpartition(".")[0]
    return next((found for found in run.records if found.path == path), None)


def _there(run: Saved, address: Address) -> Chosen:
    """The policy that a stage run made; UserError when it was pruned."""
    place = run.run.place(address)
    policy = next(value for _, value in run.outputs(address) if isinstance(value, PolicyRef))
    if not (place / policy.path).exists():
        made = [a for a, r in run.records.items() if "policy" in r.outputs]
        kept = [a.folder for a in made if (run.run.place(a) / "policy").exists()]
        where = f"{run.run.path.name}/{address.path}"
        raise UserError(f"the policy of {where} was pruned; there are {', '.join(kept) or 'none'}")
    return address.folder, located(policy, place.resolve())
