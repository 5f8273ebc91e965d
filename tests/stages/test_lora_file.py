"""A LoRA file is where training starts: the export of a run, and what PEFT itself saves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from schemas.contracts import ExportConfig, ExportInputs
from schemas.errors import InputError
from schemas.lora_file import lora_file
from schemas.models import LoraConfig, Sd3Model
from stages.engine.policy import Engine, Form
from stages.export import run
from stages.models.sd3 import Sd3
from tests.stages.chain import Chain, fixed_velocity
from tests.stages.test_export import context, loaded, output, policy
from tests.stages.test_lora import trained

TARGETS = ("attn.to_q", "attn.to_out.0", "proj_out")


def exported(sd3_folder: Path, folder: Path, **lora: Any) -> tuple[Path, Tensor]:
    """A LoRA in diffusers' form, and what it computes."""
    folder.mkdir()
    model = Sd3Model(path=str(sd3_folder), max_sequence_length=8, lora=LoraConfig(rank=4, **lora))
    made, moved = policy(folder / "policy", model)
    out = run(ExportConfig(model=model, format="lora"), ExportInputs(policy=made), context(folder))
    return folder / out.folder.path, moved


def saved_by_peft(sd3_folder: Path, folder: Path, **settings: Any) -> Tensor:
    transformer = SD3Transformer2DModel.from_pretrained(sd3_folder / "transformer").eval()
    model: Any = get_peft_model(transformer, PeftLora(r=4, lora_alpha=3, target_modules=list(TARGETS), **settings))
    generator = torch.Generator().manual_seed(2)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return output(model.eval())


def engine_of(sd3_folder: Path, start: Path, **lora: Any) -> Engine:
    settings = {"rank": 4, "start": str(start), **lora}
    return Engine(Sd3Model.model_validate({"path": str(sd3_folder), "lora": settings}), None, "cpu", Form())


def computed(engine: Engine, name: str = "raw") -> Tensor:
    with engine.weights.using(name):
        return output(engine.module)


@pytest.mark.parametrize("lora", [{}, {"alpha": 3.0, "targets": TARGETS}, {"dora": True}])
def test_an_export_is_a_start(sd3_folder: Path, tmp_path: Path, lora: dict[str, Any]) -> None:
    folder, moved = exported(sd3_folder, tmp_path / "made", **lora)
    bare = output(Sd3(Sd3Model(path=str(sd3_folder)), str(sd3_folder)).transformer())
    engine = engine_of(sd3_folder, folder, **lora)
    torch.testing.assert_close(computed(engine), moved, atol=1e-6, rtol=0)
    assert torch.equal(computed(engine, "base"), bare)
    trained(engine)
    engine.digest = None
    engine.load(None)
    torch.testing.assert_close(computed(engine), moved, atol=1e-6, rtol=0)
    single = engine_of(sd3_folder, folder / "pytorch_lora_weights.safetensors", **lora)
    assert torch.equal(computed(single), computed(engine))


