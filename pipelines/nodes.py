"""Splits a node of flows.yaml into options, config and inputs by its stage's contract, and checks the config."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from pipelines.externals import with_externals
from pipelines.load import SECTIONS, LoadedFile
from pipelines.mistakes import At, Mistakes, parsed
from pipelines.plan import Section
from schemas.assets import Asset, is_hub_id, resolve
from schemas.contracts import CONTRACTS, PromptsConfig, ScoreConfig
from schemas.doors import Contract, StageConfig
from schemas.errors import InputError, closest
from schemas.fingerprint import assets
from schemas.flow import Flow, Loop, NodeOptions
from schemas.imports import ImportSamplesConfig
from schemas.lora_file import lora_file
from schemas.models import ModelConfig

RESERVED = frozenset(("carry", "loop", "model", *Flow.model_fields, *Loop.model_fields))
_PROMPT_FILES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Draft:
    """A node whose config is checked and whose edges are still text."""

    name: str
    section: Section
    at: At
    stage: str
    options: NodeOptions
    config: StageConfig
    inputs: dict[str, Any]

    @property
    def contract(self) -> Contract:
        """The doors of the node's stage."""
        return CONTRACTS[self.stage]


def place_of(flow: str, section: Section, node: str, *fields: str) -> At:
    """Where a node stands in the file."""
    return ("flows", flow, *SECTIONS[section], node, *fields)


def drafts(file: LoadedFile, flow_name: str, found: Mistakes) -> dict[str, Draft]:
    """All nodes of a flow, by name; mistakes go to `found`."""
    flow = file.flow(flow_name)
    out: dict[str, Draft] = {}
    seen: dict[str, At] = {}
    for section, name, raw in _raw_nodes(flow):
        at = place_of(flow_name, section, name)
        if name in RESERVED:
            found.add(f"a node cannot be called {name!r}: that word has a meaning of its own here", at, key=True)
        elif name in seen:
            found.add(f"the name {name!r} is taken by another node; names are unique in a flow", at, key=True)
        elif (draft := _draft(file, flow_name, section, name, raw, found)) is not None:
            out[name] = draft
        seen[name] = at
    return out


def _raw_nodes(flow: Flow) -> Iterator[tuple[Section, str, dict[str, Any]]]:
    body = flow.loop.body if flow.loop else {}
    sections: tuple[tuple[Section, dict[str, dict[str, Any]]], ...] = (
        ("before", flow.stages),
        ("body", body),
        ("after", flow.after),
    )
    for section, nodes in sections:
        for name, raw in nodes.items():
            yield section, name, raw


def _draft(
    file: LoadedFile, flow_name: str, section: Section, name: str, raw: dict[str, Any], found: Mistakes
) -> Draft | None:
    at = place_of(flow_name, section, name)
    placed = file.raw.error
    options, errors = parsed(NodeOptions, {k: v for k, v in raw.items() if k in NodeOptions.model_fields}, at, placed)
    if options is None:
        found.extend(errors)
        return None
    stage = options.stage or name
    if stage not in CONTRACTS:
        remedy = "" if options.stage else " A node whose name is no stage names one, as in `stage: sample`."
        where = (*at, "stage") if options.stage else at
        found.add(f"no stage {stage!r}. {closest(stage, CONTRACTS)}{remedy}", where, key=not options.stage)
        return None
    if options.every is not None and section != "body":
        found.add("only a stage of the loop's body can say `every`", (*at, "every"), key=True)
    contract = CONTRACTS[stage]
    settings, inputs = _split(raw, contract, at, found)
    config = _config(file, flow_name, at, contract, settings, stage, found)
    return None if config is None else Draft(name, section, at, stage, options, config, inputs)


