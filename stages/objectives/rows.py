"""The samples of an update: final latents, stored steps, advantages, embeddings. Tensors stay in the mapped file."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.artifacts import AdvantagesTable
from schemas.contracts import UpdateInputs
from schemas.errors import InputError, NonFinite
from schemas.losses import LossConfig
from schemas.seeds import seed_of
from stages.context import StageContext
from stages.engine.embeddings import Embeddings
from stages.models import Conditioning
from stages.store import tables


class Rows:
    """A trajectory table joined with its advantages by sample id.

    `advantages` (rows,) float64 and `weights` (rows,): weight 0 for samples that left the statistics.
    """

    def __init__(self, loss: LossConfig, inputs: UpdateInputs, ctx: StageContext, device: torch.device) -> None:
        _sampled_from(loss, inputs, ctx.place)
        self.ref, self.device, self.timed = inputs.trajectory, device, ctx.timed
        self.table = tables.read(inputs.trajectory)
        self.sample_ids: list[str] = self.table.column("sample_id").to_pylist()
        self.prompt_ids: list[str] = self.table.column("prompt_id").to_pylist()
        self.embeddings = Embeddings(inputs.conditioning, device)
        self.embeddings.require(self.prompt_ids)
        self.advantages, self.weights = _join(self.sample_ids, inputs.advantages, ctx.place)
        if loss.needs.advantages and inputs.advantages is None:
            raise InputError(f"{ctx.place}: loss {loss.kind!r} needs `advantages`; give the node an advantage stage's")
        if not self.weights.any():
            raise InputError(f"{ctx.place}: no sample with an advantage to train on")

    def column(self, name: str) -> np.ndarray:
        """A tensor or per-step column (rows, *shape) in its storage dtype; of a table of one shard it is no copy."""
        return tables.tensors(self.table, name)

    def tensor(self, name: str, rows: Sequence[int], place: int | None = None) -> Tensor:
        """Rows of a tensor or per-step column, at one place of its first dimension if given: (batch, ...) float32."""
        with self.timed("data"):
            chosen = tables.tensors(self.table, name, rows)
            return torch.from_numpy((chosen if place is None else chosen[:, place]).astype(np.float32)).to(self.device)

    def given(self, prompt_ids: Sequence[str], guided: bool) -> Conditioning:
        """Embeddings of a batch of prompts."""
        with self.timed("data"):
            return self.embeddings.of(prompt_ids, guided)

    def seeds(self, ctx: StageContext, rows: Sequence[int], epoch: int, number: int) -> list[int]:
        """Of the dropout in a model call, one a sample."""
        parts = (ctx.seed, ctx.iteration or 0, epoch)
        return [seed_of(*parts, self.sample_ids[row], number, "dropout") for row in rows]

    def weight(self, rows: Sequence[int]) -> Tensor:
        """1 for samples that count, 0 for those that left: (batch,) float32."""
        return torch.tensor(self.weights[list(rows)], dtype=torch.float32, device=self.device)

    def advantage(self, rows: Sequence[int]) -> Tensor:
        """(batch,) float32; 0 for samples that left."""
        return torch.tensor(self.advantages[list(rows)], dtype=torch.float32, device=self.device)


def _sampled_from(loss: LossConfig, inputs: UpdateInputs, place: str) -> None:
    wanted, got = loss.needs.sampled_from, inputs.trajectory.weights
    # All weights of the base are the base.
    if wanted is not None and got != wanted and inputs.trajectory.policy:
        raise InputError(f"{place}: loss {loss.kind!r} wants samples of {wanted!r} weights, got {got!r}; set `weights`")


def _join(sample_ids: list[str], ref: AdvantagesTable | None, place: str) -> tuple[np.ndarray, np.ndarray]:
    if ref is None:
        return np.zeros(len(sample_ids)), np.ones(len(sample_ids))
    table = tables.read(ref)
    column = table.column("advantage").to_pylist()
    rows = tables.positions(table, "sample_id")
    lost = next((sample for sample in sample_ids if sample not in rows), None)
    if lost is not None:
        raise InputError(f"{place}: sample {lost!r} has no row in the advantages {ref.path}; score the same samples")
    found = [column[rows[sample]] for sample in sample_ids]
    values = np.array([0.0 if value is None else value for value in found])
    if not np.isfinite(values).all():
        bad = sample_ids[int((~np.isfinite(values)).argmax())]
        raise NonFinite(f"{place}: the advantage of sample {bad!r} is not finite")
    return values, np.array([0.0 if value is None else 1.0 for value in found])
