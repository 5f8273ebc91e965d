"""Reads flows.yaml with every value's place, applies ``--set``, and checks the file's outline.

YAML 1.2 through ruamel.yaml only: `1e-4` is a number, `on` is a text, a key given twice is refused.
"""

import copy
import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from pipelines.mistakes import At, joined, parsed
from schemas.errors import FlowFileError, closest
from schemas.flow import Flow, FlowFile, Loop

SECTIONS: dict[str, At] = {"before": ("stages",), "body": ("loop", "body"), "after": ("after",)}
_CODE = ("external", "python_path", "target")
_DEEPEST = 40


class Place(NamedTuple):
    """Line and column, from 1, of a key and of its value."""

    key: tuple[int, int]
    value: tuple[int, int]


@dataclass(frozen=True)
class RawFile:
    """The tree of flows.yaml as plain values, and where each came from: a place in the file, or a ``--set``."""

    path: Path  # absolute
    shown: str  # as the user wrote it, for messages
    tree: dict[str, Any]
    places: Mapping[At, Place]
    sets: Mapping[At, str] = field(default_factory=dict)

    def error(self, message: str, at: At, *, key: bool = False) -> FlowFileError:
        """An error at a field: at its value, or at its key."""
        for end in range(len(at), 0, -1):
            if at[:end] in self.sets:
                return FlowFileError(message, file=f"--set {self.sets[at[:end]]}", field=dotted(at))
            if at[:end] in self.places:
                place = self.places[at[:end]]
                line, column = place.key if key or end < len(at) else place.value
                return FlowFileError(message, file=self.shown, line=line, column=column, field=dotted(at))
        return FlowFileError(message, file=self.shown, field=dotted(at))


@dataclass(frozen=True)
class LoadedFile:
    """A flow file whose outline is checked. The nodes are checked when a flow is compiled."""

    raw: RawFile
    spec: FlowFile

    @property
    def base(self) -> Path:
        """The folder that relative paths count from."""
        return self.raw.path.parent

    @property
    def python_path(self) -> tuple[str, ...]:
        """Folders of the user's own code, absolute."""
        return tuple(str((self.base / folder).resolve()) for folder in self.spec.python_path)

    def flow(self, name: str) -> Flow:
        """One flow by its name."""
        if name not in self.spec.flows:
            raise FlowFileError(f"no flow {name!r}. {closest(name, self.spec.flows)}", file=self.raw.shown)
        return self.spec.flows[name]


def load(path: Path, flow: str | None = None, sets: Sequence[str] = ()) -> LoadedFile:
    """flows.yaml with the overrides ``PATH=VALUE`` applied to one flow, checked."""
    raw = read(path)
    if sets and flow is not None:
        raw = overridden(raw, flow, sets)
    spec, errors = parsed(FlowFile, raw.tree, (), raw.error)
    if spec is None:
        raise joined(errors)
    return LoadedFile(raw, spec)