def _split(raw: dict[str, Any], contract: Contract, at: At, found: Mistakes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The node's settings and its edges."""
    settings: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    fields = (*contract.config.model_fields, *contract.inputs.model_fields)
    for key, value in raw.items():
        if key in contract.config.model_fields:
            settings[key] = value
        elif key in contract.inputs.model_fields:
            inputs[key] = value
        elif key not in NodeOptions.model_fields:
            known = (*fields, *NodeOptions.model_fields)
            found.add(f"unknown field {key!r}. {closest(key, known)}", (*at, key), key=True)
    return settings, inputs


def _config(
    file: LoadedFile,
    flow_name: str,
    at: At,
    contract: Contract,
    settings: dict[str, Any],
    stage: str,
    found: Mistakes,
) -> StageConfig | None:
    model_at = (*at, "model")
    if "model" in contract.config.model_fields and settings.get("model") is None:
        flow_model = file.raw.tree["flows"][flow_name].get("model")
        if flow_model is None:
            found.add(f"stage {stage!r} needs a model: give the flow or this node one, as in `model: {{...}}`", at)
            return None
        settings = {**settings, "model": flow_model}
        model_at = ("flows", flow_name, "model")
    config, errors = parsed(contract.config, settings, at, file.raw.error)
    if config is None:
        found.extend(errors)
        return None
    if isinstance(config, ScoreConfig):
        config = with_externals(config, file, at, found)
    return _with_assets(config, file.base, at, model_at, found)


def _with_assets(config: StageConfig, base: Path, at: At, model_at: At, found: Mistakes) -> StageConfig | None:
    """`config` with absolute paths, each of which leads to what it should."""
    try:
        out = resolved(config, base)
    except InputError as error:
        found.add(str(error), at)
        return None
    given = dict(assets(config))
    for field, path in assets(out):
        steps = tuple(field.split("."))
        here = (*model_at, *steps[1:]) if steps[0] == "model" else (*at, *steps)
        check = _lora_problem(out) if field.endswith("lora.start") else _problem(config)
        message = check(given[field], path, base)
        if message:
            found.add(message, here)
    if isinstance(out, PromptsConfig):
        _check_choice(out, at, found)
    return out


def _check_choice(config: PromptsConfig, at: At, found: Mistakes) -> None:
    """Of a text file the prompts are counted now; of a dataset the stage counts them."""
    path = Path(config.path)
    if config.choose is None or not path.is_file() or path.suffix not in _PROMPT_FILES:
        return
    with path.open("rb") as stream:
        there = sum(1 for line in stream if line.strip())
    if config.choose > there:
        found.add(f"wanted at most {there}, the prompts of {path}, got {config.choose}", (*at, "choose"))


def resolved(model: M, base: Path) -> M:
    """`model` with every asset's path made absolute; hub ids stay as they are."""
    changes: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        new = value
        if isinstance(value, str) and any(isinstance(mark, Asset) for mark in field.metadata):
            new = resolve(value, base)
        elif isinstance(value, BaseModel):
            new = resolved(value, base)
        elif isinstance(value, dict):
            new = {k: resolved(v, base) if isinstance(v, BaseModel) else v for k, v in value.items()}
        if new != value:  # an unchanged default stays one that the file did not set
            changes[name] = new
    return model.model_copy(update=changes)


def _problem(config: StageConfig) -> Callable[[str, str, Path], str | None]:
    match config:
        case PromptsConfig():
            return _prompts_problem
        case ImportSamplesConfig():
            return _pictures_problem
        case _:
            return _model_problem


def _missing(given: str, path: str, base: Path, what: str) -> str | None:
    """What to say when `path` does not exist; a hub id is looked up later, by the stage."""
    if Path(path).exists():
        return None
    # 'prompts/train.txt' has the form of a hub id; a folder 'prompts' here, or a file's suffix, says it is none.
    if is_hub_id(path) and not given.endswith(_PROMPT_FILES) and not (base / given.split("/")[0]).is_dir():
        return None
    where = base / path if is_hub_id(path) else path
    return f"no {what} at {where}; relative paths count from the folder of the flow file ({base})"


def _prompts_problem(given: str, path: str, base: Path) -> str | None:
    missing = _missing(given, path, base, "prompt file")
    if missing or not Path(path).is_file():
        return missing
    with Path(path).open("rb") as stream:
        if not any(line.strip() for line in stream):
            return f"the prompt file {path} is empty; write one prompt a line"
    return None


def _pictures_problem(given: str, path: str, base: Path) -> str | None:
    missing = _missing(given, path, base, "folder of pictures")
    if missing is None and Path(path).is_file():
        return f"{path} is a file; name the folder that holds the pictures"
    return missing


def _lora_problem(config: StageConfig) -> Callable[[str, str, Path], str | None]:
    """Of the LoRA that a config starts from: it must be there, and be what the config says."""
    model: ModelConfig = dict(config)["model"]

    def problem(given: str, path: str, base: Path) -> str | None:
        missing = _missing(given, path, base, "LoRA")
        if missing or model.lora is None or not Path(path).exists():
            return missing
        try:
            lora_file(Path(path)).check(model.lora, model.lora_targets)
        except InputError as error:
            return str(error)
        return None

    return problem


def _model_problem(given: str, path: str, base: Path) -> str | None:
    missing = _missing(given, path, base, "model folder")
    folder = Path(path)
    if missing or not folder.exists():
        return missing
    remedy = "name a whole diffusers pipeline folder, such as one that save_pretrained wrote"
    if not (folder / "model_index.json").is_file():
        return f"{path} is no pipeline folder: it lacks model_index.json; {remedy}"
    if not (folder / "transformer" / "config.json").is_file():
        return f"the model folder {path} lacks the transformer (transformer/config.json); {remedy}"
    if not any(file.suffix in (".safetensors", ".bin") for file in (folder / "transformer").iterdir()):
        return f"the model folder {path} lacks the transformer's weights (transformer/*.safetensors); {remedy}"
    return None
