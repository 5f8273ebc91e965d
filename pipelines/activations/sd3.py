"""The joint-attention transformer of Stable Diffusion 3 and 3.5 (arXiv 2403.03206).

Counted operation by operation over diffusers' JointTransformerBlock: what autograd keeps. Attention is the fused kernel
(queries, keys, values, output and one float32 a head and token). tests/stages/test_activations.py holds it against
torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.activations.bytes import Activations
from schemas.models import LoraConfig, ModelConfig

_AT_WORK, _DUAL, _ASIDE = 13.4, 2.0, 3.0  # widths a token in a forward: of the stream in its feed-forward, and not
_TEXT_AT_WORK, _IMAGE_ASIDE = 15.0, 4.5
_BACKWARD, _BACKWARD_FULL = 8.0, 2.0  # widths an image token, or any token, beside what is saved
_AGAIN = 4.0  # and a token of the longer stream when all weights of a block get their gradient after its recompute


@dataclass(frozen=True)
class Shape:
    """Sizes of one model call, from config.json. `width` numbers a token, `size` bytes of a number."""

    image: int
    text: int
    width: int
    heads: int
    layers: int
    dual: tuple[int, ...]
    normed: bool
    size: int
    trained: Callable[[str], bool]  # whether gradients reach the weights of a layer, by its name
    lora: LoraConfig | None

    @property
    def dropping(self) -> bool:
        """Whether adapters have inputs of their own."""
        return self.lora is not None and self.lora.dropout > 0


def activations(config: Mapping[str, Any], model: ModelConfig, latent_side: int, text: int) -> Activations:
    """Bytes of one sample; KeyError when config.json lacks a field."""
    at = shape_of(config, model, latent_side, text)
    blocks = [_block(at, place) for place in range(at.layers)]
    tokens, unit = at.image + at.text, at.width * at.size
    rest = at.image * (1 + 2 * (at.lora is None)) + at.text * (at.lora is None)
    beside = at.image * _BACKWARD if at.lora else tokens * _BACKWARD_FULL
    return Activations(
        forward=round(_forward(at) * unit),
        saved=sum(blocks) + rest * unit,
        block=max(blocks),
        inputs=(at.layers * tokens + rest) * unit,
        backward=round(beside * unit),
        again=round((_AGAIN * max(at.image, at.text) if at.lora is None else 0) * unit),
    )


def _forward(at: Shape) -> float:
    """Widths that one forward holds at most: in the feed-forward of the image, or of a long text."""
    adapted = 4 * (at.lora is not None and at.trained("transformer_blocks.0.ff.net.0.proj"))
    image = at.image * (_AT_WORK + _DUAL * bool(at.dual) + adapted) + at.text * _ASIDE
    return max(image, at.image * _IMAGE_ASIDE + at.text * _TEXT_AT_WORK)


def shape_of(config: Mapping[str, Any], model: ModelConfig, latent_side: int, text: int) -> Shape:
    """The sizes in a transformer's config.json."""
    lora = model.lora
    ends = () if lora is None else tuple(f".{target}" for target in lora.targets or model.lora_targets)
    return Shape(
        image=(latent_side // int(config["patch_size"])) ** 2,
        text=text,
        width=int(config["num_attention_heads"]) * int(config["attention_head_dim"]),
        heads=int(config["num_attention_heads"]),
        layers=int(config["num_layers"]),
        dual=tuple(config.get("dual_attention_layers") or ()),
        normed=config.get("qk_norm") is not None,
        size=4 if model.dtype == "float32" else 2,
        trained=lambda name: lora is None or f".{name}".endswith(ends),
        lora=lora,
    )


def _block(at: Shape, place: int) -> int:
    """Bytes that one block keeps."""
    last, unit = place == at.layers - 1, at.width * at.size
    image, context = (_stream(at, place, text) for text in (False, True))
    out = _attention(at, at.image, image) + _feed_forward(at, at.image, image)
    out += _attention(at, at.text, context) + (0 if last else _feed_forward(at, at.text, context))
    out += _second_attention(at, image, f"transformer_blocks.{place}.attn2.") if place in at.dual else 0
    return out + (16 + 2 * (at.lora is None) + 4 * (place in at.dual)) * unit  # scales, shifts and gates


@dataclass(frozen=True)
class Stream:
    """The layers of the image or the text in one block; the last block's text ends in the attention."""

    inner: list[str]
    outer: str
    feed: str
    modulated: bool  # gradients reach scale, shift and gate
    flowing: bool  # gradients reach what comes into the block


def _stream(at: Shape, place: int, text: bool) -> Stream:
    name = f"transformer_blocks.{place}."
    modulated = at.trained(f"{name}norm1{'_context' * text}.linear")
    inner = [f"{name}attn.{f'add_{part}_proj' if text else f'to_{part}'}" for part in "qkv"]
    outer = f"{name}attn.to_out.0" if not text else "" if place == at.layers - 1 else f"{name}attn.to_add_out"
    return Stream(inner, outer, f"{name}ff{'_context' * text}", modulated, place > 0 or at.lora is None)


def _attention(at: Shape, tokens: int, stream: Stream) -> int:
    """One stream through its first norm and the joint attention."""
    unit = tokens * at.width * at.size
    norm = unit * (stream.flowing + stream.modulated)
    kept = bool(stream.outer) and at.trained(stream.outer) and not at.dropping  # a slice of the joint output, copied
    out = unit * (kept + (stream.modulated and bool(stream.outer))) + _outputs(at, tokens, stream.outer)
    return norm + _inputs(at, tokens, stream.inner) + _scores(at, tokens) + out


def _second_attention(at: Shape, image: Stream, name: str) -> int:
    """The image among itself, beside the joint attention."""
    inner, outer = [f"{name}to_{part}" for part in "qkv"], f"{name}to_out.0"
    if not (image.flowing or image.modulated or any(map(at.trained, [*inner, outer]))):
        return 0
    gate = at.image * at.width * at.size * image.modulated
    return _scores(at, at.image) + _inputs(at, at.image, inner) + _outputs(at, at.image, outer) + gate


def _feed_forward(at: Shape, tokens: int, stream: Stream) -> int:
    """Second norm, and two layers of four times the width with a GELU between."""
    unit = tokens * at.width * at.size
    first, second = f"{stream.feed}.net.0.proj", f"{stream.feed}.net.2"
    inner = 4 * unit * (1 + (at.trained(second) and not at.dropping))
    ends = _inputs(at, tokens, [first]) + _outputs(at, tokens, second, wide=4)
    return unit * (1 + 2 * stream.modulated) + inner + ends


def _scores(at: Shape, tokens: int) -> int:
    """Queries and keys normed in float32, and the fused attention."""
    numbers = tokens * at.width
    out = 4 * numbers * at.size + 4 * tokens * at.heads
    if at.normed:
        copies = 4 * numbers * (at.size < 4)
        out += 2 * (numbers * at.size * (1 + (at.lora is None)) + copies + 4 * tokens * at.heads)
    return out


def _inputs(at: Shape, tokens: int, layers: list[str]) -> int:
    """What layers with one input keep: the input once, or one masked copy each where adapters have dropout."""
    trained = [name for name in layers if at.trained(name)]
    adapters = sum(_adapter(at, tokens) for _ in trained)
    return adapters + (0 if at.dropping else tokens * at.width * at.size * bool(trained))


def _outputs(at: Shape, tokens: int, layer: str, wide: int = 1) -> int:
    """What the adapter of a layer keeps whose input is counted elsewhere."""
    return _adapter(at, tokens, wide) if layer and at.trained(layer) else 0


def _adapter(at: Shape, tokens: int, wide: int = 1) -> int:
    """lora_A's output; with dropout a masked input and its mask; with DoRA both parts of the result."""
    if at.lora is None:
        return 0
    numbers = tokens * at.width
    masked = numbers * wide * (at.size + 1) * at.dropping
    return tokens * at.lora.rank * at.size + masked + 2 * numbers * at.size * at.lora.dora
