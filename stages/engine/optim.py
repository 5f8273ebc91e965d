"""AdamW on local shards: plain tensors, much faster than DTensors."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from schemas.errors import NonFinite
from schemas.losses import OptimizerConfig
from stages.engine import adam8bit
from stages.engine.mesh import total
from stages.engine.weights import Shards, Weights, local

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Steps the raw weights. `updates` counts steps since the base."""

    def __init__(self, weights: Weights, config: OptimizerConfig, updates: int = 0) -> None:
        self.weights, self.config, self.updates = weights, config, updates
        self.leaves = {name: torch.nn.Parameter(shard) for name, shard in weights.raw().items()}
        self.adamw = (adam8bit.adamw if self._is_8bit else _adamw)(self.leaves.values(), config)

    def step(self, learning_rate: float, place: str) -> float:
        """One update from the parameters' gradients, which are dropped; returns the gradient's norm over all ranks.

        NonFinite if the norm is NaN or infinite: the weights stay as they were.
        """
        for name, parameter in self.weights.parameters.items():
            leaf = self.leaves[name]
            leaf.grad = torch.zeros_like(leaf) if parameter.grad is None else local(parameter.grad).to(leaf.dtype)
            parameter.grad = None
        norm = self.grad_norm()
        if not math.isfinite(norm):
            raise NonFinite(f"{place}: the gradient's norm is {norm}; the policy before it stays")
        limit = self.config.max_grad_norm
        if limit is not None and norm > limit:
            for leaf in self.leaves.values():
                assert leaf.grad is not None
                leaf.grad.mul_(limit / norm)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.updates += 1
        self.weights.put({})  # gathered copies are out of date
        return norm

    def grad_norm(self) -> float:
        """2-norm of the gradient over the sharded set."""
        device = next(iter(self.leaves.values())).device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for leaf in self.leaves.values():
            if leaf.grad is not None:
                squares += leaf.grad.double().square().sum()
        return float((total(squares) / self.weights.copies).sqrt())

    def state(self) -> dict[str, Shards]:
        """Moments in float32 by kind and name; empty before the first step."""
        if not self.adamw.state:
            return {}
        told = {name: self._moments(leaf) for name, leaf in self.leaves.items()}
        return {kind: {name: moments[kind] for name, moments in told.items()} for kind in MOMENTS}

    def restore(self, moments: Mapping[str, Shards]) -> None:
        """Takes up saved moments at `updates`."""
        for name, leaf in self.leaves.items():
            if self._is_8bit:
                adam8bit.restore(self.adamw, leaf, self.updates, {kind: moments[kind][name] for kind in MOMENTS})
                continue
            step = torch.tensor(float(self.updates), device=leaf.device)
            self.adamw.state[leaf] = {"step": step, **{kind: _like(moments[kind][name], leaf) for kind in MOMENTS}}

    def settle(self) -> None:
        """Takes up what `state` gave, so that going on from memory and from disk is the same."""
        if self._is_8bit and self.adamw.state:
            self.restore(self.state())

    @property
    def _is_8bit(self) -> bool:
        return self.config.kind == "adamw_8bit"

    def _moments(self, leaf: Tensor) -> Mapping[str, Tensor]:
        state = self.adamw.state[leaf]
        return adam8bit.moments(state, leaf) if self._is_8bit else state


def _adamw(leaves: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    first, second = config.betas
    return torch.optim.AdamW(
        leaves,
        lr=config.learning_rate.start,
        betas=(first, second),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _like(value: Tensor, leaf: Tensor) -> Tensor:
    return value.to(leaf.device, torch.float32).clone()
