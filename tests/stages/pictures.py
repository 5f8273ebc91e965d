"""Pictures of noise in folders, and what `import_samples` makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from schemas.engine import Resources
from schemas.imports import ImportSamplesConfig, ImportSamplesInputs, ImportSamplesOutputs
from stages.context import StageContext
from stages.import_samples import run
from stages.store import images, tables

Rows = list[dict[str, Any]]


def context(directory: Path, **more: Any) -> StageContext:
    directory.mkdir(parents=True, exist_ok=True)
    return StageContext(directory, "import", 0, None, Resources(), 8, **more)


def taken(folder: Path, out: Path, **settings: Any) -> tuple[ImportSamplesOutputs, Rows, Rows]:
    """Outputs, samples and prompts."""
    outputs = run(ImportSamplesConfig(path=str(folder), **settings), ImportSamplesInputs(), context(out))
    samples, prompts = (tables.read(ref.under(out)).to_pylist() for ref in (outputs.samples, outputs.prompts))
    return outputs, samples, prompts


def noise(seed: int, height: int = 5, width: int = 4, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def save(path: Path, seed: int = 0, **size: int) -> np.ndarray:
    """A picture of noise; its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(seed, **size)).save(path)
    return noise(seed, **size)


def pixels(rows: Rows) -> list[np.ndarray]:
    return [images.pixels(row["image"]) for row in rows]