def test_a_dora_export_loads_in_plain_diffusers(sd3_folder: Path, tmp_path: Path) -> None:
    folder, moved = exported(sd3_folder, tmp_path / "made", dora=True)
    pipeline = loaded(sd3_folder)
    pipeline.load_lora_weights(folder)
    torch.testing.assert_close(output(pipeline.transformer), moved, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dora", [False, True])
def test_what_peft_saves_is_a_start(sd3_folder: Path, tmp_path: Path, dora: bool) -> None:
    moved = saved_by_peft(sd3_folder, tmp_path / "peft", use_dora=dora, lora_dropout=0.1)
    engine = engine_of(sd3_folder, tmp_path / "peft", alpha=3.0, targets=TARGETS, dora=dora)
    torch.testing.assert_close(computed(engine), moved, atol=1e-6, rtol=0)


def test_the_untrained_model_is_exported_with_its_start(sd3_folder: Path, tmp_path: Path) -> None:
    folder, moved = exported(sd3_folder, tmp_path / "made")
    model = Sd3Model(path=str(sd3_folder), lora=LoraConfig(rank=4, start=str(folder)))
    run(ExportConfig(model=model), ExportInputs(policy=None), context(tmp_path))
    torch.testing.assert_close(output(loaded(tmp_path / "export").transformer), moved, atol=2e-6, rtol=0)


@pytest.mark.slow
def test_training_goes_on_from_a_start(sd3_folder: Path, tmp_path: Path) -> None:
    """The reference of the KL is the model without adapters, so the KL is not 0 at the first step."""
    update = {"loss": {"kind": "grpo", "clip": 1e-3}, "kl": {"weight": 0.1}}
    folder, _ = exported(sd3_folder, tmp_path / "made")
    chain = Chain(str(sd3_folder), str(tmp_path / "run"), lora=4, adapter={"start": str(folder)}, update=update)
    out = chain.run({})[0]
    fresh = Chain(str(sd3_folder), str(tmp_path / "fresh"), lora=4, update=update).run({})[0]
    assert out.metrics["train/kl"] > 1e-4
    assert fresh.metrics["train/kl"] == 0
    moved = fixed_velocity(chain.engine(out.policy)) - fixed_velocity(chain.engine())
    assert 0 < moved.norm() < 0.1


def refused(words: str, path: Path, targets: tuple[str, ...] = Sd3.lora_targets, **lora: Any) -> None:
    with pytest.raises(InputError, match=words):
        lora_file(path).check(LoraConfig(**{"rank": 4, **lora}), targets)


def test_what_differs_is_named(sd3_folder: Path, tmp_path: Path) -> None:
    folder, _ = exported(sd3_folder, tmp_path / "made", targets=TARGETS)
    same: dict[str, Any] = {"targets": TARGETS}
    refused(r"`model.lora.rank` is 8, but .* has 4; write `rank: 4`", folder, rank=8, **same)
    refused(r"`model.lora.alpha` is 3.0, but .* has 8.0; write `alpha: 8.0`", folder, alpha=3, **same)
    refused(r"`model.lora.dora` is True, but .* has False", folder, dora=True, **same)
    refused(r"`model.lora.targets` is \['attn.to_q'.*adapts \['attn.to_out.0', 'attn.to_q', 'proj_out'\]", folder)
    refused(r"targets` is \['attn.to_q'\], but", folder, targets=("attn.to_q",))
    lora_file(folder).check(LoraConfig(rank=4, targets=TARGETS), ())


def test_what_is_no_start(sd3_folder: Path, tmp_path: Path) -> None:
    folder, _ = exported(sd3_folder, tmp_path / "made")
    file = folder / "pytorch_lora_weights.safetensors"
    content = load_file(file)
    name = next(iter(content))

    def written(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
        save_file(tensors, tmp_path / "lora.safetensors", metadata)
        return tmp_path / "lora.safetensors"

    refused("no LoRA at .*; name a safetensors file", tmp_path)
    refused(r"holds 'text_encoder.a', which adapts no layer", written({**content, "text_encoder.a": torch.ones(1)}))
    refused("layers of the ranks", written({**content, name: torch.ones(3, 16)}))
    refused(
        "alpha_pattern", written(content, {"lora_adapter_metadata": json.dumps({"transformer.alpha_pattern": [1]})})
    )
    (tmp_path / "broken.safetensors").write_bytes(file.read_bytes()[:40])
    refused("is broken or no LoRA", tmp_path / "broken.safetensors")
    # Without a note of alpha, it is the rank, as for diffusers.
    lora_file(written(content)).check(LoraConfig(rank=4, alpha=4), Sd3.lora_targets)
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    shutil.copyfile(file, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InputError, match="broken"):
        engine_of(sd3_folder, tmp_path / "cut.safetensors")
    other = {key: torch.cat([value, value]) if "lora_B" in key else value for key, value in content.items()}
    with pytest.raises(InputError, match="made for another model"):
        engine_of(sd3_folder, written(other, metadata))
