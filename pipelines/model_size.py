"""How large a model's latents, pictures and weights are, from the JSON and the safetensors headers in its folder."""

import json
from collections.abc import Iterable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from schemas.models import ModelConfig


class ModelSize(NamedTuple):
    """Numbers in a sample's latents and a prompt's embeddings, a picture's pixels, trained weights, bytes on disk.

    `text` are tokens; `transformer` and `vae` are their config.json; `shapes` are the transformer's tensors by name.
    """

    latents: int
    pixels: int
    embeddings: int
    trained: int
    bytes: int
    latent_side: int
    text: int
    transformer: dict[str, Any]
    vae: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


def model_size(config: ModelConfig) -> ModelSize | None:
    """None for a hub id, a model that the run makes itself, or a folder that is no pipeline."""
    folder = Path(config.path or "")
    if config.path is None or not folder.is_dir():
        return None
    try:
        transformer, vae = (_json(folder / part / "config.json") for part in ("transformer", "vae"))
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        side = config.resolution or int(transformer["sample_size"]) * factor
        text = config.max_sequence_length + _clip_tokens(folder)
        embeddings = text * int(transformer["joint_attention_dim"]) + int(transformer["pooled_projection_dim"])
        latents = int(transformer["in_channels"]) * (side // factor) ** 2
        shapes = tensor_shapes(folder / "transformer")
    except (OSError, ValueError, KeyError, TypeError):  # the stage that loads it says what is wrong
        return None
    whole = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    trained = _trained(config, shapes)
    return ModelSize(latents, side * side, embeddings, trained, whole, side // factor, text, transformer, vae, shapes)


def _trained(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> int:
    if config.lora is None:
        return count(shapes.values())
    ends = tuple(f".{target}.weight" for target in config.lora.targets or config.lora_targets)
    chosen = [shape for name, shape in shapes.items() if f".{name}".endswith(ends) and len(shape) == 2]
    return sum(config.lora.rank * (rows + columns) + config.lora.dora * rows for rows, columns in chosen)


def _clip_tokens(folder: Path) -> int:
    """Tokens of the CLIP branch: its tokenizer pads to its longest."""
    file = folder / "tokenizer" / "tokenizer_config.json"
    return int(_json(file).get("model_max_length", 77)) if file.is_file() else 77


def count(shapes: Iterable[tuple[int, ...]]) -> int:
    """Numbers in tensors of these shapes."""
    return sum(map(prod, shapes))


@cache
def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors in a folder's safetensors files; a header is JSON behind its length in 8 bytes."""
    out: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        out |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return out


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
