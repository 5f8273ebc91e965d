"""Where a pipeline's weights lie: a folder here, or one that the hub's client downloads."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download

_WHOLE = "diffusion_pytorch_model.safetensors"
_INDEX = f"{_WHOLE}.index.json"


def weight_files(source: str, component: str, revision: str | None) -> list[Path]:
    """The safetensors files of a component of a pipeline folder or hub id: one, or those of an index.

    Other variants beside them (`.fp16.`) are left alone. OSError when there are none: pickled weights are not loaded.
    """
    if Path(source).is_dir():
        folder = Path(source) / component
    else:
        wanted = [f"{component}/{_INDEX}", f"{component}/diffusion_pytorch_model*.safetensors"]
        unwanted = [f"{component}/*.fp16*", f"{component}/*.bf16*"]
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))
        folder = folder / component
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(f"{folder} has neither {_WHOLE} nor {_INDEX}")
    listed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(listed.values()))]
