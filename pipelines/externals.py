"""A user's own rewards: listed at the top of flows.yaml, their settings checked by their own config class."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from pydantic import BaseModel

from pipelines.load import LoadedFile
from pipelines.mistakes import At, Mistakes, parsed
from schemas.assets import digest_of
from schemas.contracts import ScoreConfig
from schemas.errors import UserError, closest
from schemas.flow import External
from schemas.rewards import ExternalReward


def with_externals(config: ScoreConfig, file: LoadedFile, at: At, found: Mistakes) -> ScoreConfig:
    """`config` whose external rewards have their entry's target and checked settings, defaults filled in."""
    rewards = {
        name: _bound(reward, file, (*at, "rewards", name), found) if isinstance(reward, ExternalReward) else reward
        for name, reward in config.rewards.items()
    }
    return config.model_copy(update={"rewards": rewards})


def _bound(reward: ExternalReward, file: LoadedFile, at: At, found: Mistakes) -> ExternalReward:
    for field in ("target", "code"):
        if getattr(reward, field):
            found.add(f"`{field}` follows from `external` at the top of the file; leave it out here", (*at, field))
    entry = file.spec.external.get(reward.name)
    if entry is None:
        hint = closest(reward.name, file.spec.external)
        found.add(f"no entry {reward.name!r} under `external` at the top of the file. {hint}", (*at, "name"))
        return reward
    code = ""
    try:
        code = code_digest(entry.target, file.python_path)
    except UserError as error:
        found.add(str(error), ("external", reward.name, "target"))
    settings = _settings(reward, entry, file, (*at, "settings"), found)
    return reward.model_copy(update={"target": entry.target, "code": code, "settings": settings})


def _settings(reward: ExternalReward, entry: External, file: LoadedFile, at: At, found: Mistakes) -> dict[str, object]:
    if entry.config is None:
        if reward.settings:
            found.add(f"`external.{reward.name}` names no config class, so the reward takes no settings", at)
        return reward.settings
    try:
        kind = config_class(entry.config, file.python_path)
    except UserError as error:
        found.add(str(error), ("external", reward.name, "config"))
        return reward.settings
    settings, errors = parsed(kind, reward.settings, at, file.raw.error)
    found.extend(errors)
    return settings.model_dump(mode="json") if settings is not None else reward.settings


def code_digest(target: str, python_path: Sequence[str]) -> str:
    """Digest of the source of ``module:function``'s module, found as a worker would find it but never imported."""
    module = target.partition(":")[0]
    places: Sequence[str] | None = [*sys.path, *python_path]
    spec = None
    for place in range(len(names := module.split("."))):
        spec = None if places is None else PathFinder.find_spec(".".join(names[: place + 1]), places)
        places = None if spec is None else spec.submodule_search_locations
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        where = ", ".join(python_path) or "none"
        raise UserError(f"no module {module!r}; its folder must be in `python_path` (now: {where}) or installed")
    source = Path(spec.origin)
    if source.suffix == ".py":
        try:
            compile(source.read_bytes(), str(source), "exec")
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{source} is no Python: {error}") from error
    return digest_of(source)


def config_class(name: str, python_path: Sequence[str]) -> type[BaseModel]:
    """The class ``module:Name``; `python_path` is appended to the end of sys.path, so that it hides nothing."""
    module_name, _, class_name = name.partition(":")
    sys.path += [folder for folder in python_path if folder not in sys.path]
    loaded = "torch" in sys.modules
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        where = ", ".join(python_path) or "none"
        remedy = f"its folder must be in `python_path` (now: {where}) or installed, and it must import without torch"
        raise UserError(f"cannot import {module_name!r} ({type(error).__name__}: {error}); {remedy}") from error
    if "torch" in sys.modules and not loaded:
        raise UserError(
            f"{module_name!r} loads torch, and every `plan` would wait for it; keep settings in a file of their own"
        )
    found = vars(module).get(class_name)
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise UserError(f"{module_name!r} has no pydantic class {class_name!r}; derive one from schemas.strict.Strict")
    if found.model_config.get("extra") != "forbid":
        raise UserError(f"{name!r} takes unknown fields in silence; derive it from schemas.strict.Strict")
    return found