def read(path: Path) -> RawFile:
    """The tree of a YAML file, unchecked."""
    if path.is_dir():
        raise FlowFileError("is a folder; name the file in it, such as --file FOLDER/flows.yaml", file=str(path))
    if not path.is_file():
        raise FlowFileError("no such file; run in the folder of your flows.yaml or name it with --file", file=str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FlowFileError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8", file=str(path)) from error
    except OSError as error:
        raise FlowFileError(f"cannot be read: {error.strerror}", file=str(path)) from error
    places: dict[At, Place] = {}
    tree = _plain(_yaml(text, str(path)), (), places, str(path))
    if not isinstance(tree, dict):
        raise FlowFileError("wants a mapping with the key `flows`", file=str(path))
    return RawFile(path.resolve(), str(path), tree, places)


def overridden(raw: RawFile, flow: str, sets: Iterable[str]) -> RawFile:
    """`raw` with each ``PATH=VALUE`` set in one flow; values are YAML, paths count from the flow.

    A path may begin at a node (``sample.per_prompt``) or at a field of the loop (``times``).
    """
    tree, marks = copy.deepcopy(raw.tree), dict(raw.sets)
    flows = tree.get("flows")
    if not isinstance(flows, dict) or not isinstance(flows.get(flow), dict):
        known = flows if isinstance(flows, dict) else ()
        raise FlowFileError(f"no flow {flow!r}. {closest(flow, known)}", file=raw.shown)
    for text in sets:
        name, equals, value_text = text.partition("=")
        if not equals or not name:
            raise FlowFileError("wants PATH=VALUE, such as sample.per_prompt=16", file=f"--set {text}")
        value = _plain(_yaml(value_text, f"--set {text}"), (), {}, f"--set {text}")
        steps = _set_path(tree["flows"][flow], tuple(name.split(".")), text)
        _assign(tree["flows"][flow], steps, value, text)
        marks[("flows", flow, *steps)] = text
    return RawFile(raw.path, raw.shown, tree, raw.places, marks)


def dotted(at: At) -> str:
    """A path as in ``flows.shapes.model``."""
    return ".".join(str(step) for step in at)


def _set_path(flow: dict[str, Any], steps: tuple[str, ...], text: str) -> tuple[str, ...]:
    """The path from the flow that a ``--set`` means."""
    for step in steps:
        if step in _CODE:
            raise FlowFileError(f"{step!r} names code, and code is named only in the file", file=f"--set {text}")
    nodes = {name: section for section in SECTIONS.values() for name in _nodes(flow, section)}
    if steps[0] in nodes:
        return tuple(str(step) for step in (*nodes[steps[0]], *steps))
    full = ("loop", *steps) if steps[0] in Loop.model_fields else steps
    if full[0] not in Flow.model_fields:
        known = [*Flow.model_fields, *Loop.model_fields, *nodes]
        raise FlowFileError(f"no field or node {steps[0]!r}. {closest(steps[0], known)}", file=f"--set {text}")
    for section in SECTIONS.values():
        depth = len(section)
        if full[:depth] == section and len(full) > depth and full[depth] not in _nodes(flow, section):
            hint = closest(full[depth], _nodes(flow, section))
            raise FlowFileError(f"no node {full[depth]!r} in {dotted(section)}. {hint}", file=f"--set {text}")
    return full


def _nodes(flow: dict[str, Any], section: At) -> dict[str, Any]:
    found: Any = flow
    for step in section:
        found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _assign(tree: dict[str, Any], steps: tuple[str, ...], value: object, text: str) -> None:
    for done, step in enumerate(steps[:-1], start=1):
        below = tree.setdefault(step, {})
        if not isinstance(below, dict):
            raise FlowFileError(f"{dotted(steps[:done])} is {below!r} and has no fields", file=f"--set {text}")
        tree = below
    tree[steps[-1]] = value


def _yaml(text: str, file: str) -> object:
    try:
        return YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        problem = (error.problem or "cannot be read").strip().splitlines()[0]
        raise FlowFileError(f"not valid YAML: {problem}", file=file, line=line, column=column) from error
    except RecursionError as error:
        raise FlowFileError(f"is nested more than {_DEEPEST} deep", file=file) from error
    except YAMLError as error:
        raise FlowFileError(f"not valid YAML: {str(error).strip().splitlines()[0]}", file=file) from error


def _plain(node: object, at: At, places: dict[At, Place], file: str) -> Any:
    """Plain dicts, lists and scalars; the place of every key and item goes into `places`."""
    if len(at) > _DEEPEST:
        raise FlowFileError(f"is nested more than {_DEEPEST} deep", file=file, field=dotted(at[:4]) + "...")
    if isinstance(node, CommentedMap):
        _note_keys(node, at, places, file)
        return {str(key): _plain(value, (*at, str(key)), places, file) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        for index, (line, column, *_) in (node.lc.data or {}).items():
            places[(*at, index)] = Place((line + 1, column + 1), (line + 1, column + 1))
        return [_plain(value, (*at, index), places, file) for index, value in enumerate(node)]
    if node is None or isinstance(node, bool):
        return node
    for scalar in (str, int, float):
        if isinstance(node, scalar):
            return scalar(node)
    line, column = places[at].value if at in places else (0, 0)
    kind = "a date" if isinstance(node, datetime.date) else "a tagged value"
    raise FlowFileError(f"{kind} is no value here; put it in quotes", file=file, line=line, column=column)


def _note_keys(node: CommentedMap, at: At, places: dict[At, Place], file: str) -> None:
    marks = node.lc.data or {}
    for key in node:
        line, column, value_line, value_column = marks.get(key, (node.lc.line, node.lc.col) * 2)
        if not isinstance(key, str):
            message = f"the key {key!r} is not a text; put it in quotes"
            raise FlowFileError(message, file=file, line=line + 1, column=column + 1)
        places[(*at, str(key))] = Place((line + 1, column + 1), (value_line + 1, value_column + 1))
