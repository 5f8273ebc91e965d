from pathlib import Path

import pytest

from schemas.assets import digest_of, is_hub_id, resolve
from schemas.contracts import EncodeConfig, PromptsConfig, ScoreConfig
from schemas.errors import FlowFileError, InputError, RewardflowError, RunError, UserError, closest
from schemas.fingerprint import ABSENT, assets, canonical, diff, fingerprint, identity
from schemas.models import LoraConfig, Sd3Model
from schemas.rewards import JpegSizeReward


def test_canonical_json_knows_no_order() -> None:
    assert canonical({"b": 1, "a": [1.0, None]}) == '{"a":[1.0,null],"b":1}'
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_canonical_json_refuses_what_has_no_one_text() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical({"a": float("nan")})
    with pytest.raises(TypeError):
        canonical({"a": {1, 2}})


def test_identity_of_an_asset_is_its_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prompts.txt").write_text("one\n")
    same = [identity(PromptsConfig(path=str(tmp_path / n / "prompts.txt")), lambda p: digest_of(Path(p))) for n in "ab"]
    assert same[0] == same[1]
    (tmp_path / "b" / "prompts.txt").write_text("two\n")
    assert identity(PromptsConfig(path=str(tmp_path / "b" / "prompts.txt")), lambda p: digest_of(Path(p))) != same[0]


def test_assets_are_found_in_nested_configs() -> None:
    config = EncodeConfig(model=Sd3Model(path="a/b", lora=LoraConfig()))
    assert list(assets(config)) == [("model.path", "a/b")]
    assert identity(config, lambda path: f"digest of {path}")["model"]["path"] == "digest of a/b"
    assert list(assets(ScoreConfig(rewards={"x": JpegSizeReward()}))) == []


def test_digest_of_a_folder_is_of_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.json").write_text("1")
    first = digest_of(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "y").write_text("hidden")
    assert digest_of(tmp_path) == first
    (tmp_path / "a" / "x.json").rename(tmp_path / "a" / "z.json")
    assert digest_of(tmp_path) != first


def test_resolve_paths(tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name", tmp_path) == str(tmp_path / "owner" / "name")
    assert resolve("owner/other", tmp_path) == "owner/other"
    assert resolve("./other", tmp_path) == str(tmp_path / "other")
    assert resolve("/x/y", tmp_path) == "/x/y"
    assert resolve("package:schemas/flow.py", tmp_path).endswith("schemas/flow.py")
    with pytest.raises(InputError, match="no package 'nowhere_at_all'"):
        resolve("package:nowhere_at_all/x", tmp_path)


@pytest.mark.parametrize(
    ("path", "hub"), [("a/b", True), ("a/b.c", True), ("a", False), ("./b", False), ("a/b/c", False)]
)
def test_hub_ids(path: str, hub: bool) -> None:
    assert is_hub_id(path) is hub


def test_diff_names_fields() -> None:
    old = {"config": {"clip": 1e-4, "steps": 2, "gone": 1}, "stage": "update"}
    new = {"config": {"clip": 1e-3, "steps": 2, "fresh": 5}, "stage": "update"}
    assert diff(old, new) == [("config.clip", 1e-4, 1e-3), ("config.fresh", ABSENT, 5), ("config.gone", 1, ABSENT)]


def test_a_new_field_at_its_default_is_no_change() -> None:
    old, new = {"config": {"a": 1}}, {"config": {"a": 1, "fresh": 5}}
    assert diff(old, new, {"config": {"fresh": 5}}) == []
    assert diff(old, new, {"config": {"fresh": 6}}) == [("config.fresh", ABSENT, 5)]
    assert diff({"a": 5}, {"a": 6}, {"a": 6}) == [("a", 5, 6)], "a changed default is a change"


def test_true_is_not_one() -> None:
    assert diff({"a": 1}, {"a": True}) == [("a", 1, True)]


def test_errors_say_their_place() -> None:
    error = FlowFileError("wrong", file="f.yaml", line=3, column=5, field="a.b")
    assert str(error) == "f.yaml:3:5: a.b: wrong"
    assert isinstance(error, UserError)
    assert not issubclass(RunError, UserError)
    assert issubclass(RunError, RewardflowError)


def test_closest_names() -> None:
    assert closest("sampel", ["score", "sample"]) == "Known: sample, score. Did you mean 'sample'?"
    assert closest("x", []) == "Known: none."
