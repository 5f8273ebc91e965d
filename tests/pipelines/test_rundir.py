import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.digests import AssetDigests
from pipelines.lock import locked
from pipelines.rundir import Address, RunDirectory, StageDirectory, located, write_request
from schemas.artifacts import FileRef, RewardsTable, refs
from schemas.contracts import CONTRACTS, SummariseInputs, SummariseOutputs
from schemas.engine import Resources
from schemas.errors import InputError, RunError, UserError
from schemas.record import StageRecord, StageRequest, Volatile

ROOT = Path(__file__).parents[2]
CUT = {"fingerprint": "a", "micro_batch": 8}
VOLATILE = Volatile(started="", seconds=0.0, host="", process=0, resources=Resources())


def record(path: str = "chosen") -> StageRecord:
    chosen = {"path": path, "digest": "d", "rows": 1, "shards": []}
    return StageRecord(
        node="prompts",
        stage="prompts",
        iteration=None,
        status="done",
        payload={},
        fingerprint="f",
        sources={},
        outputs={"metrics": {}, "chosen": chosen},
        volatile=VOLATILE,
    )


def stage(tmp_path: Path) -> StageDirectory:
    return RunDirectory(tmp_path).stage(Address("before", "prompts"))


def filled(directory: StageDirectory, text: str = "x") -> Path:
    partial = directory.open_partial(CUT)
    (partial / "chosen").write_text(text)
    return partial


def test_addresses() -> None:
    assert Address("body", "sample", 3).path == "0003/sample"
    assert Address("body", "sample", 3).label == "sample[3]"
    assert Address("after", "export").path == "after/export"


def test_commit_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    directory = stage(tmp_path)
    filled(directory)
    assert directory.record() is None
    directory.commit(record(), CONTRACTS["prompts"])
    assert directory.record() == record()
    assert sorted(p.name for p in directory.path.iterdir()) == ["chosen", "cut.json", "record.json"]
    assert not directory.partial.exists()


@pytest.mark.parametrize("path", ["missing", "/etc/passwd", "../prompts.partial/chosen"])
def test_outputs_outside_the_directory_are_refused(tmp_path: Path, path: str) -> None:
    directory = stage(tmp_path)
    filled(directory)
    with pytest.raises(RunError, match="not in its directory"):
        directory.commit(record(path), CONTRACTS["prompts"])
    assert directory.record() is None


def test_outputs_that_do_not_fit_the_contract_are_refused(tmp_path: Path) -> None:
    directory = stage(tmp_path)
    filled(directory)
    with pytest.raises(RunError, match="chosen"):
        directory.commit(record().model_copy(update={"outputs": {}}), CONTRACTS["prompts"])


def test_partial_work_is_kept_for_the_same_cut_only(tmp_path: Path) -> None:
    directory = stage(tmp_path)
    filled(directory, "first")
    assert (directory.open_partial(CUT) / "chosen").read_text() == "first"
    fresh = directory.open_partial({**CUT, "micro_batch": 4})
    assert not (fresh / "chosen").exists()
    assert (directory.path.with_name("prompts.stale-1") / "chosen").read_text() == "first"


def test_a_kill_just_before_the_rename_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = stage(tmp_path)
    filled(directory, "first")
    with monkeypatch.context() as broken:
        broken.setattr("os.replace", lambda *_: _killed())
        with pytest.raises(KeyboardInterrupt):
            directory.commit(record(), CONTRACTS["prompts"])
    assert (directory.open_partial(CUT) / "chosen").read_text() == "first"
    directory.commit(record(), CONTRACTS["prompts"])
    assert [p.name for p in directory.path.parent.iterdir()] == ["prompts"]


def _killed() -> None:
    raise KeyboardInterrupt


def test_a_kill_before_the_work_began_leaves_nothing_aside(tmp_path: Path) -> None:
    directory = stage(tmp_path)
    directory.partial.mkdir(parents=True)
    (directory.partial / "cut.json").write_text("")
    filled(directory)
    directory.commit(record(), CONTRACTS["prompts"])
    assert [p.name for p in directory.path.parent.iterdir()] == ["prompts"]


