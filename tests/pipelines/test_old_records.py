"""Records that earlier versions wrote, kept as they were: every later version must read and place them."""

from pathlib import Path

import pytest

from pipelines.decide import decide
from pipelines.rundir import located, outputs_of
from schemas.contracts import CONTRACTS
from schemas.fingerprint import fingerprint
from schemas.record import StageRecord

RECORDS = sorted((Path(__file__).parent / "records").glob("*.json"))


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_an_old_record_is_read(file: Path, tmp_path: Path) -> None:
    record = StageRecord.model_validate_json(file.read_bytes())
    outputs = outputs_of(record, CONTRACTS[record.stage], tmp_path)
    assert outputs.metrics == record.outputs["metrics"] != {}
    assert all(str(tmp_path) in str(located(value, tmp_path)) for name, value in outputs if name != "metrics")
    assert fingerprint(record.payload) == record.fingerprint
    assert CONTRACTS[record.stage].config.model_validate(record.payload["config"])
    assert decide(record, record.payload, {}, "stop", record.node, lambda _: False).action == "reuse"


def test_there_is_one_of_each_kind_of_table_and_a_policy() -> None:
    stages = {StageRecord.model_validate_json(file.read_bytes()).stage for file in RECORDS}
    assert stages == {"sample", "score", "advantage", "update"}
