"""A policy on disk: whole tensors, one safetensors file a set, loadable at any world size. Nothing is pickled.

An unfinished update keeps the same beside it as ``policy.at-N`` after N optimizer steps, to go on from there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from schemas.artifacts import PolicyRef
from schemas.errors import InputError
from schemas.losses import WeightSet
from schemas.models import ModelConfig
from stages.engine.mesh import barrier, from_first
from stages.engine.optim import MOMENTS, Optimizer
from stages.engine.weights import Shards, Weights
from stages.store import files, tensors

_FACTS, _NOTE = "policy.json", "progress.json"
ORDER: tuple[WeightSet, ...] = ("raw", "old", "ema")


class Halfway(NamedTuple):
    """An update that was stopped: its policy after `steps` optimizer steps, and what it had noted."""

    policy: PolicyRef
    steps: int
    note: dict[str, Any]


def save(directory: Path, name: str, weights: Weights, optimizer: Optimizer, config: ModelConfig) -> PolicyRef:
    """Writes raw, the sets there are, and the optimizer's state into `directory`/`name`. A collective."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    sets: tuple[WeightSet, ...] = tuple(s for s in ORDER if s == "raw" or s in weights.sets)
    trainable = "full" if config.lora is None else "lora"
    parts = {}
    for kept in sets:
        parts[kept] = _write(
            folder / f"{kept}.safetensors", weights.full(weights.raw() if kept == "raw" else weights.sets[kept])
        )
    state = optimizer.state()
    moments = {f"{kind}.{key}": value for kind in state for key, value in weights.full(state[kind]).items()}
    parts["optimizer"] = _write(folder / "optimizer.safetensors", moments)
    facts = {"trainable": trainable, "sets": list(sets), "updates": optimizer.updates, **_form(config)}
    digest = hashlib.sha256(json.dumps([facts, parts], sort_keys=True).encode()).hexdigest()
    if dist.get_rank() == 0:
        with files.written(folder / _FACTS) as temporary:
            temporary.write_text(json.dumps({**facts, "digests": parts}, indent=1))
    barrier()
    return PolicyRef(path=name, digest=from_first(digest), trainable=trainable, sets=sets, updates=optimizer.updates)


def save_halfway(
    directory: Path, steps: int, note: Mapping[str, Any], weights: Weights, optimizer: Optimizer, config: ModelConfig
) -> None:
    """Keeps an unfinished update after `steps` optimizer steps; it replaces the one before. A collective."""
    draft = directory / "policy.draft"
    policy = save(directory, draft.name, weights, optimizer, config)
    if dist.get_rank() == 0:
        told = {"policy": policy.model_dump(mode="json"), "note": note}
        (draft / _NOTE).write_text(json.dumps(told))
        older = _halfway(directory)
        os.replace(draft, directory / f"policy.at-{steps}")
        for folder in older.values():
            shutil.rmtree(folder)
    barrier()


def halfway(directory: Path) -> Halfway | None:
    """The newest checkpoint of an unfinished update, if it left one."""
    found = _halfway(directory)
    if not found:
        return None
    steps = max(found)
    told = json.loads((found[steps] / _NOTE).read_text())
    policy = PolicyRef.model_validate({**told["policy"], "path": str(found[steps])})
    return Halfway(policy, steps, told["note"])


def drop_halfway(directory: Path) -> None:
    """The update is finished: what it kept on the way goes. A collective."""
    if dist.get_rank() == 0:
        for folder in [*_halfway(directory).values(), directory / "policy.draft"]:
            shutil.rmtree(folder, ignore_errors=True)
    barrier()


def check(policy: PolicyRef, config: ModelConfig) -> None:
    """InputError if the policy was trained in another form: its tensors might fit and yet mean something else."""
    facts = _facts(policy)
    for name, wanted in _form(config).items():
        if facts.get(name) != wanted:
            raise InputError(
                f"the policy {policy.path} was trained with `{name}` {facts.get(name)}, but the model says {wanted}; "
                "use the model it was trained with"
            )


def load(policy: PolicyRef, part: str) -> dict[str, Tensor]:
    """The whole tensors of `raw`, `old`, `ema` or `optimizer`; InputError when they are not those that were saved."""
    path = Path(policy.path) / f"{part}.safetensors"
    whole, saved = tensors.load(path), _facts(policy).get("digests", {}).get(part, "")
    got = tensors.digest(whole)
    if got != saved:
        raise InputError(
            f"{path}: wanted content of digest {saved[:12] or '(none noted)'}, got {got[:12]}. {_again(policy)}"
        )
    return whole


def load_set(policy: PolicyRef, name: WeightSet, weights: Weights) -> Shards:
    """This rank's part of one set; InputError names the policy when it belongs to another model."""
    whole = load(policy, name)
    try:
        return weights.cut(whole)
    except ValueError as error:
        raise InputError(
            f"the policy {policy.path} does not fit the model: {error}; use the `model` it was trained with"
        ) from error


def load_moments(policy: PolicyRef, weights: Weights) -> dict[str, Shards]:
    """This rank's part of the optimizer's moments."""
    whole = load(policy, "optimizer")
    out: dict[str, Shards] = {}
    for kind in MOMENTS:
        prefix = f"{kind}."
        out[kind] = weights.cut({k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)})
    return out


def _halfway(directory: Path) -> dict[int, Path]:
    """Checkpoints by their number of optimizer steps; each came to its name whole."""
    return {int(folder.name.rpartition("-")[2]): folder for folder in directory.glob("policy.at-*")}


def _facts(policy: PolicyRef) -> dict[str, Any]:
    path = Path(policy.path) / _FACTS
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}. {_again(policy)}") from error
    if not isinstance(facts, dict):
        raise InputError(f"{path} holds no facts about a policy. {_again(policy)}")
    return facts


def _again(policy: PolicyRef) -> str:
    return f"Delete the stage's directory {Path(policy.path).parent} and run again."


def _form(config: ModelConfig) -> dict[str, object]:
    """What gives the tensors their meaning."""
    return {"kind": config.kind, "lora": None if config.lora is None else config.lora.form}


def _write(path: Path, whole: dict[str, Tensor]) -> str:
    return tensors.save(path, whole) if dist.get_rank() == 0 else ""
