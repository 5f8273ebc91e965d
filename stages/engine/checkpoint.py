"""A policy on disk, in safetensors files that load at any world size. Nothing is pickled.

A LoRA is small: whole tensors, one file a set, written by rank 0. Full weights go through torch's distributed
checkpoint: each rank writes and reads its own part. An unfinished update keeps the same beside it as ``policy.at-N``
after N optimizer steps, to go on from there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor

from schemas.artifacts import PolicyRef
from schemas.errors import InputError
from schemas.losses import WeightSet
from schemas.models import ModelConfig
from stages.engine import sharded
from stages.engine.mesh import barrier, beside, first_of, texts
from stages.engine.optim import MOMENTS, Optimizer
from stages.engine.weights import Shards, Weights
from stages.store import files, tensors

_FACTS, _NOTE, _DRAFT = "policy.json", "progress.json", "policy.draft"
ORDER: tuple[WeightSet, ...] = ("raw", "old", "ema")


class Halfway(NamedTuple):
    """An update that was stopped: its policy after `steps` optimizer steps, and what it had noted."""

    policy: PolicyRef
    steps: int
    note: dict[str, Any]


class Snapshot(NamedTuple):
    """A policy to be written: its parts (`raw`, `old`, `ema`, `optimizer`) and the facts that go with them.

    Parts are whole tensors for a LoRA, this rank's pieces for full weights; `copied`, they stay as they are during
    training.
    """

    parts: dict[str, dict[str, Tensor]] | dict[str, dict[str, sharded.Piece]]
    facts: dict[str, Any]

    @classmethod
    def of(cls, weights: Weights, optimizer: Optimizer, config: ModelConfig, copied: bool) -> "Snapshot":
        """Of what memory holds. A collective for a LoRA."""
        sets: tuple[WeightSet, ...] = tuple(s for s in ORDER if s == "raw" or s in weights.sets)
        shards: dict[str, Shards] = {name: weights.raw() if name == "raw" else weights.sets[name] for name in sets}
        facts = {"sets": list(sets), "updates": optimizer.updates, **_form(config)}
        kinds = optimizer.state()
        if config.lora is not None:
            parts: dict[str, dict[str, Tensor]] = {name: weights.full(one) for name, one in shards.items()}
            state = {f"{kind}.{key}": value for kind in kinds for key, value in weights.full(kinds[kind]).items()}
            return cls({**parts, "optimizer": state}, {"trainable": "lora", **facts})
        places = sharded.places(weights.parameters)
        mine = {name: sharded.pieces(one, places, copied) for name, one in shards.items()}
        state = {
            f"{kind}.{key}": piece
            for kind, moments in kinds.items()
            for key, piece in sharded.pieces(moments, places, copied).items()
        }
        return cls({**mine, "optimizer": state}, {"trainable": "full", **facts})

    def write(self, folder: Path) -> PolicyRef:
        """Writes the policy into an emptied folder. A collective of the group beside."""
        group = beside()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # a stopped write of more ranks would be read with this one
            folder.mkdir(parents=True)
        dist.barrier(group)
        mine = (sharded.write if self.facts["trainable"] == "full" else _write_whole)(folder, cast(Any, self.parts))
        digests = {f"{rank:05d}": json.loads(one) for rank, one in enumerate(texts(json.dumps(mine), group), 1)}
        if self.facts["trainable"] == "lora":
            digests = digests["00001"]
        digest = hashlib.sha256(json.dumps([self.facts, digests], sort_keys=True).encode()).hexdigest()
        if dist.get_rank() == 0:
            with files.written(folder / _FACTS) as temporary:
                temporary.write_text(json.dumps({**self.facts, "digests": digests}, indent=1))
        dist.barrier(group)
        known = {key: self.facts[key] for key in ("trainable", "sets", "updates")}
        return PolicyRef.model_validate({"path": folder.name, "digest": digest, **known})


def save(directory: Path, name: str, weights: Weights, optimizer: Optimizer, config: ModelConfig) -> PolicyRef:
    """Writes raw, the sets there are, and the optimizer's state into `directory`/`name`. A collective."""
    return Snapshot.of(weights, optimizer, config, copied=False).write(directory / name)


