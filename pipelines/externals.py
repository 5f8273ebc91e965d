"""A user's own rewards: listed at the top of flows.yaml, their settings checked by their own config class."""

import importlib
import sys
from collections.abc import Sequence

from pydantic import BaseModel

from pipelines.load import LoadedFile
from pipelines.mistakes import At, Mistakes, parsed
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
    if reward.target:
        found.add("`target` is named in `external` at the top of the file only; leave it out here", (*at, "target"))
    entry = file.spec.external.get(reward.name)
    if entry is None:
        hint = closest(reward.name, file.spec.external)
        found.add(f"no entry {reward.name!r} under `external` at the top of the file. {hint}", (*at, "name"))
        return reward
    return reward.model_copy(
        update={"target": entry.target, "settings": _settings(reward, entry, file, (*at, "settings"), found)}
    )


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
