"""The benchmark at tiny size: both sides of a row do the same work, which the rows themselves assert."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bench.run import main


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the benchmark sets is put back."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ("skip,fsdp_update", ["skip", "fsdp_update"]),
        pytest.param("sample,update", ["sample", "sample_sde", "update", "update_grpo"], marks=pytest.mark.slow),
    ],
)
def test_rows_find_both_sides_equal_and_tell_what_they_measured(
    rows: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "build" / "bench.json"
    words = [rows, "--tiny", "--repetitions", "1", "--threads", "1"]
    code = main([*words, "--json", str(file), "--check"])
    told = json.loads(file.read_text())
    assert [row["name"] for row in told["rows"]] == names
    for row in told["rows"]:
        assert row["checked"]
        assert row["median"] > 0
        assert row["within"] == (row["median"] <= row["bound"])
    assert code == (not all(row["within"] for row in told["rows"]))
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in names)


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sampel"]) == 2
    assert "'sampel'; there are sample" in capsys.readouterr().err
