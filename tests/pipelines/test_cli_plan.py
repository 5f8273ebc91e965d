import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.compile import compile_flow
from pipelines.describe import as_json, as_text
from pipelines.load import load

Write = Callable[..., Path]
ROOT = Path(__file__).parents[2]


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_draws_the_flow(flow_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("plan", "small", "--file", str(flow_file()), "--set", "times=9", capsys=capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    words = " ".join(out.replace("│", " ").split())
    for part in (
        "small: A small flow.",
        "loop, 9 times",
        "carry policy: starts as model, then update.policy",
        "eval_score score samples <- eval.samples every 2 rewards: {size: jpeg_size}",
        "stop collapse: when eval_score.size falls 0.1 below its best, finish",
        "export export policy <- loop.best(eval_score.size)",
        "sample: 24 (12 pictures x 6 steps, 3 in a micro-batch)",
        "update: 10 (12 pictures x 5 stochastic steps, 8 in a micro-batch)",
        "eval: 48 (24 pictures x 6 steps, 3 in a micro-batch), every 2 iterations",
    ):
        assert part in words, part
    assert [line.split()[1] for line in lines if line.startswith("│ ") and "carry" not in line][:3]


def test_a_default_is_not_shown_as_a_setting(flow_file: Write) -> None:
    text = as_text(compile_flow(load(flow_file()), "small"))
    assert "optimizer" not in text
    assert "per_prompt: 4" in text


def test_plan_as_json(flow_file: Write) -> None:
    plan = json.loads(as_json(compile_flow(load(flow_file()), "small")))
    assert plan["nodes"]["update"]["inputs"]["policy"] == "carry.policy"
    assert plan["nodes"]["export"]["inputs"]["policy"] == "loop.best(eval_score.size)"
    assert plan["nodes"]["sample"]["config"]["sampler"]["eta"] == 0.7
    assert plan["carry"] == {"policy": {"start": "model", "next": "update.policy"}}
    assert plan["guards"]["collapse"]["guard"]["falls"] == 0.1


def test_a_warning_is_shown(flow_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "small", "--file", str(flow_file()), "--set", "sample.per_prompt=1")
    code, out, _ = run(*words, capsys=capsys)
    assert code == 0
    assert "warning: advantage: 'sample' draws one picture a prompt" in out


def test_list(flow_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--file", str(flow_file()), capsys=capsys) == (0, "small  A small flow.\n", "")


def test_mistakes_end_with_2_and_no_traceback(flow_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = flow_file(("times: 4", "times: 0"))
    code, out, err = run("plan", "small", "--file", str(file), capsys=capsys)
    assert (code, out) == (2, "")
    assert err == f"rewardflow: {file}:10:14: flows.small.loop.times: wanted greater than or equal to 1, got 0\n"


def test_no_file_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("plan", "small", capsys=capsys)
    assert code == 2
    assert "flows.yaml: no such file" in err
    assert "--file" in err


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "-a"])
def test_a_run_has_a_plain_name(flow_file: Write, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("run", "small", f"--as={name}", "--file", str(flow_file()), capsys=capsys)
    assert code == 2
    assert f"a run's name has letters, digits, '.', '_' and '-', got {name!r}" in err


def test_a_reader_that_leaves_is_no_error(flow_file: Write) -> None:
    words = [sys.executable, "-m", "pipelines.cli", "plan", "small"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words, cwd=flow_file().parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for part in ("plan", "run", "list", "runs/NAME", "exit codes", "--set times=100"):
        assert part in out


@pytest.mark.parametrize("words", [("--help",), ("plan", "small"), ("run", "--help")])
def test_answers_fast_and_without_heavy_imports(flow_file: Write, words: tuple[str, ...]) -> None:
    """The limit is 1.5 s; processor time is measured, for tests share their cores with others."""
    code = (
        "import sys, time\n"
        "from pipelines.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'prefect', 'diffusers', 'transformers', 'numpy', 'pyarrow', 'stages'} & sys.modules.keys()\n"
        "print(sorted(heavy), time.process_time(), file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = flow_file().parent
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    heavy, seconds = done.stderr.strip().splitlines()[-1].rsplit(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 1.5, f"{seconds} s of processor time, {time.monotonic() - started:.1f} s in all"
