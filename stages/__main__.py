"""``python -m stages request.json`` runs one stage alone, here, and prints its outputs and where they lie.

Every stage's directory in a run holds its request.json. Outputs go to a new folder, RUN/alone/ITERATION-STAGE, or to
--out; a finished stage is never written to. Copy the request and change its config as you like. In a run that was moved
or copied, inputs are those of the run in which the request lies.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schemas.errors import InputError, RunError, UserError
from schemas.record import StageRequest
from stages.worker import Worker


def main() -> int:
    """Exit code 0, 1 when the stage fails, 2 when the request is wrong."""
    parser = argparse.ArgumentParser(prog="python -m stages", description=__doc__)
    parser.add_argument("request", type=Path, help="a request.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder for the outputs")
    arguments = parser.parse_args()
    try:
        _run(arguments.request, arguments.out)
    except UserError as error:
        print(f"stages: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"stages: {error}", file=sys.stderr)
        return 1
    return 0


def _run(path: Path, out: Path | None) -> None:
    if not path.is_file():
        raise InputError(f"no file {path}; name the request.json of a stage")
    try:
        request = _at_home(StageRequest.model_validate_json(path.read_bytes()), path.resolve())
    except ValidationError as error:
        raise InputError(f"{path} is no request: {_first(error)}") from error
    directory = _new_folder(request, path.resolve(), out)
    directory.mkdir(parents=True, exist_ok=True)
    print(f"outputs go to {directory}", file=sys.stderr)
    request = request.model_copy(update={"directory": str(directory.resolve())})
    try:
        answer = Worker().perform(request, lambda done, total, unit: print(f"{done}/{total} {unit}", file=sys.stderr))
    except ValidationError as error:
        raise InputError(f"{path} does not fit the stage {request.stage!r}: {_first(error)}") from error
    text = json.dumps(answer.outputs, indent=2)
    (directory / "outputs.json").write_text(text + "\n")
    print(text)


def _at_home(request: StageRequest, path: Path) -> StageRequest:
    """With inputs of the run in which the request lies, when that is not where it was written."""
    written, lies = Path(request.directory).parent.parent, path.parent.parent.parent
    inside = path.parent.name.removesuffix(".partial") == Path(request.directory).name.removesuffix(".partial")
    if not inside or written == lies:
        return request

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, str) and Path(value).is_relative_to(written):
            return str(lies / Path(value).relative_to(written))
        return value

    return request.model_copy(update={"inputs": moved(request.inputs)})


def _new_folder(request: StageRequest, path: Path, out: Path | None) -> Path:
    """--out, else a new one in the run, else the request's own when it lies in no run: there finished shards stay."""
    if out is not None:
        if out.exists():
            raise InputError(f"--out {out} is there already; name a new folder")
        return out
    run = path.parent.parent.parent
    if not (run / "run.json").is_file():
        own = Path(request.directory)
        if (own / "record.json").exists():
            raise InputError(f"{own} is a finished stage; set `directory` in {path} to a new folder, or give --out")
        return own
    name = f"{path.parent.parent.name}-{path.parent.name.removesuffix('.partial')}"
    ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (run / "alone" / f"{name}{end}" for end in ends)
    return next(place for place in places if not place.exists())


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the top'}: {first['msg']}"


if __name__ == "__main__":
    sys.exit(main())
