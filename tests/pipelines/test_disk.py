"""The disk: what a run needs, refused when it cannot fit, and filled up amid a run."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import disk
from pipelines.cli import main
from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.rundir import bytes_in

EXAMPLE = ["--file", "flows.yaml"]
ONE = ("base_train", "base_heldout", "final_train", "final_heldout")
TINY = ["--set", "times=2", "--set", "sample.per_prompt=4", "--set", "eval.per_prompt=2"]
TINY += [word for node in ONE for word in ("--set", f"{node}.per_prompt=1")]


def test_plan_tells_what_a_run_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "shapes", *EXAMPLE, "--set", "keep=null"]) == 0
    text = capsys.readouterr().out
    lines = [line.strip() for line in text[text.index("disk, estimated") : text.index("\nmemory")].splitlines()]
    assert [line.split(":")[0] for line in lines[1:]] == ["sample", "update", "eval", "the run"]
    assert lines[2] == "update: 45.7 MB"  # (raw, old, ema, two moments) x 2.29 million weights x 4 bytes
    assert lines[4] == "the run: 3.8 GB"


def test_a_lora_and_retention_need_less(capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["--set", "model.lora={rank: 4}", "--set", "keep={last: 1}"]
    assert main(["plan", "shapes", *EXAMPLE, *lora]) == 0
    # 4 blocks, 8 (the last one 7) projections of 128 x 128, rank 4, 5 sets of 4 bytes
    assert f"update: {31 * 4 * 256 * 20 / 1000:.1f} kB" in capsys.readouterr().out


def test_a_model_that_is_not_here_is_said_to_be_unknown(
    flow_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "small", "--file", str(flow_file())]) == 0
    assert (
        "not known before the model and the prompts are: encode, sample, update, eval, export"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = disk.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    words = ["run", "shapes", *EXAMPLE, "--plain", "--runs", str(tmp_path), "--as", "big", "--set", "times=100000"]
    assert main([*words, "--set", "keep=null"]) == 2
    told = capsys.readouterr().err
    assert "still needs about 4.7 TB" in told
    assert "has 10.0 MB free" in told
    assert "keep: {last: 2, every: 20}" in told
    assert not (tmp_path / "big" / "before").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_run_goes_on_after_space_is_made(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "shapes", *EXAMPLE, "--plain", "--runs", str(small_disk), "--as", "one", *TINY]
    words += ["--set", "keep=null", "--set", "resources.check_disk=false", "--set", "resources.preflight=false"]
    filler = small_disk / "filler"
    filler.write_bytes(bytes(10_000_000))
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "full; make space, and the same command goes on" in told
    assert "Traceback" not in told
    done = sorted(path.parent for path in small_disk.rglob("record.json"))
    assert done
    subprocess.run(["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    before = {path: (path / "record.json").read_bytes() for path in done}
    assert main(words) == 0
    assert {path: (path / "record.json").read_bytes() for path in done} == before
    plan = compile_flow(load(Path("flows.yaml"), "shapes", words[words.index("--set") + 1 :: 2]), "shapes")
    need = disk.need(plan, plan.nodes["update"]).heavy
    assert need == pytest.approx(bytes_in(small_disk / "one" / "0001" / "update" / "policy"), rel=0.01)
