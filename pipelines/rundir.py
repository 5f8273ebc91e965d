"""The run directory: the only truth about a run.

    runs/RUN/run.json                    flow, seed, plan, digests of model folders and prompt files; in a re-run also
                                         `base`: the run it began from and the stage runs it adopted
    runs/RUN/{before,0000,0001,...,after}/NODE/   request.json, outputs, record.json
    runs/RUN/logs/                       what workers printed

A stage's directory is complete or not there: a stage works in ``NODE.partial``, which becomes ``NODE`` by one rename.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from pipelines.plan import Section
from schemas.artifacts import Ref, refs
from schemas.doors import Contract, StageOutputs
from schemas.errors import InputError, RunError
from schemas.record import StageRecord, StageRequest

RECORD, REQUEST, CUT = "record.json", "request.json", "cut.json"


@dataclass(frozen=True)
class Address:
    """Where a stage run lies in the run directory: `0003/sample`, `before/encode`."""

    section: Section
    node: str
    iteration: int | None = None

    @property
    def folder(self) -> str:
        """Name of the folder above the node's."""
        return self.section if self.iteration is None else f"{self.iteration:04d}"

    @property
    def path(self) -> str:
        """Relative to the run directory."""
        return f"{self.folder}/{self.node}"

    @property
    def label(self) -> str:
        """For people: `sample[3]`, `encode`."""
        return self.node if self.iteration is None else f"{self.node}[{self.iteration}]"


@dataclass(frozen=True)
class StageDirectory:
    """One stage run on disk."""

    path: Path

    @property
    def partial(self) -> Path:
        """Where the stage works until it is committed."""
        return self.path.with_name(self.path.name + ".partial")

    def record(self) -> StageRecord | None:
        """The committed record, or none."""
        file = self.path / RECORD
        if not file.is_file():
            return None
        try:
            return StageRecord.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise InputError(
                f"the record {file} cannot be read ({error.error_count()} errors, first at "
                f"{'.'.join(map(str, error.errors()[0]['loc'])) or 'the top'}); "
                f"move {self.path} away and run again to make the stage anew"
            ) from error

    def move_aside(self) -> Path | None:
        """Renames a committed result to ``NODE.stale-N``; gives its new place."""
        return _moved_aside(self.path, self.path)

    def open_partial(self, cut: Mapping[str, Any]) -> Path:
        """The working folder. Shards left by a stopped run are kept when they were cut from the same `cut`."""
        text = json.dumps(cut, sort_keys=True)
        mark = self.partial / CUT
        if self.partial.exists() and not (mark.is_file() and mark.read_text() == text):
            if {entry.name for entry in self.partial.iterdir()} <= {CUT}:  # killed before it had begun
                shutil.rmtree(self.partial)
            else:
                _moved_aside(self.partial, self.path)
        if not self.partial.exists():
            self.partial.mkdir(parents=True)
            mark.write_text(text)
        return self.partial

    def commit(self, record: StageRecord, contract: Contract) -> None:
        """Checks the outputs, writes the record last, and makes the working folder the stage's by one rename."""
        if record.status == "done":
            _checked(record, contract, self.partial)
        (self.partial / RECORD).write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
        _sync_tree(self.partial)
        if self.path.exists():  # a folder without a record is no result
            _moved_aside(self.path, self.path)
        os.replace(self.partial, self.path)
        _sync(self.path.parent)


class Adopted(NamedTuple):
    """A stage run of another run that counts as one of this: where it lies, and the SHA-256 of its record."""

    path: Path
    digest: str


