"""A policy on disk: whole tensors, one safetensors file a set, loadable at any world size. Nothing is pickled."""

import hashlib
import json
from pathlib import Path

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

_FACTS = "policy.json"
ORDER: tuple[WeightSet, ...] = ("raw", "old", "ema")


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
            temporary.write_text(json.dumps(facts, indent=1))
    barrier()
    return PolicyRef(path=name, digest=from_first(digest), trainable=trainable, sets=sets, updates=optimizer.updates)


def check(policy: PolicyRef, config: ModelConfig) -> None:
    """InputError if the policy was trained in another form: its tensors might fit and yet mean something else."""
    path = Path(policy.path) / _FACTS
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}; run the update stage that made it again") from error
    for name, wanted in _form(config).items():
        if facts.get(name) != wanted:
            raise InputError(
                f"the policy {policy.path} was trained with `{name}` {facts.get(name)}, but the model says {wanted}; "
                "use the model it was trained with"
            )


def load_set(policy: PolicyRef, name: WeightSet, weights: Weights) -> Shards:
    """This rank's part of one set; InputError names the policy when it belongs to another model."""
    whole = tensors.load(Path(policy.path) / f"{name}.safetensors")
    try:
        return weights.cut(whole)
    except ValueError as error:
        raise InputError(
            f"the policy {policy.path} does not fit the model: {error}; use the `model` it was trained with"
        ) from error


def load_moments(policy: PolicyRef, weights: Weights) -> dict[str, Shards]:
    """This rank's part of the optimizer's moments."""
    whole = tensors.load(Path(policy.path) / "optimizer.safetensors")
    out: dict[str, Shards] = {}
    for kind in MOMENTS:
        prefix = f"{kind}."
        out[kind] = weights.cut({k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)})
    return out


def _form(config: ModelConfig) -> dict[str, object]:
    """What gives the tensors their meaning."""
    return {"kind": config.kind, "lora": None if config.lora is None else config.lora.model_dump(mode="json")}


def _write(path: Path, whole: dict[str, Tensor]) -> str:
    return tensors.save(path, whole) if dist.get_rank() == 0 else ""
