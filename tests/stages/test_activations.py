"""The closed form of `plan`'s memory against torch: what autograd saves, and what is alive at once, on real models."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pipelines.activations import Activations, family_of
from schemas.models import Sd3Model
from stages.engine.dropout import dropout
from stages.engine.lora import make_trainable

BATCH, JOINT, POOLED = 2, 64, 32
# (heads, width of a head, layers, side of the latents, text tokens, dual attention, norm of queries and keys)
SIZES: dict[str, tuple[int, int, int, int, int, tuple[int, ...], str | None]] = {
    "narrow": (4, 12, 2, 32, 80, (), None),
    "long text": (4, 16, 3, 20, 140, (), "rms_norm"),
    "dual": (2, 32, 3, 24, 40, (0, 1), "rms_norm"),
}
TRAINED: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"rank": 4},
    "wide lora": {"rank": 8, "targets": ["attn.to_q", "ff.net.0.proj", "ff.net.2", "norm1.linear", "attn2.to_k"]},
    "dropout": {"rank": 4, "dropout": 0.1},
}


class Alive(TorchDispatchMode):
    """The most bytes of tensors made inside that lived at once."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()
        self.own, self.now, self.peak = own, 0, 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            storage = value.untyped_storage() if isinstance(value, Tensor) else None
            if storage is None or storage in self._known or storage.data_ptr() in self.own:
                continue
            self._known[storage] = True
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage.nbytes())
        return out

    def _drop(self, size: int) -> None:
        self.now -= size


def config_of(size: str) -> dict[str, Any]:
    heads, head, layers, side, _, dual, norm = SIZES[size]
    sizes = {"num_attention_heads": heads, "attention_head_dim": head, "num_layers": layers, "sample_size": side}
    text = {"joint_attention_dim": JOINT, "pooled_projection_dim": POOLED, "caption_projection_dim": heads * head}
    form = {"patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 64}
    return {**sizes, **text, **form, "dual_attention_layers": dual, "qk_norm": norm}


def built(size: str, model: Sd3Model) -> SD3Transformer2DModel:
    """In one dtype, as a block is when it is gathered."""
    module = SD3Transformer2DModel(**config_of(size)).requires_grad_(False)
    make_trainable(module, model.lora, model.lora_targets)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(getattr(torch, model.dtype))
    return module.eval()


def call(module: SD3Transformer2DModel, size: str, model: Sd3Model) -> Tensor:
    side, tokens, dtype = *SIZES[size][3:5], getattr(torch, model.dtype)
    with dropout(module, range(BATCH)):
        return module(
            hidden_states=torch.ones(BATCH, 4, side, side, dtype=dtype),
            encoder_hidden_states=torch.ones(BATCH, tokens, JOINT, dtype=dtype),
            pooled_projections=torch.ones(BATCH, POOLED, dtype=dtype),
            timestep=torch.full((BATCH,), 500.0),
            return_dict=False,
        )[0]


def own(module: SD3Transformer2DModel) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in [*module.parameters(), *module.buffers()]}


def saved(size: str, model: Sd3Model, checkpointing: bool) -> float:
    """Bytes a sample that autograd keeps, each storage once."""
    module = built(size, model)
    if checkpointing:
        module.enable_gradient_checkpointing()
    mine, found, alive = own(module), dict[int, int](), list[Tensor]()

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in mine:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        call(module, size, model)
    return sum(found.values()) / BATCH


def peak(size: str, model: Sd3Model, work: Callable[[SD3Transformer2DModel], None]) -> float:
    module = built(size, model)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None  # gradients are counted apart
    with Alive(own(module)) as alive:
        work(module)
    return alive.peak / BATCH


def estimated(size: str, model: Sd3Model) -> Activations:
    config: Mapping[str, Any] = config_of(size)
    return family_of(model).activations(config, model, SIZES[size][3], SIZES[size][4])


def model_of(size: str, trained: str, dtype: str) -> Sd3Model:
    return Sd3Model.model_validate({"lora": TRAINED[trained], "dtype": dtype})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_saved_for_the_backward(size: str, trained: str, dtype: str) -> None:
    model = model_of(size, trained, dtype)
    found = estimated(size, model)
    assert found.saved == pytest.approx(saved(size, model, checkpointing=False), rel=0.15)
    assert found.inputs == pytest.approx(saved(size, model, checkpointing=True), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "dtype"), [("full", "float32"), ("lora", "bfloat16"), ("wide lora", "float32")])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_alive_at_once(size: str, trained: str, dtype: str) -> None:
    model = model_of(size, trained, dtype)
    found = estimated(size, model)

    def trains(module: SD3Transformer2DModel) -> None:
        call(module, size, model).float().square().mean().backward()

    def trains_again(module: SD3Transformer2DModel) -> None:
        module.enable_gradient_checkpointing()
        trains(module)

    def draws(module: SD3Transformer2DModel) -> None:
        with torch.no_grad():
            call(module, size, model)

    assert found.forward == pytest.approx(peak(size, model, draws), rel=0.15)
    assert found.trained(checkpointing=False) == pytest.approx(peak(size, model, trains), rel=0.15)
    assert found.trained(checkpointing=True) == pytest.approx(peak(size, model, trains_again), rel=0.15)