def test_old_results_move_aside_under_free_numbers(tmp_path: Path) -> None:
    directory = stage(tmp_path)
    for text in ("one", "two"):
        filled(directory, text)
        directory.commit(record(), CONTRACTS["prompts"])
        directory.move_aside()
    names = {p.name: (p / "chosen").read_text() for p in directory.path.parent.iterdir()}
    assert names == {"prompts.stale-1": "one", "prompts.stale-2": "two"}
    assert directory.move_aside() is None


def test_folder_without_record_is_no_result(tmp_path: Path) -> None:
    directory = stage(tmp_path)
    directory.path.mkdir(parents=True)
    filled(directory)
    assert directory.record() is None
    directory.commit(record(), CONTRACTS["prompts"])
    assert directory.record() is not None
    assert directory.path.with_name("prompts.stale-1").exists()


def test_broken_record_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    directory = stage(tmp_path)
    filled(directory)
    directory.commit(record(), CONTRACTS["prompts"])
    (directory.path / "record.json").write_text('{"format": 1')
    with pytest.raises(InputError, match=r"record\.json.*move"):
        directory.record()


def test_refs_are_located_in_optional_and_mapping_fields() -> None:
    table = RewardsTable(path="rewards", digest="d", rows=1, shards=(), weights={})
    inputs = SummariseInputs(before={"train": table}, after={})
    assert located(dict(inputs)["before"], Path("/run/x"))["train"]["path"] == "/run/x/rewards"
    outputs = SummariseOutputs(summary=FileRef(path="s.md", digest="d"))
    assert [ref.path for ref in refs(outputs)] == ["s.md"]
    assert [ref.path for ref in refs(inputs)] == ["rewards"]


def test_request_is_readable_again(tmp_path: Path) -> None:
    request = StageRequest(stage="prompts", node="prompts", config={"path": "x"}, inputs={}, directory=str(tmp_path))
    write_request(tmp_path, request)
    assert StageRequest.model_validate_json((tmp_path / "request.json").read_bytes()) == request


def test_second_process_is_told_who_holds_the_run_and_kill_frees_it(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from pipelines.lock import locked
with locked(Path({str(tmp_path)!r}), print):
    print("held", flush=True)
    time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            said: list[str] = []
            with (
                pytest.raises(UserError, match=rf"process {other.pid} on .* since 20"),
                locked(tmp_path, said.append, patience=0.3),
            ):
                pass
            assert len(said) == 1
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait()
    with locked(tmp_path, print, patience=5):
        pass


def test_lock_is_not_inherited_by_children(tmp_path: Path) -> None:
    with locked(tmp_path, print):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        with locked(tmp_path, print, patience=0):
            pass
    finally:
        child.kill()
        child.wait()


def test_unchanged_folder_is_not_hashed_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "weights"
    file.write_text("one")
    writes: list[int] = []
    known: dict[str, dict[str, str]] = {}
    first = AssetDigests(known, lambda: writes.append(1))(str(tmp_path / "model"))
    assert AssetDigests(known, lambda: writes.append(1))(str(tmp_path / "model")) == first
    assert len(writes) == 1
    file.write_text("other")
    assert AssetDigests(known, lambda: writes.append(1))(str(tmp_path / "model")) != first
    # Its place is not identity.
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    file = tmp_path / "elsewhere" / "weights"
    file.write_text("one")
    assert AssetDigests()(str(tmp_path / "elsewhere")) == first


def test_hub_id_stands_for_itself() -> None:
    assert AssetDigests()("owner/name") == "owner/name"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "{}",
        '{"flow": "f", "plan": []}',
        '{"flow": "f", "plan": {"nodes": 1}}',
        '{"flow": "f", "assets": "x"}',
        '{"flow": "f", "base": [1]}',
        "{",
    ],
)
def test_a_run_json_of_another_shape_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json cannot be read .*; move it away and run again to have it rebuilt"):
        RunDirectory.open(tmp_path)
