"""``python -m stages request.json`` runs one stage alone, here, and writes outputs.json into the request's directory.

Every stage's directory in a run holds its request.json: copy it, set `directory` to a new folder, change what you like.
"""

import argparse
import json
import sys
from pathlib import Path

from pydantic import ValidationError

from schemas.errors import InputError, RunError, UserError
from schemas.record import StageRequest
from stages.worker import Worker


def main() -> int:
    """Exit code 0, 1 when the stage fails, 2 when the request is wrong."""
    parser = argparse.ArgumentParser(prog="python -m stages", description=__doc__)
    parser.add_argument("request", type=Path, help="a request.json")
    try:
        _run(parser.parse_args().request)
    except UserError as error:
        print(f"stages: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"stages: {error}", file=sys.stderr)
        return 1
    return 0


def _run(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"no file {path}; name the request.json of a stage")
    try:
        request = StageRequest.model_validate_json(path.read_bytes())
        directory = Path(request.directory)
        if (directory / "record.json").exists():
            raise InputError(f"{directory} is a committed stage; set `directory` in {path} to a new folder")
        directory.mkdir(parents=True, exist_ok=True)
        answer = Worker().perform(request, lambda done, total, unit: print(f"{done}/{total} {unit}", file=sys.stderr))
    except ValidationError as error:
        raise InputError(f"{path} is no request that fits its stage: {error}") from error
    text = json.dumps(answer.outputs, indent=2)
    (directory / "outputs.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
