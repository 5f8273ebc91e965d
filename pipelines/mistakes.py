"""From what pydantic finds to messages that name place, field and remedy."""

import json
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schemas.errors import FlowFileError, closest

At = tuple[str | int, ...]
T = TypeVar("T", bound=BaseModel)


class Placed(Protocol):
    """Makes an error at a field of the file."""

    def __call__(self, message: str, at: At, *, key: bool = False) -> FlowFileError:
        """The error, at the field's value or at its key."""
        ...


class Mistakes:
    """Collects mistakes, so that one run shows them all, and warnings, which stop nothing."""

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._errors: list[FlowFileError] = []
        self.warnings: list[str] = []

    def add(self, message: str, at: At, *, key: bool = False) -> None:
        """Notes a mistake at a field; the same message at the same field is noted once."""
        self.extend([self._placed(message, at, key=key)])

    def extend(self, errors: Sequence[FlowFileError]) -> None:
        """Notes mistakes that have a place already."""
        known = {str(error) for error in self._errors}
        self._errors += [error for error in errors if str(error) not in known]

    def stop(self) -> None:
        """Raises what was found so far."""
        if self._errors:
            raise joined(self._errors)


def joined(errors: Sequence[FlowFileError]) -> FlowFileError:
    """One error that has the place of the first and the text of all, a line each."""
    first = errors[0]
    first.args = ("\n".join(str(error) for error in errors),)
    return first


def parsed(model: type[T], data: object, at: At, placed: Placed) -> tuple[T | None, list[FlowFileError]]:
    """`data` as a `model`, or the mistakes in it. Strict: a text is no number and 1 is not true."""
    try:
        # The JSON mode of pydantic is the strict mode that still takes a list for a tuple.
        return model.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        return None, [_translated(detail, model, at, placed) for detail in error.errors()]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation allows, through Annotated, unions and None, but not through containers."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    if get_origin(annotation) is Annotated:
        return models_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [model for member in get_args(annotation) for model in models_in(member)]
    return []


def _item(annotation: Any) -> Any:
    """What a dict, list or tuple holds."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next((item for member in get_args(annotation) if (item := _item(member)) is not None), None)
    if get_origin(annotation) is Annotated:
        return _item(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    return get_args(annotation)[0] if get_origin(annotation) in (list, tuple) else None


def _tag(model: type[BaseModel]) -> str:
    return str(model.model_fields["kind"].default)


def _walk(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[At, type[BaseModel] | None, list[str]]:
    """The path in the file, the model that owns its last field, and the kinds of a union that it leads to.

    pydantic puts the chosen kind of a union into the path; the file has no such key.
    """
    path: list[str | int] = []
    owner: type[BaseModel] | None = None
    here: Any = model
    for step in loc:
        if step == "[key]":
            break
        models = models_in(here)
        if len(models) > 1:
            here = next(member for member in models if _tag(member) == step)
            continue
        path.append(step)
        owner = models[0] if models else None
        field = owner.model_fields.get(str(step)) if owner else None
        here = field.annotation if field else (_item(here) if owner is None else None)
    kinds = [_tag(member) for member in models_in(here)] if len(models_in(here)) > 1 else []
    return tuple(path), owner, kinds


def _translated(detail: ErrorDetails, model: type[BaseModel], at: At, placed: Placed) -> FlowFileError:
    path, owner, kinds = _walk(model, detail["loc"])
    name = str(path[-1]) if path else ""
    full = (*at, *path)
    kind = detail["type"]
    if kind == "extra_forbidden":
        known = list(owner.model_fields) if owner else []
        return placed(f"unknown field {name!r}. {closest(name, known)}", full, key=True)
    if kind == "missing":
        return placed(f"is missing{_meaning(owner, name)}", full, key=True)
    if kind == "union_tag_not_found":
        return placed(f"the field `kind` is missing. Known: {', '.join(sorted(kinds))}.", full)
    if kind == "union_tag_invalid":
        got = str(detail["ctx"]["tag"]) if "ctx" in detail else ""
        return placed(f"unknown kind {got!r}. {closest(got, kinds)}", (*full, "kind"))
    if detail["loc"] and detail["loc"][-1] == "[key]":
        return placed("a name has lower-case letters, digits and _, and begins with a letter", full, key=True)
    return placed(_message(detail, owner, name), full)


def _meaning(owner: type[BaseModel] | None, name: str) -> str:
    field = owner.model_fields.get(name) if owner else None
    return f": {field.description}" if field is not None and field.description else ""


def _message(detail: ErrorDetails, owner: type[BaseModel] | None, name: str) -> str:
    got = detail["input"]
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "too_short" and "ctx" in detail:
        return f"wanted at least {detail['ctx']['min_length']}, got {detail['ctx']['actual_length']}"
    if detail["type"] == "literal_error":
        choices = _choices(owner, name)
        if choices:
            return f"unknown value {got!r}. {closest(str(got), choices)}"
    text = detail["msg"].replace("Input should be ", "wanted ").replace("an object", "a mapping")
    return f"{text}, got {_short(got)}"


def _choices(owner: type[BaseModel] | None, name: str) -> list[str]:
    field = owner.model_fields.get(name) if owner else None
    options = get_args(field.annotation) if field is not None else ()
    if field is not None and get_origin(field.annotation) is Literal:
        return [str(option) for option in options]
    return [str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)]


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
