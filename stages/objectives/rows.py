"""The samples of an update in memory: final latents, stored steps, advantages, embeddings."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.artifacts import AdvantagesTable
from schemas.contracts import UpdateInputs
from schemas.errors import InputError
from stages.context import StageContext
from stages.engine.embeddings import Embeddings
from stages.store import tables


class Rows:
    """A trajectory table joined with its advantages by sample id.

    `advantages` (rows,) float64 and `weights` (rows,): weight 0 for samples that left the statistics.
    """

    def __init__(self, inputs: UpdateInputs, ctx: StageContext, device: torch.device) -> None:
        self.ref, self.device = inputs.trajectory, device
        self.table = tables.read(inputs.trajectory)
        self.sample_ids: list[str] = self.table.column("sample_id").to_pylist()
        self.prompt_ids: list[str] = self.table.column("prompt_id").to_pylist()
        self.guidance_scale = float(self.table.column("guidance_scale")[0].as_py()) if len(self.table) else 1.0
        self.embeddings = Embeddings(inputs.conditioning, device)
        self.advantages, self.weights = _join(self.sample_ids, inputs.advantages, ctx.place)
        if not self.weights.any():
            raise InputError(f"{ctx.place}: no sample with an advantage to train on")

    def tensor(self, name: str) -> Tensor:
        """A tensor column (rows, *shape), float32 on the CPU."""
        return torch.from_numpy(tables.tensors(self.table, name).astype(np.float32))

    def column(self, name: str) -> Tensor:
        """A per-step column (rows, steps), float32 on the CPU."""
        return torch.from_numpy(tables.tensors(self.table, name).astype(np.float32))

    def weight(self, rows: Sequence[int]) -> Tensor:
        """1 for samples that count, 0 for those that left: (batch,) float32."""
        return torch.tensor(self.weights[list(rows)], dtype=torch.float32, device=self.device)

    def advantage(self, rows: Sequence[int]) -> Tensor:
        """(batch,) float32; 0 for samples that left."""
        return torch.tensor(self.advantages[list(rows)], dtype=torch.float32, device=self.device)


def _join(sample_ids: list[str], ref: AdvantagesTable | None, place: str) -> tuple[np.ndarray, np.ndarray]:
    if ref is None:
        return np.zeros(len(sample_ids)), np.ones(len(sample_ids))
    table = tables.read(ref)
    pairs = zip(table.column("sample_id").to_pylist(), table.column("advantage").to_pylist(), strict=True)
    by_id = dict(pairs)
    lost = next((sample for sample in sample_ids if sample not in by_id), None)
    if lost is not None:
        raise InputError(f"{place}: sample {lost!r} has no row in the advantages {ref.path}; score the same samples")
    found = [by_id[sample] for sample in sample_ids]
    values = np.array([0.0 if value is None else value for value in found])
    return values, np.array([0.0 if value is None else 1.0 for value in found])
