"""Text embeddings by prompt id, stacked for a model call. They stay in the mapped file until they are used."""

from collections.abc import Iterable, Sequence

import pyarrow as pa
import torch
from torch import Tensor

from schemas.artifacts import ConditioningTable
from schemas.errors import InputError
from stages.models import Conditioning
from stages.store import tables

NEGATIVE = ""  # the prompt id of the negative prompt


class Embeddings:
    """A conditioning table."""

    def __init__(self, ref: ConditioningTable, device: torch.device) -> None:
        self.ref, self.device = ref, device
        self.table: pa.Table = tables.read(ref)
        self.rows = tables.positions(self.table, "prompt_id")
        self._shapes: dict[str, tuple[tuple[int, ...], ...]] = {}

    def require(self, prompt_ids: Iterable[str]) -> None:
        """InputError names the first prompt that has no embeddings."""
        for prompt_id in prompt_ids:
            self._row(prompt_id)

    def of(self, prompt_ids: Sequence[str], guided: bool) -> Conditioning:
        """Conditioning of a batch; `NEGATIVE` is the negative prompt. Guided, the negative branch comes along."""
        negative = [NEGATIVE] * len(prompt_ids) if guided else None
        return Conditioning(self._stack(prompt_ids), None if negative is None else self._stack(negative))

    def shape(self, prompt_id: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of a prompt's tensors: only equal ones may share a model call."""
        if prompt_id not in self._shapes:
            row, columns = self._row(prompt_id), [self.table.column(f"{name}_shape") for name in self.ref.names]
            self._shapes[prompt_id] = tuple(tuple(column[row].as_py()) for column in columns)
        return self._shapes[prompt_id]

    def _stack(self, prompt_ids: Sequence[str]) -> dict[str, Tensor]:
        unique = list(dict.fromkeys(prompt_ids))
        rows, places = [self._row(prompt_id) for prompt_id in unique], [unique.index(i) for i in prompt_ids]
        read = {name: tables.ragged(self.table, name, rows) for name in self.ref.names}
        tensors = {name: [torch.tensor(value, device=self.device) for value in read[name]] for name in read}
        return {name: torch.stack([tensors[name][place] for place in places]) for name in tensors}

    def _row(self, prompt_id: str) -> int:
        if prompt_id in self.rows:
            return self.rows[prompt_id]
        name = "the negative prompt" if prompt_id == NEGATIVE else f"prompt {prompt_id!r}"
        raise InputError(f"{name} has no embeddings in {self.ref.path}; encode the same prompts")
