from pathlib import Path
from typing import Any

import pytest

from pipelines.decide import OnChange, decide, defaults_of, payload
from pipelines.plan import PlanNode
from schemas.contracts import AdvantageConfig, PromptsConfig, ScoreConfig, UpdateConfig
from schemas.doors import StageConfig
from schemas.engine import Resources
from schemas.errors import StaleRecord
from schemas.losses import GrpoLoss, OptimizerConfig
from schemas.models import Sd3Model
from schemas.record import StageRecord, Volatile
from schemas.rewards import JpegSizeReward


def node(stage: str, config: StageConfig) -> PlanNode:
    return PlanNode(stage, stage, "body", config, {})


def wanted(n: PlanNode, inputs: dict[str, Any] | None = None, iteration: int | None = 3) -> dict[str, Any]:
    return payload(n, inputs or {}, 7, iteration, lambda path: f"digest of {Path(path).name}")


def recorded(n: PlanNode, body: dict[str, Any]) -> StageRecord:
    return StageRecord(
        node=n.name,
        stage=n.stage,
        iteration=3,
        status="done",
        payload=body,
        fingerprint="",
        sources={},
        outputs={},
        volatile=Volatile(started="", seconds=0.0, host="", process=0, resources=Resources()),
    )


def action(
    n: PlanNode, old: dict[str, Any], new: dict[str, Any], on_change: OnChange = "stop", follow: bool = False
) -> str:
    return decide(recorded(n, old), new, defaults_of(n), on_change, f"{n.name}[3]", lambda _: follow).action


def test_payload_has_seed_and_iteration_where_the_stage_varies_by_them() -> None:
    assert {"seed", "iteration"} & wanted(node("prompts", PromptsConfig(path="/a/p.txt"))).keys() == set()
    chosen = wanted(node("prompts", PromptsConfig(path="/a/p.txt", choose=2)))
    assert (chosen["seed"], chosen["iteration"]) == (7, 3)


def test_place_of_an_asset_is_not_identity() -> None:
    here, there = (wanted(node("prompts", PromptsConfig(path=path))) for path in ("/a/p.txt", "/b/p.txt"))
    assert here == there
    assert here["config"]["path"] == "digest of p.txt"


def test_order_of_named_things_is_not_identity() -> None:
    one, two = JpegSizeReward(), JpegSizeReward(weight=2.0)
    first = node("score", ScoreConfig(rewards={"a": one, "b": two}))
    second = node("score", ScoreConfig(rewards={"b": two, "a": one}))
    assert action(first, wanted(first), wanted(second)) == "reuse"


def test_new_field_at_its_default_is_no_change_but_at_another_value_is() -> None:
    n = node("advantage", AdvantageConfig())
    old = wanted(n)
    del old["config"]["flat"]
    assert action(n, old, wanted(n)) == "reuse"
    other = node("advantage", AdvantageConfig(flat=0.5))
    with pytest.raises(StaleRecord, match=r"config\.flat: \(absent\) -> 0\.5"):
        action(other, old, wanted(other))


def test_new_nested_fields_at_their_defaults_are_no_change() -> None:
    model = Sd3Model(path="/m")
    n = node("update", UpdateConfig(model=model, loss=GrpoLoss(), optimizer=OptimizerConfig(weight_decay=0.1)))
    old = wanted(n)
    del old["config"]["optimizer"]["betas"], old["config"]["kl"], old["config"]["loss"]["clip"]
    assert action(n, old, wanted(n)) == "reuse"
    plain = node("update", UpdateConfig(model=model, loss=GrpoLoss()))
    old = wanted(plain)
    del old["config"]["optimizer"]
    assert action(plain, old, wanted(plain)) == "reuse"
    del old["config"]["loss"]
    with pytest.raises(StaleRecord, match=r"config\.loss"):
        action(plain, old, wanted(plain))


def test_changed_default_and_unknown_recorded_field_are_changes() -> None:
    n = node("advantage", AdvantageConfig())
    old = wanted(n)
    old["config"]["clamp"] = 4.0
    with pytest.raises(StaleRecord, match=r"config\.clamp: 4\.0 -> 5\.0"):
        action(n, old, wanted(n))
    old = wanted(n)
    old["config"]["gone"] = 1
    with pytest.raises(StaleRecord, match=r"config\.gone: 1 -> \(absent\)"):
        action(n, old, wanted(n))


def test_the_message_names_stage_and_remedies() -> None:
    n = node("advantage", AdvantageConfig())
    with pytest.raises(StaleRecord) as caught:
        action(n, {**wanted(n), "version": 0}, wanted(n))
    for word in ("advantage[3]", "version: 0 -> 1", "--on-change rerun", "--on-change keep", "advantage.stale-N"):
        assert word in str(caught.value)


def test_choices_on_a_difference() -> None:
    n = node("advantage", AdvantageConfig())
    old = {**wanted(n), "version": 0}
    assert action(n, old, wanted(n), "keep") == "reuse"
    assert action(n, old, wanted(n), "rerun") == "rerun"


def test_changed_inputs_are_followed_only_where_the_runner_expects_them() -> None:
    n = node("advantage", AdvantageConfig())
    old, new = wanted(n, {"rewards": {"digest": "a"}}), wanted(n, {"rewards": {"digest": "b"}})
    assert action(n, old, new, follow=True) == "rerun"
    with pytest.raises(StaleRecord, match=r"inputs\.rewards\.digest: a -> b"):
        action(n, old, new)
    with pytest.raises(StaleRecord):
        action(n, {**old, "version": 0}, new, follow=True)
