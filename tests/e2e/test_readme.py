"""What the README says is so: files, kinds, columns, and its snippet of plain diffusers."""

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from pipelines.load import load
from schemas import tables
from schemas.losses import KlConfig
from schemas.sampling import Window
from stages.losses import LOSSES
from stages.models import ADAPTERS
from stages.rewards import REWARDS
from stages.sde import STEPPERS
from stages.sde.ode import SOLVERS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(first: str, table: str) -> str:
    """The other cells of the row that begins with this cell, in the table whose head begins with `table`."""
    body = README[README.index(f"| {table} |") :]
    found = re.search(rf"^\| {re.escape(first)} \| (.*) \|$", body, re.MULTILINE)
    assert found, first
    return found[1]


def words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_every_path_it_names_is_there() -> None:
    named = re.findall(r"(?:schemas|stages|pipelines)/[\w/.-]*|flows\.yaml", README)
    assert len(named) > 15
    missing = [path for path in named if "NAME" not in path and not (ROOT / path).exists()]
    assert missing == []


def test_every_kind_it_names_is_there_and_none_is_left_out() -> None:
    assert words(row("models", "shelf")) == set(ADAPTERS)
    assert words(row("losses", "shelf")) == set(LOSSES)
    assert words(row("rewards", "shelf")) == {*REWARDS, "external"}
    assert words(row("samplers that give a log-prob", "shelf")) == set(STEPPERS)
    assert set(SOLVERS) <= words(row("samplers that give none", "shelf"))
    assert words(row("windows of stochastic steps", "shelf")) == {
        kind.model_fields["kind"].default for kind in get_args(get_args(Window)[0])
    }
    assert words(row("KL to the base", "shelf")) == set(get_args(KlConfig.model_fields["kind"].annotation))


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("prompts", tables.prompts_schema()),
        ("samples", tables.samples_schema()),
        ("trajectory", tables.trajectory_schema((4, 8, 8), 2, "float32")),
        ("advantages", tables.advantages_schema()),
    ],
)
def test_the_columns_of_a_table(name: str, schema: Any) -> None:
    named = [column for group in re.findall(r"`([a-z_ ]+)`", row(name, "table")) for column in group.split()]
    assert [column for column in schema.names if column not in named] == []


def test_the_flows_it_runs_are_in_the_file() -> None:
    files = (ROOT / "flows.yaml", ROOT / "pipelines" / "templates" / "flows.yaml")
    flows = {name for file in files for name in load(file).spec.flows}
    named = set(re.findall(r"rewardflow (?:plan|run|sweep) ([a-z_]+)", README))
    assert named
    assert named <= flows


def test_its_snippet_draws_a_picture_with_plain_diffusers() -> None:
    snippet = re.search(r"```python\n(from diffusers import StableDiffusion3Pipeline.*?)```", README, re.DOTALL)
    assert snippet
    code = snippet[1].replace("runs/demo/after/export/export", str(ROOT / "stages" / "shapes" / "pipeline"))
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    picture = names["picture"]
    assert isinstance(picture, Image.Image)
    assert picture.size == (32, 32)
    assert np.asarray(picture).std() > 2
