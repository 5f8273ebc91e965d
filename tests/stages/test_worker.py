"""What a worker does around a stage."""

import gzip
import json
from pathlib import Path
from typing import Any

from schemas.artifacts import PromptsTable
from schemas.record import Answer, StageRequest
from schemas.tables import prompts_schema
from stages.store.tables import TableWriter
from stages.worker import Worker


def encoded(folder: Path, directory: Path, iteration: int, **resources: Any) -> Answer:
    """An encode stage of one prompt."""
    directory.mkdir()
    writer = TableWriter(directory, "chosen", prompts_schema())
    writer.write(0, {"prompt_id": ["p"], "prompt": ["one"], "metadata": ["{}"]})
    prompts = writer.ref(PromptsTable, 1).under(directory)
    request = StageRequest.model_validate(
        {
            "stage": "encode",
            "node": "encode",
            "config": {"model": {"kind": "sd3", "path": str(folder), "max_sequence_length": 8}},
            "inputs": {"prompts": prompts.model_dump()},
            "directory": str(directory),
            "iteration": iteration,
            "resources": {"device": "cpu", **resources},
        }
    )
    return Worker().perform(request, lambda done, total, unit: None)


def test_chosen_iterations_write_a_trace(sd3_folder: Path, tmp_path: Path) -> None:
    profile = {"kind": "torch", "iterations": [3]}
    encoded(sd3_folder, tmp_path / "two", 2, profile=profile)
    assert not (tmp_path / "two" / "profile").exists()
    answer = encoded(sd3_folder, tmp_path / "three", 3, profile=profile)
    assert answer.outputs["embeddings"]["rows"] == 2
    with gzip.open(tmp_path / "three" / "profile" / "rank0.json.gz", "rt") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert "aten::addmm" in names


def test_an_answer_tells_the_rest_of_the_time_and_the_memory(sd3_folder: Path, tmp_path: Path) -> None:
    answer = encoded(sd3_folder, tmp_path / "encode", 0)
    assert answer.measured["time/other"] >= 0
    assert answer.measured["memory/peak_bytes"] > 1e6