def keep_halfway(directory: Path, steps: int, note: Mapping[str, Any], snapshot: Snapshot) -> None:
    """Keeps an unfinished update after `steps` optimizer steps in place of the one before. A collective."""
    draft = directory / _DRAFT
    policy = snapshot.write(draft)
    if dist.get_rank() == 0:
        told = {"policy": policy.model_dump(mode="json"), "note": note}
        with files.written(draft / _NOTE) as temporary:
            temporary.write_text(json.dumps(told))
        older = _halfway(directory)
        os.replace(draft, directory / f"policy.at-{steps}")
        files.fsync(directory)
        for folder in older.values():
            shutil.rmtree(folder)
    dist.barrier(beside())


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
        for folder in [*_halfway(directory).values(), directory / _DRAFT]:
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
    if sharded.is_here(Path(policy.path)):
        _verified(policy, part, 0, 1)
        return sharded.whole(Path(policy.path), part)
    whole, saved = tensors.load(path), _facts(policy).get("digests", {}).get(part, "")
    _same(path, tensors.digest(whole), saved, policy)
    return whole


def load_set(policy: PolicyRef, name: WeightSet, weights: Weights) -> Shards:
    """This rank's part of one set; InputError names the policy when it belongs to another model. A collective."""
    return _cut(policy, name, ("",), weights)[""]


def load_moments(policy: PolicyRef, weights: Weights) -> dict[str, Shards]:
    """This rank's part of the optimizer's moments. A collective."""
    return _cut(policy, "optimizer", MOMENTS, weights)


def _cut(policy: PolicyRef, part: str, kinds: Sequence[str], weights: Weights) -> dict[str, Shards]:
    """By kind: tensors of a part whose names begin with it."""
    folder, prefixes = Path(policy.path), {kind: f"{kind}." if kind else "" for kind in kinds}
    try:
        if sharded.is_here(folder):
            problem = first_of(_problem(policy, part))
            if problem:
                raise InputError(problem)
            return {k: sharded.cut(folder, f"{part}.{prefix}", weights.parameters) for k, prefix in prefixes.items()}
        whole, out = load(policy, part), {}
        for kind, prefix in prefixes.items():
            out[kind] = weights.cut({k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)})
        return out
    except ValueError as error:
        raise InputError(
            f"the policy {policy.path} does not fit the model: {error}; use the `model` it was trained with"
        ) from error


def _problem(policy: PolicyRef, part: str) -> str:
    """What is wrong with this rank's share of the files, so that all ranks can stop together."""
    try:
        _verified(policy, part, dist.get_rank(), dist.get_world_size())
    except InputError as error:
        return str(error)
    return ""


def _verified(policy: PolicyRef, part: str, rank: int, world_size: int) -> None:
    """Compares every `world_size`-th file with its digest."""
    noted = _facts(policy).get("digests", {})
    for name in sorted(noted)[rank::world_size]:
        saved = noted[name].get(part, "") if isinstance(noted[name], dict) else ""
        path = sharded.file(Path(policy.path), name)
        if saved:
            _same(path, sharded.digest(path, part), saved, policy)


def _same(path: Path, got: str, saved: str, policy: PolicyRef) -> None:
    if got != saved:
        raise InputError(
            f"{path}: wanted content of digest {saved[:12] or '(none noted)'}, got {got[:12]}. {_again(policy)}"
        )


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


def _write_whole(folder: Path, parts: Mapping[str, dict[str, Tensor]]) -> dict[str, str]:
    if dist.get_rank():
        return {}
    return {name: tensors.save(folder / f"{name}.safetensors", part) for name, part in parts.items()}
