"""A LoRA of diffusers or PEFT, taken up as the start of a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from schemas.errors import InputError
from schemas.lora_file import DIFFUSERS, PEFT, PEFT_CONFIG, LoraFile, lora_file
from schemas.models import LoraConfig
from stages.engine.lora import ADAPTER


def started(config: LoraConfig, targets: Sequence[str], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `config.start`, float32, by the names of the trainable `parameters`.

    InputError when rank, alpha, targets or shapes differ from the config's and the model's.
    """
    file = lora_file(_local(config))
    file.check(config, targets)
    try:
        stored = load_file(file.path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"`model.lora.start`: {file.path} is broken: {error}") from error
    found = {_name(module, part): stored[name].float() for (module, part), name in file.tensors.items()}
    strange = sorted(found.keys() ^ parameters.keys())
    if strange:
        raise _unfit(file, f"{len(strange)} of its tensors differ in name, first {strange[0]!r}")
    for name, value in found.items():
        if value.shape != parameters[name].shape:
            raise _unfit(file, f"{name!r} is {tuple(value.shape)} there and {tuple(parameters[name].shape)} here")
    return found


def _local(config: LoraConfig) -> Path:
    path = Path(str(config.start))
    if path.exists():
        return path
    wanted = [DIFFUSERS, PEFT, PEFT_CONFIG]
    return Path(snapshot_download(str(config.start), revision=config.start_revision, allow_patterns=wanted))


def _name(module: str, part: str) -> str:
    kind, _, rest = part.partition(".")
    return f"{module}.{kind}.{ADAPTER}.{rest}"


def _unfit(file: LoraFile, why: str) -> InputError:
    return InputError(f"`model.lora.start`: {file.path} was made for another model: {why}")
