"""Exports load in plain diffusers and draw what the policy drew: equality of outputs, never 'the file loads'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from safetensors import safe_open
from torch import Tensor

from schemas.artifacts import PolicyRef
from schemas.contracts import ExportConfig, ExportInputs
from schemas.engine import Resources
from schemas.errors import InputError
from schemas.models import LoraConfig, Sd3Model
from stages.context import StageContext
from stages.engine.lora import make_trainable
from stages.export import run
from stages.models.sd3 import Sd3
from stages.store import tensors


def context(directory: Path) -> StageContext:
    return StageContext(directory, "export", 0, None, Resources(), 8)


def output(transformer: torch.nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        return transformer(
            hidden_states=torch.randn(2, 4, 8, 8, generator=generator),
            encoder_hidden_states=torch.randn(2, 16, 32, generator=generator),
            pooled_projections=torch.randn(2, 32, generator=generator),
            timestep=torch.tensor([900.0, 300.0]),
            return_dict=False,
        )[0]


def policy(folder: Path, model: Sd3Model) -> tuple[PolicyRef, Tensor]:
    """Weights moved at random from the base, as the set `ema`, and what they compute."""
    folder.mkdir()
    transformer: Any = Sd3(model, str(model.path)).transformer()
    base = output(transformer)
    make_trainable(transformer, model.lora, Sd3.lora_targets)
    generator = torch.Generator().manual_seed(7)
    trained = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    digest = tensors.save(folder / "ema.safetensors", {name: p.data for name, p in trained.items()})
    (folder / "policy.json").write_text(json.dumps({"digests": {"ema": digest}}))
    kind = "full" if model.lora is None else "lora"
    moved = output(transformer)
    assert (moved - base).abs().max() > 0.01
    return PolicyRef(path=str(folder), digest=digest, trainable=kind, sets=("raw", "ema"), updates=1), moved


def loaded(folder: Path) -> Any:
    return StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)


def lora_model(folder: Path, **settings: Any) -> Sd3Model:
    return Sd3Model(path=str(folder), max_sequence_length=8, lora=LoraConfig(rank=4, **settings))


@pytest.mark.parametrize("settings", [{}, {"alpha": 3.0}, {"targets": ("attn.to_q", "proj_out")}])
def test_lora_keeps_its_strength(sd3_folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    model = lora_model(sd3_folder, **settings)
    trained, moved = policy(tmp_path / "policy", model)
    outputs = run(ExportConfig(model=model, format="lora"), ExportInputs(policy=trained), context(tmp_path))
    pipeline = loaded(sd3_folder)
    pipeline.load_lora_weights(tmp_path / outputs.folder.path)
    torch.testing.assert_close(output(pipeline.transformer), moved, atol=1e-6, rtol=0)
    assert (tmp_path / outputs.folder.path / "pytorch_lora_weights.safetensors").is_file()


def test_the_same_policy_is_the_same_file(sd3_folder: Path, tmp_path: Path) -> None:
    model = lora_model(sd3_folder)
    trained, _ = policy(tmp_path / "policy", model)
    orders = {
        run(ExportConfig(model=model, format="lora"), ExportInputs(policy=trained), context(tmp_path)).folder.digest
        for _ in range(6)  # the library's own order of metadata is one of two, at random
    }
    assert len(orders) == 1
    with safe_open(tmp_path / "export" / "pytorch_lora_weights.safetensors", framework="pt") as stored:
        targets = json.loads(stored.metadata()["lora_adapter_metadata"])["transformer.target_modules"]
    assert targets == sorted(targets)  # a set, whose order changes from process to process


@pytest.mark.parametrize("kind", ["lora", "full", "base"])
def test_a_pipeline_holds_the_policy(sd3_folder: Path, tmp_path: Path, kind: str) -> None:
    model = lora_model(sd3_folder) if kind == "lora" else Sd3Model(path=str(sd3_folder), max_sequence_length=8)
    trained, moved = policy(tmp_path / "policy", model)
    if kind == "base":
        trained, moved = None, output(Sd3(model, str(sd3_folder)).transformer())
    outputs = run(ExportConfig(model=model), ExportInputs(policy=trained), context(tmp_path))
    pipeline = loaded(tmp_path / outputs.folder.path)
    torch.testing.assert_close(output(pipeline.transformer), moved, atol=2e-6, rtol=0)
    assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())
    texts = [file.read_text() for file in (tmp_path / outputs.folder.path).rglob("*.json")]
    assert not any(str(sd3_folder) in text for text in texts)
    again = Sd3(model, str(tmp_path / outputs.folder.path))
    (row,) = again.encode(["two"], torch.device("cpu"))
    (same,) = Sd3(model, str(sd3_folder)).encode(["two"], torch.device("cpu"))
    assert all(torch.equal(row[name], same[name]) for name in row)


def test_float16_halves_every_file(sd3_folder: Path, tmp_path: Path) -> None:
    model = Sd3Model(path=str(sd3_folder))
    trained, moved = policy(tmp_path / "policy", model)
    outputs = run(ExportConfig(model=model, dtype="float16"), ExportInputs(policy=trained), context(tmp_path))
    folder = tmp_path / outputs.folder.path
    files = sorted(folder.rglob("*.safetensors"))
    assert [file.parent.name for file in files] == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    for file in files:
        with safe_open(file, framework="pt") as stored:
            kinds = {stored.get_tensor(name).dtype for name in stored.keys()}  # noqa: SIM118 - no mapping
        assert torch.float32 not in kinds
        assert torch.float16 in kinds
    torch.testing.assert_close(output(loaded(folder).transformer), moved, atol=5e-3, rtol=0)


def test_float32_of_a_float16_source_loads_without_a_dtype(sd3_folder: Path, tmp_path: Path) -> None:
    model = Sd3Model(path=str(sd3_folder))
    half = tmp_path / "half"
    half.mkdir()
    run(ExportConfig(model=model, dtype="float16"), ExportInputs(policy=None), context(half))
    source = Sd3Model(path=str(half / "export"), max_sequence_length=8)
    run(ExportConfig(model=source), ExportInputs(policy=None), context(tmp_path))
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(tmp_path / "export", text_encoder_3=None, tokenizer_3=None)
    kinds = {name: part.dtype for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    assert kinds == dict.fromkeys(kinds, torch.float32)


def test_what_a_stopped_export_left_is_replaced(sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "half.safetensors").write_bytes(b"broken")
    config = ExportConfig(model=Sd3Model(path=str(sd3_folder)))
    first = run(config, ExportInputs(policy=None), context(tmp_path))
    assert not (tmp_path / "export" / "half.safetensors").exists()
    assert run(config, ExportInputs(policy=None), context(tmp_path)) == first


def test_wrong_orders(sd3_folder: Path, tmp_path: Path) -> None:
    lora, full = lora_model(sd3_folder), Sd3Model(path=str(sd3_folder))
    trained, _ = policy(tmp_path / "policy", lora)
    whole, _ = policy(tmp_path / "whole", full)

    def refused(words: str, given: PolicyRef | None, **settings: Any) -> None:
        with pytest.raises(InputError, match=words):
            run(ExportConfig(**settings), ExportInputs(policy=given), context(tmp_path))

    refused(r"`format: lora`.*untrained model.*`format: pipeline`", None, model=lora, format="lora")
    refused(r"`format: lora`.*full weights", whole, model=full, format="lora")
    refused(r"no weights 'old'.*raw, ema.*`weights`", trained, model=lora, weights="old")
    refused(r"`model\.lora` is missing", trained, model=full)
    refused(r"does not fit the model.*names differ", trained, model=lora_model(sd3_folder, targets=("attn.to_q",)))
    index = json.loads((sd3_folder / "model_index.json").read_text())
    assert index["transformer"][1] == SD3Transformer2DModel.__name__
