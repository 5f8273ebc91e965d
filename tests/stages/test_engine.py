"""What the engine promises of numbers and memory; that its results do not depend on warmth is in test_update."""

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection

from stages.engine import checkpoint
from stages.models import Conditioning
from stages.models.sd3 import Sd3
from tests.stages.chain import SDE, Chain

GRPO = {"loss": {"kind": "grpo", "clip": 1e-3}}


def chain(folder: Path, directory: Path, lora: int | None = 2, dtype: str = "float32") -> Chain:
    return Chain(str(folder), str(directory), lora=lora, dtype=dtype, sampler=SDE, update=GRPO)


def given(batch: int) -> Conditioning:
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(batch, 16, 32, generator=generator)
    return Conditioning({"embeds": embeds, "pooled": torch.randn(batch, 32, generator=generator)})


@pytest.mark.parametrize("lora", [2, None])
def test_bfloat16_computes_in_bfloat16_and_trains_in_float32(
    sd3_folder: Path, tmp_path: Path, lora: int | None
) -> None:
    made, residents = chain(sd3_folder, tmp_path, lora, "bfloat16"), {}
    out = made.run(residents)[-1]
    engine = residents["engine"][1]
    weights = engine.weights
    assert {p.dtype for p in weights.parameters.values()} == {torch.float32}
    frozen = {p.dtype for p in engine.module.parameters() if not p.requires_grad}
    assert frozen == (set() if lora is None else {torch.bfloat16})
    assert {m.dtype for kind in engine.optimizer.state().values() for m in kind.values()} == {torch.float32}
    for name in ("raw", "optimizer"):
        saved = checkpoint.load(out.policy, name)
        assert {value.dtype for value in saved.values()} == {torch.float32}
        # Not numbers of bfloat16 in a wider coat.
        assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())

    seen: list[torch.dtype] = []
    block = next(m for n, m in engine.module.named_modules() if n.endswith("attn.to_q"))
    hook = block.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.no_grad():
        velocity = engine.velocity(torch.zeros(2, 4, 8, 8), torch.full((2,), 500.0), given(2), 1.0)
    hook.remove()
    assert set(seen) == {torch.bfloat16}
    assert velocity.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_time_is_never_cast(sd3_folder: Path, tmp_path: Path, dtype: str) -> None:
    engine = chain(sd3_folder, tmp_path, dtype=dtype).engine()
    seen: list[Tensor] = []
    projection = next(m for n, m in engine.module.named_modules() if n.endswith("time_proj"))
    hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        engine.velocity(torch.zeros(1, 4, 8, 8), torch.tensor([857.69]), given(1), 1.0)
    hook.remove()
    (time,) = seen
    assert time.dtype == torch.float32
    assert time.item() == torch.tensor(857.69).item()  # bfloat16 would make it 856


@pytest.mark.parametrize("lora", [2, None])
def test_a_swapped_set_is_swapped_back_whatever_happens(sd3_folder: Path, tmp_path: Path, lora: int | None) -> None:
    made = chain(sd3_folder, tmp_path, lora)
    engine = made.engine(made.run()[-1].policy)
    before, places = engine.weights.copy_raw(), {n: p.data_ptr() for n, p in engine.weights.raw().items()}
    inputs = (torch.zeros(1, 4, 8, 8), torch.tensor([500.0]), given(1), 1.0)
    with torch.no_grad():
        trained = engine.velocity(*inputs)

    def fail_amid() -> None:
        with engine.weights.using("base"), torch.no_grad():
            assert not torch.equal(engine.velocity(*inputs), trained)
            raise RuntimeError("amid")

    with pytest.raises(RuntimeError, match="amid"):
        fail_amid()
    after = engine.weights.raw()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {n: p.data_ptr() for n, p in after.items()} == places
    assert all(p.requires_grad for p in engine.weights.parameters.values())
    with torch.no_grad():
        assert torch.equal(engine.velocity(*inputs), trained)
    engine.velocity(*inputs).sum().backward()
    assert all(p.grad is not None for p in engine.weights.parameters.values())


def test_text_encoders_are_gone_before_the_transformer_comes(
    sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, before, seen = chain(sd3_folder, tmp_path), encoders(), []
    encode, shell = Sd3.encode, Sd3.shell

    def encoding(self: Sd3, prompts: Sequence[str], device: torch.device) -> list[dict[str, Tensor]]:
        pipeline = self._text_pipeline()
        seen.append(("encode", encoders() - before))
        del pipeline
        return encode(self, prompts, device)

    def transforming(self: Sd3) -> nn.Module:
        seen.append(("transformer", encoders() - before))
        return shell(self)

    monkeypatch.setattr(Sd3, "encode", encoding)
    monkeypatch.setattr(Sd3, "shell", transforming)
    made.sample(made.context("sample", 0))
    assert seen[:2] == [("encode", 2), ("transformer", 0)]


def encoders() -> int:
    """Text encoders in memory, those that wait for the garbage collector among them."""
    return sum(issubclass(type(thing), CLIPTextModelWithProjection) for thing in gc.get_objects())
