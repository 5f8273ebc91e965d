"""Pictures of one's own through the command, from a folder to a policy that learnt from them."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from stages.shapes.render import render
from stages.shapes.scenes import parse

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

FLOWS = """\
flows:
  own:
    description: Learn from pictures that were not drawn here.
    seed: 1
    model: {kind: sd3, path: "package:stages.shapes/pipeline", max_sequence_length: 8}
    stages:
      pictures: {stage: import_samples, path: pictures}
      score: {samples: pictures.samples, rewards: {strict: {kind: shapes, score: strict}}}
      advantage: {rewards: score.rewards}
      encode: {prompts: pictures.prompts}
      encode_images: {samples: pictures.samples}
    loop:
      times: TIMES
      carry:
        policy: {start: model, next: update.policy}
      body:
        update:
          trajectory: encode_images.trajectory
          conditioning: encode.embeddings
          ADVANTAGES
          policy: carry.policy
          loss: LOSS
          optimizer: {learning_rate: {start: 3e-4}}
          steps: 2
    resources: {processes: 1, micro_batch: {update: 16, encode_images: 16}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ragged groups of pictures, some of them wrong."""
    shown = {
        "two red circles": ["two red circles"] * 9 + ["one blue square"] * 4,
        "one green square": ["one green square"] * 5 + ["three red circles"] * 3,
        "one blue triangle": ["one blue triangle"],
    }
    generator = np.random.default_rng(0)
    lines = []
    (tmp_path / "pictures").mkdir()
    for prompt, scenes in shown.items():
        for scene in scenes:
            name = f"{len(lines):02}.png"
            Image.fromarray(render(parse(scene), generator)).save(tmp_path / "pictures" / name)
            lines.append(json.dumps({"file_name": name, "prompt": prompt, "right": scene == prompt}))
    (tmp_path / "pictures" / "metadata.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(folder: Path, loss: str, times: int, *words: str, advantages: bool = True) -> subprocess.CompletedProcess[str]:
    edge = "advantages: advantage.advantages" if advantages else ""
    text = FLOWS.replace("TIMES", str(times)).replace("LOSS", loss).replace("ADVANTAGES", edge)
    (folder / "flows.yaml").write_text(text)
    command = [sys.executable, "-m", "pipelines.cli", "run", "own", "--plain", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)


def record(folder: Path, place: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / "own" / place / "record.json").read_bytes())["outputs"]


def weights_moved(folder: Path, times: int) -> bool:
    """Whether the weights differ from the base's and from iteration to iteration."""
    policies = [folder / "runs" / "own" / f"{i:04}" / "update" / "policy" for i in range(times)]
    saved = [load_file(next(policy.glob("*.safetensors"))) for policy in policies]
    raw = [{k.removeprefix("raw."): v for k, v in one.items() if k.startswith("raw.")} for one in saved]
    base = load_file(ROOT / "stages" / "shapes" / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")
    sets = [base, *raw]
    return all(
        any(not np.array_equal(one[name].astype(np.float32), two[name].astype(np.float32)) for name in two)
        for one, two in pairwise(sets)
    )


def test_nft_learns_from_their_scores(folder: Path) -> None:
    done = run(folder, "{kind: nft, beta: 1.0}", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert record(folder, "before/pictures")["metrics"] == {"pictures": 22, "prompts": 3, "unused": 0}
    assert record(folder, "before/score")["metrics"]["strict"] == 15 / 22
    assert record(folder, "before/encode_images")["trajectory"]["weights"] == "none"
    for iteration in range(2):
        metrics = record(folder, f"{iteration:04}/update")["metrics"]
        assert all(np.isfinite(list(metrics.values()))), metrics
    assert weights_moved(folder, 2)


def test_the_flow_matching_loss_falls(folder: Path) -> None:
    for file in (folder / "pictures").glob("*.png"):  # red for blue: the base model does not know such pictures
        pixels = np.asarray(Image.open(file))
        Image.fromarray(pixels[..., ::-1]).save(file)
    done = run(folder, "{kind: sft}", 12, advantages=False)
    assert (done.returncode, done.stderr) == (0, "")
    losses = [record(folder, f"{iteration:04}/update")["metrics"]["train/loss"] for iteration in range(12)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4]), losses
    assert weights_moved(folder, 12)


def test_grpo_says_why_it_cannot(folder: Path) -> None:
    done = run(folder, "{kind: grpo}", 1)
    assert done.returncode == 2
    words = "grpo trains on steps, and 'encode_images' (encode_images) has none: use a sample node, or a loss on final"
    assert words in done.stderr
    assert not (folder / "runs").exists()


def test_pictures_of_another_size_are_scored_but_not_encoded(folder: Path) -> None:
    wide = Image.new("RGB", (40, 32), "white")
    wide.paste(Image.open(folder / "pictures" / "03.png"))
    wide.save(folder / "pictures" / "03.png")
    done = run(folder, "{kind: nft}", 1)
    assert done.returncode == 2
    assert re.search(r"picture '\w{16}/3' is 40 x 32 pixels, the model wants 32 x 32; set `resolution` of", done.stderr)
    assert record(folder, "before/score")["metrics"]["strict/missing"] == 0
    # As told: the pictures are taken in anew, and everything that stands on them follows.
    done = run(folder, "{kind: nft}", 1, "--set", "pictures.resolution=32", "--on-change", "rerun")
    assert done.returncode == 0, done.stderr
