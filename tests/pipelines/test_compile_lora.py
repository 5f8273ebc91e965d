"""What a plan says of `model.lora` before anything runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.decide import defaults_of
from pipelines.digests import AssetDigests
from schemas.fingerprint import diff, identity
from schemas.lora_file import DIFFUSERS
from tests.pipelines.test_compile_rules import GRPO, NFT, PER_PROMPT, SDE, compiled, refused

Write = Callable[..., Path]
MODEL = "model: {kind: sd3, path: model}"
TO_NFT = ((GRPO, NFT), (PER_PROMPT, "weights: old"), (SDE, "sampler: {kind: ode}"))


def lora(settings: str) -> tuple[str, str]:
    return MODEL, f"model: {{kind: sd3, path: model, lora: {{{settings}}}}}"


def written(folder: Path, rank: int = 4, seed: int = 0) -> Path:
    """A LoRA of one layer: a header and as many bytes as it says."""
    folder.mkdir(exist_ok=True)
    shapes = {"lora_A.weight": [rank, 8], "lora_B.weight": [8, rank]}
    header: dict[str, object] = {"__metadata__": {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8})}}
    for place, (part, shape) in enumerate(shapes.items()):
        span = [place * rank * 32, (place + 1) * rank * 32]
        header[f"transformer.blocks.0.attn.to_q.{part}"] = {"dtype": "F32", "shape": shape, "data_offsets": span}
    text = json.dumps(header).encode()
    (folder / DIFFUSERS).write_bytes(len(text).to_bytes(8, "little") + text + bytes([seed]) * rank * 64)
    return folder


def test_a_replayed_log_prob_allows_no_dropout(flow_file: Write) -> None:
    message = refused(flow_file(lora("dropout: 0.1")))
    assert "update.model.lora.dropout: grpo replays log-probs, which dropout 0.1 would change" in message
    assert "leave it out, or use a loss on final latents: nft or sft" in message
    assert compiled(flow_file(*TO_NFT, lora("dropout: 0.1"))).warnings == ()


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_dropout_is_a_share(flow_file: Write, share: float) -> None:
    assert "lora.dropout" in refused(flow_file(*TO_NFT, lora(f"dropout: {share}")))


def test_a_start_is_found_and_fits(flow_file: Write, tmp_path: Path) -> None:
    written(tmp_path / "start")
    plan = compiled(flow_file(lora("rank: 4, targets: [attn.to_q], start: start")))
    model = dict(plan.nodes["update"].config)["model"]
    assert model.lora.start == str(tmp_path / "start")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("start: nowhere", "model.lora.start: no LoRA at"),
        ("start: model", "no LoRA at .*; name a safetensors file, or a folder with pytorch_lora_weights"),
        ("start: prompts.txt", "prompts.txt is broken or no LoRA"),
        ("start: start, rank: 8", "`model.lora.rank` is 8, but .* has 4; write `rank: 4`"),
        ("start: start, rank: 4, alpha: 2", "`model.lora.alpha` is 2.0, but .* has 8.0"),
        ("start: start, rank: 4", "`model.lora.targets` is .*; write `targets: .'attn.to_q'.`"),
        ("start: start, rank: 4, init: gaussian", "init 'gaussian' has no use beside start 'start'"),
    ],
)
def test_a_start_that_does_not_fit(flow_file: Write, tmp_path: Path, settings: str, words: str) -> None:
    written(tmp_path / "start")
    message = refused(flow_file(lora(settings)))
    assert re.search(words, message), message


def test_the_content_of_a_start_is_identity(flow_file: Write, tmp_path: Path) -> None:
    written(tmp_path / "start")
    node = compiled(flow_file(lora("rank: 4, targets: [attn.to_q], start: start"))).nodes["update"]
    first = identity(node.config, AssetDigests())
    written(tmp_path / "start", seed=1)
    ((field, _, _),) = diff(first, identity(node.config, AssetDigests()))
    assert field == "model.lora.start"


def test_a_record_from_before_these_options_is_no_change(flow_file: Write) -> None:
    node = compiled(flow_file(lora("rank: 4"))).nodes["update"]
    wanted = {"config": identity(node.config, AssetDigests())}
    old = json.loads(json.dumps(wanted))
    for name in ("dropout", "init", "dora", "start", "start_revision"):
        del old["config"]["model"]["lora"][name]
    assert diff(old, wanted, defaults_of(node)) == []
