"""`rewardflow init`: a folder to start from, anywhere on the machine."""

import argparse
import shutil
from pathlib import Path

from schemas.errors import UserError

_ABOUT = """\
Writes a flow of your own to FOLDER: flows.yaml with comments, a reward in rewards.py, and prompts. It runs as it
stands, on the built-in tiny model; the lines marked (*) make it yours. Nothing that is there is written over.
"""
_TEMPLATES = Path(__file__).with_name("templates")


def init_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`init`."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("init", help="a folder to start from", description=_ABOUT, formatter_class=kind)
    parser.set_defaults(command=_init)
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", default=Path(), help="default: this one")
    return parser


def _init(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    files = [
        file.relative_to(_TEMPLATES)
        for file in sorted(_TEMPLATES.rglob("*"))
        if file.suffix in (".yaml", ".py", ".txt")
    ]
    there = [str(folder / name) for name in files if (folder / name).exists()]
    if there:
        raise UserError(f"{', '.join(there)} there already; name another folder: rewardflow init FOLDER")
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_TEMPLATES / name, folder / name)
        print(folder / name)
    go = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"next: {go}rewardflow plan tune, then: rewardflow run tune --as first")
    return 0
