"""LoRA files, in the form of diffusers or of PEFT: what their headers say, read without torch."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schemas.errors import InputError
from schemas.models import LoraConfig

DIFFUSERS, PEFT, PEFT_CONFIG = "pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json"
_PREFIXES = ("transformer.", "base_model.model.")
_KEY = re.compile(r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector)(\.weight)?$")
_UNEQUAL = ("rank_pattern", "alpha_pattern", "use_rslora", "lora_bias")  # they give layers other strengths
_LARGEST = 100_000_000  # bytes of a header
_FIELD = "`model.lora.start`"


class LoraFile(NamedTuple):
    """A LoRA on disk. `tensors` maps (module, part) to the tensor's name in the file; parts are named as in PEFT."""

    path: Path
    rank: int
    alpha: float
    dora: bool
    tensors: dict[tuple[str, str], str]

    @property
    def modules(self) -> set[str]:
        """Names of the adapted modules within the transformer."""
        return {module for module, _ in self.tensors}

    def check(self, config: LoraConfig, targets: Sequence[str]) -> None:
        """InputError when `model.lora` (with the family's default targets) means other adapters than the file's."""
        wanted = config.targets or tuple(targets)
        for name, own, there in (
            ("rank", config.rank, self.rank),
            ("alpha", config.scale_alpha, self.alpha),
            ("dora", config.dora, self.dora),
        ):
            if own != there:
                raise InputError(f"`model.lora.{name}` is {own}, but {self.path} has {there}; write `{name}: {there}`")
        ends = tuple(f".{target}" for target in wanted)
        strange = [module for module in self.modules if not f".{module}".endswith(ends)]
        absent = [end for end in ends if not any(f".{module}".endswith(end) for module in self.modules)]
        if strange or absent:
            there = sorted({re.sub(r"^.*?\.\d+\.", "", module) for module in self.modules})
            raise InputError(
                f"`model.lora.targets` is {list(wanted)}, but {self.path} adapts {there}; write `targets: {there}`"
            )


def lora_file(path: Path) -> LoraFile:
    """What a LoRA file, or a folder with one, holds. InputError when it is none that training can start from."""
    weights = _weights(path)
    header = _header(weights)
    facts = _facts(weights, header.pop("__metadata__", {}))
    unequal = [name for name in _UNEQUAL if facts.get(name)]
    if unequal:
        raise InputError(f"{_FIELD}: {weights} has {unequal[0]} {facts[unequal[0]]!r}; here all layers share one rank")
    tensors = {_place(name, weights): name for name in header}
    ranks = {header[name]["shape"][0] for (_, part), name in tensors.items() if part == "lora_A.weight"}
    if len(ranks) != 1:
        raise InputError(f"{_FIELD}: {weights} has layers of the ranks {sorted(ranks)}; here all layers share one rank")
    rank = ranks.pop()
    dora = any(part == "lora_magnitude_vector.weight" for _, part in tensors)
    # Without a note of alpha, diffusers takes the rank.
    return LoraFile(weights, rank, float(facts.get("lora_alpha", rank)), dora, tensors)


def _weights(path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / name for name in (DIFFUSERS, PEFT) if (path / name).is_file()]
    if not found:
        raise InputError(
            f"{_FIELD}: no LoRA at {path}; name a safetensors file, or a folder with {DIFFUSERS} or {PEFT}"
        )
    return found[0]


def _header(path: Path) -> dict[str, Any]:
    """The JSON behind its length in 8 bytes."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return _json(path, stream.read(size if size < _LARGEST else 0))


def _facts(weights: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The adapter's settings as PEFT names them: noted in the file by diffusers, beside it by PEFT."""
    beside = weights.with_name(PEFT_CONFIG)
    if weights.name != DIFFUSERS and beside.is_file():
        return _json(beside, beside.read_bytes())
    noted = _json(weights, metadata.get("lora_adapter_metadata", "{}").encode())
    return {name.removeprefix(_PREFIXES[0]): value for name, value in noted.items()}


def _json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise InputError(f"{_FIELD}: {file} is broken or no LoRA: {error}") from error


def _place(name: str, weights: Path) -> tuple[str, str]:
    """Module and part of a tensor's name."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    match = _KEY.match(name.removeprefix(prefix)) if prefix else None
    if match is None:
        raise InputError(
            f"{_FIELD}: {weights} holds {name!r}, which adapts no layer of the transformer; load it with diffusers' "
            "load_lora_weights and save its transformer's layers with save_lora_weights"
        )
    part = match["part"]
    return match["module"], part if part.endswith(".weight") else f"{part}.weight"
