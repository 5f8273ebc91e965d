"""The command `import-samples`: pictures of one's own as a run, without a flow file of one's own."""

import argparse
import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipelines.compile import compile_flow
from pipelines.load import LoadedFile, RawFile, load, overridden, read
from pipelines.mistakes import joined, models_in, parsed
from pipelines.plan import Plan
from pipelines.rundir import RECORD, Address, RunDirectory, write_text
from schemas.assets import is_hub_id, resolve
from schemas.errors import UserError, closest
from schemas.flow import FlowFile
from schemas.rewards import RewardConfig

FLOW = "import_samples"
_FILE = "flow.yaml"
_DESCRIPTION = "Pictures of one's own, and their scores."
_HEAD = """\
# Written by `rewardflow import-samples`. Other rewards on these pictures, as a run of its own:
#   rewardflow rerun RUN --from before/score --file runs/RUN/flow.yaml --as NEW --set score.rewards.NAME.kind=KIND
# To train on them, copy the node `import` into a flow of yours; its edges are import.samples and import.prompts.
"""
_ABOUT = """\
Takes pictures that were not made here in as a run, and scores them. No flow file is needed: the command writes one,
runs/RUN/flow.yaml. PATH is a folder, a dataset that save_to_disk wrote, or the id of one on the hub.

a folder holds one of these:
  metadata.jsonl         {"file_name": "a/1.png", "prompt": "two red circles", "year": 1999}
                         one line a picture; other columns are kept as metadata, for rewards that read them
  metadata.csv           the same, with a first line such as file_name,prompt,year
  1.png 1.txt ...        beside each picture a file with its prompt
  two_red_circles/1.png  for each prompt a sub-folder of pictures, named like it ('_' is read as a space)

a dataset has a column of pictures and one of prompts: image and prompt, or --set import.image_column=...
"""
_EXAMPLES = """\
examples:
  rewardflow import-samples pictures --as mine
  rewardflow import-samples pictures --as mine --rewards size=jpeg_size     add scores, also later
  rewardflow import-samples pictures --as mine --rewards strict=shapes --set score.rewards.strict.score=strict
  rewardflow import-samples pictures --as small --resolution 512 --set import.prompt_column=text
  rewardflow show mine/before/score
  rewardflow rerun mine --from before/score --file runs/mine/flow.yaml --as other --set score.rewards.size.prefer=large

Pictures are kept as lossless PNG: upright as their EXIF says, RGB, with white behind what is transparent, of several
frames the first. Pictures of equal prompts are one group. A changed picture makes the run stale, and it says so.
Training on them: see "Bring your own pictures" in the README.
"""


def import_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`import-samples`; what it shares with `run` is added by the caller."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "import-samples",
        help="take in pictures of your own, and score them",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=kind,
    )
    parser.add_argument("path", metavar="PATH", help="folder of pictures, folder of a saved dataset, or hub id")
    parser.add_argument(
        "--rewards", action="append", default=[], metavar="NAME=KIND", help="a reward, again and again if you like"
    )
    parser.add_argument(
        "--resolution", type=int, metavar="N", help="crop the centre to a square and scale it to N x N pixels"
    )
    return parser


def prepared_import(arguments: argparse.Namespace, run_name: str) -> Plan:
    """The checked plan, whose flow file is there afterwards. Nothing is written when something is wrong."""
    file = arguments.runs / run_name / _FILE
    tree = _tree(arguments)
    raw = overridden(RawFile(file.resolve(), str(file), {"flows": {FLOW: tree}}, {}), FLOW, _sets(arguments))
    spec, errors = parsed(FlowFile, raw.tree, (), raw.error)
    if spec is None:
        raise joined(errors)
    compile_flow(LoadedFile(raw, spec), FLOW)
    _refuse_another(file, raw.tree)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, _HEAD + _yaml(raw.tree))
    return compile_flow(load(file), FLOW)


def say_imported(runs: Path, run_name: str) -> None:
    """How many pictures there are, of how many prompts, and where."""
    run = RunDirectory.open(runs / run_name)
    address = Address("before", "import")
    record = run.stage(address).record()
    metrics = record.outputs["metrics"] if record else {}
    pictures, prompts, unused = (int(metrics.get(name, 0)) for name in ("pictures", "prompts", "unused"))
    of_no_use = f"; {unused} other files were left" if unused else ""
    print(f"{pictures} pictures of {prompts} prompts in {run.place(address) / 'samples'}{of_no_use}")
    print(f"its flow: {run.path / _FILE}")


def _tree(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flow, before --rewards and --set."""
    given = arguments.path
    # The flow file lies in the run's folder, and a path in it would count from there.
    path = resolve(given, Path.cwd())
    if not Path(path).exists() and not is_hub_id(path):
        raise UserError(f"PATH {given!r}: no folder at {path}; name a folder of pictures, or a dataset of the hub")
    node: dict[str, Any] = {"stage": "import_samples", "path": path}
    if arguments.resolution is not None:
        node["resolution"] = arguments.resolution
    stages = {"import": node}
    if arguments.rewards or any(text.startswith("score.") for text in arguments.set):
        stages["score"] = {"samples": "import.samples", "rewards": {}}
    return {"description": _DESCRIPTION, "stages": stages}


def _sets(arguments: argparse.Namespace) -> list[str]:
    """--rewards as --set, then the --set themselves."""
    out = []
    kinds = [str(model.model_fields["kind"].default) for model in models_in(RewardConfig)]
    for text in arguments.rewards:
        name, equals, kind = text.partition("=")
        if not equals or not name or "." in name:
            raise UserError(f"--rewards {text}: wants NAME=KIND, such as size=jpeg_size")
        if kind not in kinds:
            raise UserError(f"--rewards {text}: no reward {kind!r}. {closest(kind, kinds)}")
        if kind == "external":
            file = f"{arguments.runs / (arguments.run_name or 'RUN') / _FILE}"
            raise UserError(
                f"--rewards {text}: code of your own is named in a flow file only; import without it, add `external` "
                f"and a score node to {file}, and run: rewardflow run {FLOW} --file {file} --as {arguments.run_name}"
            )
        out.append(f"score.rewards.{name}.kind={kind}")
    return [*out, *arguments.set]


def _refuse_another(file: Path, tree: dict[str, Any]) -> None:
    """A run of something else is not taken over, and a flow file that was changed by hand is not written over."""
    facts = RunDirectory(file.parent).read()
    if facts and (facts.get("flow") != FLOW or "base" in facts):
        raise UserError(f"--as {file.parent.name}: {file.parent} is a run of something else; choose another name")
    if not file.is_file() or not any(file.parent.glob(f"*/*/{RECORD}")):  # a first try that failed is mended freely
        return
    there = read(file).tree
    if there != tree and there != _unscored(tree):
        raise UserError(
            f"--as {file.parent.name}: {file} says otherwise than this command; choose another name, or run it as it "
            f"is: rewardflow run {FLOW} --file {file} --as {file.parent.name}"
        )


def _unscored(tree: dict[str, Any]) -> dict[str, Any]:
    """The same without scores: they may be added later."""
    flow = tree["flows"][FLOW]
    stages = {name: node for name, node in flow["stages"].items() if name != "score"}
    return {"flows": {FLOW: {**flow, "stages": stages}}}


def _yaml(tree: dict[str, Any]) -> str:
    stream = io.StringIO()
    YAML(typ="rt", pure=True).dump(tree, stream)
    return stream.getvalue()