@dataclass(frozen=True)
class RunDirectory:
    """One run."""

    path: Path
    base: Mapping[str, Any] = field(default_factory=dict)  # of a re-run: where it began, and what it adopted

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """With what it has adopted, by its run.json."""
        return cls(path, cls(path).read().get("base") or {})

    @cached_property
    def adopted(self) -> Mapping[str, Adopted]:
        """By address."""
        return {
            address: Adopted(self.path / owner / address, digest)
            for owner, records in self.base.get("adopted", {}).items()
            for address, digest in records.items()
        }

    def place(self, address: Address) -> Path:
        """Where a stage run lies, here or in the run it was adopted from."""
        adopted = self.adopted.get(address.path)
        return self.path / address.path if adopted is None else adopted.path

    def stage(self, address: Address) -> StageDirectory:
        """The directory of a stage run."""
        return StageDirectory(self.place(address))

    def verify(self, address: Address) -> None:
        """InputError when an adopted record is gone or is no longer the one that was adopted."""
        path, digest = self.adopted[address.path]
        record = path / RECORD
        if not record.is_file():
            raise InputError(
                f"{address.label} was adopted from {path}, which is gone; bring that run back to its place"
            )
        if file_digest(record) != digest:
            message = f"{address.label} was adopted from {path}, and its record is no longer the same"
            raise InputError(f"{message}; start the re-run anew under another name")

    def iteration(self, iteration: int) -> Path:
        """The folder of an iteration."""
        return self.path / f"{iteration:04d}"

    @property
    def logs(self) -> Path:
        """Where workers' output goes."""
        return self.path / "logs"

    def read(self) -> dict[str, Any]:
        """run.json, or nothing when the run is new."""
        file = self.path / "run.json"
        if not file.is_file():
            return {}
        try:
            return _shaped(json.loads(file.read_bytes()))
        except ValueError as error:
            raise InputError(
                f"{file} cannot be read ({error}); move it away and run again to have it rebuilt"
            ) from error

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replaces run.json."""
        write_text(self.path / "run.json", json.dumps(facts, indent=2) + "\n")


def _shaped(facts: Any) -> dict[str, Any]:
    """run.json, when its parts are what they should be; else ValueError."""
    if not isinstance(facts, dict):
        raise ValueError("it is no JSON object")
    if not isinstance(facts.get("flow"), str):
        raise ValueError("it names no flow")
    plan = facts.get("plan")
    parts = {name: facts.get(name) for name in ("plan", "assets", "base")}
    parts["plan.nodes"] = plan.get("nodes") if isinstance(plan, dict) else None
    wrong = next((name for name, part in parts.items() if part is not None and not isinstance(part, dict)), None)
    if wrong is not None:
        raise ValueError(f"its {wrong!r} is no JSON object")
    return facts


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def bytes_in(folder: Path) -> int:
    """What a folder takes on disk."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def located(value: Any, directory: Path) -> Any:
    """Outputs with every Ref's path made absolute; the JSON that a request carries."""
    if isinstance(value, Ref):
        return value.under(directory).model_dump(mode="json")
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: located(item, directory) for key, item in value.items()}
    return value


def outputs_of(record: StageRecord, contract: Contract, directory: Path) -> StageOutputs:
    """The typed outputs of a record."""
    try:
        return contract.outputs.model_validate(record.outputs)
    except ValidationError as error:
        message = f"the outputs recorded in {directory / RECORD} do not fit stage {record.stage!r}: {_first(error)}"
        raise InputError(f"{message}; move {directory} away and run again to make the stage anew") from error


def write_request(directory: Path, request: StageRequest) -> None:
    """Leaves the order beside the outputs: ``python -m stages request.json`` runs it alone."""
    (directory / REQUEST).write_text(request.model_dump_json(indent=2) + "\n", encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Replaces a file so that a reader sees the old one or the new one, also after a power cut."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)
    _sync(path.parent)


def _checked(record: StageRecord, contract: Contract, directory: Path) -> None:
    try:
        outputs = contract.outputs.model_validate(record.outputs)
    except ValidationError as error:
        raise RunError(f"stage {record.stage!r} gave outputs that do not fit its contract: {_first(error)}") from error
    for ref in refs(outputs):
        inside = not Path(ref.path).is_absolute() and ".." not in Path(ref.path).parts
        if not inside or not (directory / ref.path).exists():
            raise RunError(f"stage {record.stage!r} names an output {ref.path!r} that is not in its directory")


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _moved_aside(path: Path, named: Path) -> Path | None:
    if not path.exists():
        return None
    number = 1
    while (target := named.with_name(f"{named.name}.stale-{number}")).exists():
        number += 1
    os.replace(path, target)
    _sync(target.parent)
    return target


def move_file_aside(path: Path) -> Path | None:
    """The same for one file of the run."""
    return _moved_aside(path, path)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
