"""Text embeddings by prompt id, stacked for a model call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.artifacts import ConditioningTable
from schemas.errors import InputError
from stages.models import Conditioning
from stages.store import tables


class Embeddings:
    """A conditioning table in memory."""

    def __init__(self, ref: ConditioningTable, device: torch.device) -> None:
        table = tables.read(ref)
        columns = {name: tables.ragged(table, name) for name in ref.names}
        rows = [
            {name: torch.from_numpy(columns[name][row].copy()).to(device) for name in ref.names}
            for row in range(len(table))
        ]
        roles, ids = table.column("role").to_pylist(), table.column("prompt_id").to_pylist()
        self.path = ref.path
        self.positive = {i: row for i, role, row in zip(ids, roles, rows, strict=True) if role != "negative"}
        self.negative = next((row for role, row in zip(roles, rows, strict=True) if role == "negative"), None)

    def of(self, prompt_ids: Sequence[str], guided: bool, dropped: Sequence[bool] = ()) -> Conditioning:
        """Conditioning of a batch; `dropped` samples get the negative prompt as their own."""
        rows = [self._positive(prompt_id) for prompt_id in prompt_ids]
        if any(dropped):
            rows = [self._negative() if drop else row for row, drop in zip(rows, dropped, strict=True)]
        negative = [self._negative()] * len(rows) if guided else None
        return Conditioning(_stack(rows), None if negative is None else _stack(negative))

    def shape(self, prompt_id: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of a prompt's tensors: only equal ones may share a model call."""
        return tuple(tuple(tensor.shape) for tensor in self._positive(prompt_id).values())

    def _positive(self, prompt_id: str) -> dict[str, Tensor]:
        if prompt_id not in self.positive:
            raise InputError(f"prompt {prompt_id!r} has no embeddings in {self.path}; encode the same prompts")
        return self.positive[prompt_id]

    def _negative(self) -> dict[str, Tensor]:
        if self.negative is None:
            raise InputError(f"no embeddings of the negative prompt in {self.path}; encode it")
        return self.negative


def _stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
