"""`rewardflow generate`: pictures from any saved policy of a run, for prompts of one's own."""

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from pipelines.launch import Launcher, launcher
from pipelines.policies import newest_input, policy_of
from pipelines.progress import Clock, Lines
from pipelines.run import say_aloud
from pipelines.rundir import Address, located, write_text
from pipelines.saved import Saved, saved
from pipelines.views.gallery import opened
from schemas.artifacts import SamplesTable
from schemas.assets import is_hub_id
from schemas.contracts import (
    EncodeConfig,
    EncodeOutputs,
    PromptsConfig,
    PromptsOutputs,
    SampleConfig,
    SampleOutputs,
)
from schemas.doors import StageConfig, StageOutputs
from schemas.engine import Resources
from schemas.errors import UserError
from schemas.record import StageRequest

_ABOUT = """\
Draws pictures of your prompts from a policy that RUN has saved, as its evaluations do: same model, sampler and weights.
Beside the PNG files lies metadata.jsonl with prompt, seed and policy, so that `rewardflow import-samples` takes the
folder in. The same seed gives a prompt the same noise whatever the policy, so policies can be compared.
"""
_EXAMPLES = """\
examples:
  rewardflow generate demo --prompt "two red circles" --prompt "one blue square"
  rewardflow generate demo --prompts prompts.txt --policy base --per-prompt 8
  rewardflow generate demo --prompt "two red circles" --policy 40 --weights raw --steps 28 --out pictures
"""
_OPTIONS = {"per_prompt": "per-prompt", "steps": "steps", "guidance_scale": "guidance"}
Out = TypeVar("Out", bound=StageOutputs)


class Drawing(NamedTuple):
    """How the run draws its evaluations, and the policy to draw with; none is the base."""

    sample: SampleConfig
    encode: EncodeConfig
    pipeline: dict[str, Any] | None
    policy: dict[str, Any] | None
    label: str  # of the policy: 0079, base


