"""Scoring beside sampling: the same records, and shards that were really scored before the samples were all there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def records(runs: Path, *sets: str) -> dict[str, Any]:
    """What a run of `smoke` leaves: records by place."""
    words = ["run", "smoke", "--plain", "--runs", str(runs), "--file", str(ROOT / "flows.yaml")]
    told = [word for setting in ("resources.shard_micro_batches=1", *sets) for word in ("--set", setting)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *words, *told], cwd=ROOT, env=env, capture_output=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    found = sorted((runs / "smoke").glob("*/*/record.json"))
    return {str(path.parent.relative_to(runs / "smoke")): json.loads(path.read_bytes()) for path in found}


def test_scores_made_beside_sampling_are_the_same(tmp_path: Path) -> None:
    apart = records(tmp_path / "apart")
    beside = records(tmp_path / "beside", "resources.overlap=true", "sample.per_prompt=4")
    assert apart.keys() == beside.keys()
    for place, record in beside.items():
        assert record["outputs"] == apart[place]["outputs"], place
        assert record["fingerprint"] == apart[place]["fingerprint"]
    early = [beside[f"{i:04d}/score"]["volatile"]["measured"].get("shards_scored_early", 0) for i in range(2)]
    assert max(early) > 0
    assert not list((tmp_path / "beside" / "smoke").glob("early/*"))
