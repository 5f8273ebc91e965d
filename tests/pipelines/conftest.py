from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipelines.bench import BEST, Bench, Say, saying

SMALL = """\
flows:
  small:
    description: A small flow.
    seed: 3
    model: {kind: sd3, path: model}
    stages:
      prompts: {path: prompts.txt}
      encode: {prompts: prompts.chosen}
    loop:
      times: 4
      carry:
        policy: {start: model, next: update.policy}
      body:
        update:
          trajectory: sample.trajectory
          conditioning: encode.embeddings
          advantages: advantage.advantages
          policy: carry.policy
          loss: {kind: grpo, clip: 1e-4}
          ema: {decay: 0.9}
        sample:
          prompts: prompts.chosen
          conditioning: encode.embeddings
          policy: carry.policy
          per_prompt: 4
          sampler: {kind: flow_sde, steps: 6}
        score: {samples: sample.samples, rewards: {size: {kind: jpeg_size}}}
        advantage: {rewards: score.rewards}
        eval:
          stage: sample
          every: 2
          prompts: prompts.chosen
          conditioning: encode.embeddings
          policy: carry.policy
          weights: ema
          sampler: {kind: ode, steps: 6}
        eval_score: {stage: score, every: 2, samples: eval.samples, rewards: {size: {kind: jpeg_size}}}
      stop:
        collapse: {metric: eval_score.size, falls: 0.1}
    after:
      export: {policy: loop.best(eval_score.size)}
    resources: {micro_batch: {sample: 3}, preflight: false}
"""


@pytest.fixture
def flow_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the small flow, with texts replaced, beside a prompt file and a model folder; gives its path."""

    def write(*changes: tuple[str, str], text: str = SMALL) -> Path:
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the flow"
            text = text.replace(old, new)
        (tmp_path / "model" / "transformer").mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / "model_index.json").write_text("{}")
        for name in ("config.json", "weights.safetensors"):
            (tmp_path / "model" / "transformer" / name).write_text("{}")
        (tmp_path / "prompts.txt").write_text("one\ntwo\n\nthree\n")
        file = tmp_path / "flows.yaml"
        file.write_text(text)
        return file

    return write


@pytest.fixture
def bench(flow_file: Callable[..., Path], tmp_path: Path) -> Bench:
    """A run of the small flow that has not begun."""
    return Bench(flow_file(), tmp_path / "runs" / "one")


@pytest.fixture
def done(bench: Bench) -> Bench:
    """A complete run of the small flow: four iterations, evaluated at 0, 2 and 3."""
    bench.go(metrics=BEST)
    return bench


@pytest.fixture
def say(done: Bench, capsys: pytest.CaptureFixture[str]) -> Say:
    """The command on its run."""
    return saying(done.run.path.parent, capsys)