def generate_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """`generate`; what it shares with other commands is added by the caller."""
    parser = commands.add_parser(
        "generate",
        help="pictures from a saved policy",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_generate)
    parser.add_argument("run", metavar="RUN")
    words = parser.add_mutually_exclusive_group(required=True)
    words.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt, again and again if you like")
    words.add_argument("--prompts", type=Path, metavar="FILE", help="a file of prompts, one a line, or JSONL")
    which = "best: that of the best evaluation; last; base: the model before tuning; N: made in iteration N"
    parser.add_argument("--policy", metavar="WHICH", help=f"{which} (default: best, or last without evaluations)")
    parser.add_argument("--weights", choices=("raw", "old", "ema"), help="of the policy (default: as evaluations)")
    parser.add_argument("--per-prompt", type=int, default=4, metavar="N", help="pictures of each prompt (default: 4)")
    parser.add_argument("--steps", type=int, metavar="N", help="sampling steps (default: as evaluations)")
    parser.add_argument(
        "--guidance", type=float, metavar="G", help="guidance scale; 1 is none (default: as evaluations)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of the noise (default: the run's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where they go (default: RUN/views/generated/POLICY)")
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.prompt is not None and not all(text.strip() for text in arguments.prompt):
        raise UserError("--prompt: wants words, got none")
    if arguments.prompts is not None and not arguments.prompts.is_file():
        raise UserError(f"--prompts: no file {arguments.prompts}; write the prompts there, one a line")
    if arguments.seed is not None and arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: wants 0 or more")
    run = saved(arguments.runs, arguments.run)
    drawing = _drawing(run, arguments)
    folder: Path = arguments.out or run.run.path / "views" / "generated" / drawing.label
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; name an empty or a new folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "metadata.jsonl").is_file():
        raise UserError(f"--out {folder}: holds other files; name an empty or a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    resources = Resources.model_validate(run.plan["resources"])
    with (
        tempfile.TemporaryDirectory(prefix=".generate-", dir=folder) as work,
        closing(launcher(resources, run.run.logs, resources.retries)) as workers,
    ):
        samples = _samples(run, drawing, arguments, workers, resources, Path(work))
        names = _written(samples, folder, drawing, _drawn_otherwise(arguments))
    print(f"{len(names)} pictures by {drawing.label} ({drawing.sample.weights}) in {folder}")
    return 0


def _drawing(run: Saved, arguments: argparse.Namespace) -> Drawing:
    """From the plan that last ran; UserError for what it does not have."""
    name, node = _evaluation(run)
    config = SampleConfig.model_validate(node["config"])
    model = config.model.path
    if model is not None and not is_hub_id(model) and not Path(model).exists():
        raise UserError(f"the model of the run, {model}, is not there; bring it back to its place")
    label, policy = policy_of(run, arguments.policy)
    weights = arguments.weights or config.weights
    if policy is not None and weights not in policy["sets"]:
        have = ", ".join(policy["sets"])
        raise UserError(f"--weights: the policy {label} has no {weights!r} weights, only {have}")
    sampler = {
        "kind": "ode",
        "steps": config.sampler.steps if arguments.steps is None else arguments.steps,
        "guidance_scale": config.sampler.guidance_scale if arguments.guidance is None else arguments.guidance,
    }
    changes = {"per_prompt": arguments.per_prompt, "weights": weights, "fixed_noise": True, "sampler": sampler}
    try:
        sample = SampleConfig.model_validate({**config.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        option = _OPTIONS[str(first["loc"][-1])]
        raise UserError(f"--{option} {first['input']}: {first['msg'].lower()}") from error
    encode = run.nodes.get(str(node["inputs"]["conditioning"]).partition(".")[0], {"config": {"model": config.model}})
    return Drawing(
        sample,
        EncodeConfig.model_validate(encode["config"]),
        newest_input(run, name, "pipeline"),
        policy,
        label,
    )


def _evaluation(run: Saved) -> tuple[str, dict[str, Any]]:
    """The node that draws like an evaluation: with fixed noise, the loop's before others."""
    nodes = [
        (name, node) for name, node in run.nodes.items() if node["stage"] == "sample" and node["inputs"].get("policy")
    ]
    if not nodes:
        raise UserError(
            f"the run {run.run.path} has no stage that draws from a policy, so there is nothing to draw like"
        )
    return min(nodes, key=lambda item: (not item[1]["config"]["fixed_noise"], item[1]["section"] != "body"))


def _samples(
    run: Saved,
    drawing: Drawing,
    arguments: argparse.Namespace,
    workers: Launcher,
    resources: Resources,
    work: Path,
) -> tuple[Path, SamplesTable]:
    """Runs prompts, encode and sample, as in a flow."""
    file = arguments.prompts
    if file is None:
        file = work / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in arguments.prompt), encoding="utf-8")
    lines = Lines(say_aloud)

    def perform(stage: str, kind: type[Out], config: StageConfig, **inputs: Any) -> tuple[Path, Out]:
        directory = (work / stage).resolve()
        directory.mkdir()
        request = StageRequest(
            stage=stage,
            node=stage,
            config=config.model_dump(mode="json"),
            inputs=inputs,
            directory=str(directory),
            seed=run.plan["seed"] if arguments.seed is None else arguments.seed,
            resources=resources,
            python_path=tuple(run.plan["python_path"]),
        )
        clock = Clock()
        answer = workers.run(request, lines.ticker(Address("after", stage), clock), clock.restart)
        return directory, kind.model_validate(answer.outputs)

    place, read = perform("prompts", PromptsOutputs, PromptsConfig(path=str(file.resolve())))
    prompts = located(read.chosen, place)
    place, encoded = perform("encode", EncodeOutputs, drawing.encode, prompts=prompts, pipeline=drawing.pipeline)
    conditioning = located(encoded.embeddings, place)
    given = {"prompts": prompts, "conditioning": conditioning, "policy": drawing.policy, "pipeline": drawing.pipeline}
    place, drawn = perform("sample", SampleOutputs, drawing.sample, **given)
    return place, drawn.samples


def _written(samples: tuple[Path, SamplesTable], folder: Path, drawing: Drawing, ending: str) -> list[str]:
    """One PNG a picture, and a line of metadata each; lines of other pictures in the folder stay."""
    table = opened(*samples)
    rows = table.select(["prompt_id", "prompt", "index", "seed"]).to_pylist()
    stems = _stems({row["prompt_id"]: row["prompt"] for row in rows})
    how = {"policy": drawing.label, "weights": drawing.sample.weights, **drawing.sample.sampler.model_dump(mode="json")}
    metadata = folder / "metadata.jsonl"
    old = metadata.read_text(encoding="utf-8").splitlines() if metadata.is_file() else []
    lines = {json.loads(line)["file_name"]: line for line in old}
    names = []
    for place, row in enumerate(rows):
        name = f"{stems[row['prompt_id']]}{ending}-{row['index']}.png"
        (folder / name).write_bytes(table.column("image")[place].as_py()["bytes"])
        told = {"file_name": name, "prompt": row["prompt"], "seed": row["seed"], **how}
        lines[name] = json.dumps(told, ensure_ascii=False)
        names.append(name)
    write_text(metadata, "\n".join(lines.values()) + "\n")
    return names


def _drawn_otherwise(arguments: argparse.Namespace) -> str:
    """For file names: what differs from how evaluations draw, so that no picture takes the place of another."""
    names = ("weights", "steps", "guidance", "seed")
    return "".join(f"-{name}-{value}" for name in names if (value := getattr(arguments, name)) is not None)


def _stems(prompts: Mapping[str, str]) -> dict[str, str]:
    """File names by prompt id: the words, with a part of the id where two prompts would share them."""
    words = {key: re.sub(r"\W+", "-", prompt).strip("-")[:60] or "picture" for key, prompt in prompts.items()}
    several = Counter(words.values())
    return {key: stem if several[stem] == 1 else f"{stem}-{key[:6]}" for key, stem in words.items()}
