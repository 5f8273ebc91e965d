"""Statistics of an update: sums over ranks, samples and optimizer steps. Every number is the same on all ranks."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stages.engine.mesh import total

_NAMES = {  # those that a run's progress line should show come first
    "loss": "train/loss",
    "kl": "train/kl",
    "norm": "train/grad_norm",
    "clipped": "train/clip_fraction",
    "ratio": "train/ratio_mean",
    "old_distance": "train/old_distance",
    "rate": "train/learning_rate",
    "approx_kl": "train/approx_kl",
    "rms_over_eps": "train/grad_rms_over_eps",
}
_SUMMED = ("loss", "kl", "ratio", "clipped", "approx_kl", "old_distance")
_APART = 8  # optimizer steps whose ratios are reported apart


class StepMetrics:
    """One optimizer step. Loss and KL are means over all samples that count, others over those that were computed."""

    def __init__(self) -> None:
        self.sums = torch.zeros(len(_SUMMED), 2, dtype=torch.float64)
        self.largest = torch.zeros(3, dtype=torch.float64)  # ratio's deviation, log-prob's noise, anything not finite

    def add(self, values: dict[str, Tensor], weight: Tensor) -> bool:
        """Values (batch,) by name, `weight` (batch,) 0 or 1; returns whether all that count are finite."""
        counts, weight = weight > 0, weight.double()
        finite = True
        for name, value in values.items():
            kept = torch.where(counts, value.double(), 0.0)
            finite = finite and bool(kept.isfinite().all())
            if name in _SUMMED:
                self.sums[_SUMMED.index(name)] += torch.stack([kept.sum(), weight.sum()]).cpu()
            if name == "ratio":
                self._peak(0, torch.where(counts, (value.double() - 1).abs(), 0.0))
            if name == "log_prob_noise":
                self._peak(1, kept)
        self.largest[2] = max(float(self.largest[2]), float(not finite))
        return finite

    def agree(self) -> bool:
        """Shares the numbers among all ranks; returns whether every rank's were finite."""
        total(self.sums)
        total(self.largest, largest=True)
        return not bool(self.largest[2])

    @property
    def noise(self) -> float:
        """The largest difference of a recomputed log-prob from the sampled one."""
        return float(self.largest[1])

    def means(self, count: float) -> dict[str, float]:
        """By name; `count` samples (times steps or draws) make up the loss, those left out with 0."""
        out = {}
        for name, (value, weight) in zip(_SUMMED, self.sums.tolist(), strict=True):
            if weight:
                out[name] = value / (count if name in ("loss", "kl") else weight)
        return out

    def _peak(self, place: int, values: Tensor) -> None:
        self.largest[place] = max(float(self.largest[place]), float(values.max()))


class UpdateMetrics:
    """All optimizer steps of an update."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.skipped = 0
        self.deviation = 0.0
        self.noise: float | None = None  # of the first step: later ones are off the sampled policy

    @classmethod
    def of(cls, note: Mapping[str, Any]) -> "UpdateMetrics":
        """Those of an update that was stopped."""
        made = cls()
        vars(made).update(note)
        return made

    def note(self) -> dict[str, Any]:
        """What `of` takes up again: plain numbers, exact as JSON."""
        return {**vars(self), "steps": list(self.steps)}

    def close(self, step: StepMetrics, count: float, skipped: int, **facts: float) -> None:
        """Ends an optimizer step."""
        self.steps.append({**step.means(count), **facts})
        self.skipped += skipped
        self.deviation = max(self.deviation, float(step.largest[0]))
        if self.noise is None:
            self.noise = step.noise

    def named(self) -> dict[str, float]:
        """The field's names; means over the optimizer steps."""
        have = {key for step in self.steps for key in step}
        out = {"train/loss": 0.0, **{public: self._mean(name) for name, public in _NAMES.items() if name in have}}
        out |= {"train/skipped_units": float(self.skipped), "train/optimizer_steps": float(len(self.steps))}
        if "train/ratio_mean" in out:
            out |= {"train/ratio_max_deviation": self.deviation, "train/log_prob_noise": self.noise or 0.0}
            if len(self.steps) > 1:
                first = enumerate(self.steps[:_APART])
                out |= {f"train/ratio_mean/{i}": step["ratio"] for i, step in first if "ratio" in step}
        return out

    def _mean(self, name: str) -> float:
        values = [step[name] for step in self.steps if name in step]
        return math.fsum(values) / len(values)
