"""Bare training loops: DiffusionNFT and Flow-GRPO with AdamW and an average, written out for one rank."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schemas.contracts import UpdateConfig
from schemas.losses import GrpoLoss, NftLoss, OldPolicyConfig, UniformTimes
from schemas.sampling import FlowSdeSampler
from schemas.seeds import seed_of
from tests.bench.bare import Embedded, velocity

Parts = Sequence[Sequence[Sequence[int]]]  # by optimizer step and model call: rows of the data


@dataclass
class Data:
    """All samples of the update, in memory. The steps are there only for losses on log-probs."""

    sample_ids: list[str]
    prompt_ids: list[str]
    advantages: Tensor  # (samples,)
    latents: Tensor  # (samples, ...)
    embedded: Embedded
    states: Tensor | None = None  # (samples, steps + 1, ...)
    numbers: dict[str, Tensor] = field(default_factory=dict)  # sigma, sigma_next, sigma_max, timestep, log_prob

    def given(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`embeds` and `pooled` of a model call."""
        found = [self.embedded[self.prompt_ids[row]] for row in rows]
        return torch.stack([embeds for embeds, _ in found]), torch.stack([pooled for _, pooled in found])


class Trainer:
    """Trains `module`, sharded or not, in place. `old` is a second module, where the loss has an old policy."""

    def __init__(
        self, module: nn.Module, old: nn.Module | None, config: UpdateConfig, seed: int, iteration: int
    ) -> None:
        self.module, self.old, self.config, self.seed, self.iteration = module, old, config, seed, iteration
        self.parameters = dict(module.requires_grad_(True).named_parameters())
        self.leaves = {name: nn.Parameter(_local(p)) for name, p in self.parameters.items()}
        self.ema = {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
        settings = config.optimizer
        self.adamw = torch.optim.AdamW(
            self.leaves.values(),
            lr=settings.learning_rate.start,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.updates = 0

    def run(self, data: Data, parts: Parts, folder: Path | None) -> list[float]:
        """One update; gives the loss of each optimizer step. Weights and optimizer go to `folder`."""
        losses = []
        for units in parts:
            losses.append(self._gradient(data, units))
            self._step()
        if self.old is not None:
            decay = (self.config.old or OldPolicyConfig()).decay(self.iteration)
            with torch.no_grad():
                for parameter, leaf in zip(self.old.parameters(), self.leaves.values(), strict=True):
                    _local(parameter).lerp_(leaf, 1 - decay)
        if folder is not None:
            self._save(folder)
        return losses

    def _gradient(self, data: Data, units: Sequence[Sequence[int]]) -> float:
        count, value = sum(map(len, units)), 0.0
        for rows in units:
            loss = (self._nft if isinstance(self.config.loss, NftLoss) else self._grpo)(data, rows).sum() / count
            loss.backward()
            value += loss.item()
        return value

    def _step(self) -> None:
        self.updates += 1
        for name, leaf in self.leaves.items():
            parameter = self.parameters[name]
            assert parameter.grad is not None
            leaf.grad, parameter.grad = _local(parameter.grad), None
        for group in self.adamw.param_groups:
            group["lr"] = self.config.optimizer.learning_rate.at(self.iteration, self.updates)
        self.adamw.step()
        self.adamw.zero_grad()
        if self.config.ema is not None:
            decay = self.config.ema.at(self.updates)
            with torch.no_grad():
                for name, average in self.ema.items():
                    average.lerp_(self.leaves[name], 1 - decay)

    def _nft(self, data: Data, rows: Sequence[int]) -> Tensor:
        """DiffusionNFT on final latents (arXiv 2509.16117)."""
        loss, old = self.config.loss, self.old
        assert isinstance(loss, NftLoss)
        assert isinstance(loss.times, UniformTimes)
        assert old is not None
        times, noise = self._drawn(data, rows, loss.times)
        x0, t = data.latents[list(rows)], times[:, None, None, None]
        noised, given = (1 - t) * x0 + t * noise, data.given(rows)
        with torch.no_grad():
            lagging = velocity(old, noised, times * 1000, *given)
        step = loss.beta * (velocity(self.module, noised, times * 1000, *given) - lagging)
        c = loss.advantage_clip
        r = data.advantages[list(rows)].clamp(-c, c) / (2 * c) + 0.5
        positive, negative = (self._matching(noised - t * (lagging + sign * step), x0) for sign in (1, -1))
        return c / loss.beta * (r * positive + (1 - r) * negative)

    def _drawn(self, data: Data, rows: Sequence[int], config: UniformTimes) -> tuple[Tensor, Tensor]:
        (low, high), times, noise = config.range, [], []
        for row in rows:
            seed = seed_of(self.seed, self.iteration, 0, data.sample_ids[row], 0, "draw")
            generator = torch.Generator().manual_seed(seed)
            times.append(low + (high - low) * torch.rand((), generator=generator))
            noise.append(torch.randn(data.latents.shape[1:], generator=generator))
        return torch.stack(times), torch.stack(noise)

    def _matching(self, predicted: Tensor, x0: Tensor) -> Tensor:
        weight = (predicted.detach() - x0).abs().flatten(1).mean(1).clamp(min=1e-5)
        return ((predicted - x0) ** 2).flatten(1).mean(1) / weight

    def _grpo(self, data: Data, rows: Sequence[int]) -> Tensor:
        """Flow-GRPO's clipped ratio on one stored step (arXiv 2505.05470)."""
        loss, index = self.config.loss, list(rows)
        assert isinstance(loss, GrpoLoss)
        assert data.states is not None
        numbers = {name: values[index, 0] for name, values in data.numbers.items()}
        before, after = data.states[index, 0], data.states[index, 1]
        predicted = velocity(self.module, before, numbers["timestep"], *data.given(rows))
        log_prob = _log_prob(before, after, predicted, numbers)
        ratio, advantages = torch.exp(log_prob - numbers["log_prob"]), data.advantages[index]
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(*loss.clip_range))

    def _save(self, folder: Path) -> None:
        sets = {"raw": {name: leaf.detach() for name, leaf in self.leaves.items()}}
        if self.config.ema is not None:
            sets["ema"] = self.ema
        if self.old is not None:
            sets["old"] = {name: _local(p).detach() for name, p in self.old.named_parameters()}
        moments = {name: self.adamw.state[leaf] for name, leaf in self.leaves.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            sets[kind] = {name: state[kind] for name, state in moments.items()}
        for name, tensors in sets.items():
            save_file({key: value.contiguous() for key, value in tensors.items()}, str(folder / f"{name}.safetensors"))


def second(module: nn.Module) -> nn.Module:
    """A frozen copy of a plain module."""
    return copy.deepcopy(module).requires_grad_(False)


def _log_prob(before: Tensor, after: Tensor, predicted: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """Of Flow-GRPO's step with the noise level in `numbers`: (batch,)."""
    sigma, sigma_next, largest, eta = (
        numbers[name][:, None, None, None] for name in ("sigma", "sigma_next", "sigma_max", "eta")
    )
    dt = sigma_next - sigma
    g = eta * torch.sqrt(sigma / (1 - torch.where(sigma >= 1 - 1e-6, largest, sigma)))
    mean = before + (predicted + g**2 / (2 * sigma) * (before + (1 - sigma) * predicted)) * dt
    std = g * torch.sqrt(-dt)
    value = -((after - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(2 * math.pi) / 2
    return value.flatten(1).mean(1)


def eta_of(sampler: object) -> float:
    """The noise level of an SDE."""
    assert isinstance(sampler, FlowSdeSampler)
    return sampler.eta


def distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of the others."""
    assert some.keys() == others.keys()
    off = torch.stack([(some[name].detach().double() - others[name].detach().double()).norm() for name in some]).norm()
    return float(off / torch.stack([others[name].detach().double().norm() for name in some]).norm())


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
