"""FLOPs of model calls, counted on a twin of the model without memory: counting changes no bit and costs no call.

torch's own FlopCounterMode takes operations apart to count them, and then the gradient of a SiLU rounds otherwise; a
mode around real calls would keep torch.compile from its work. Attention's backward counts two products for each of
forward's, as MFU is defined (PaLM, arXiv 2204.02311, appendix B), not what its kernel makes again.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stages.models import Adapter, Conditioning


class Cost(NamedTuple):
    """FLOPs of one sample's forward and backward (0 when nothing is trained), multiply and add counted as two."""

    forward: float
    backward: float


class FlopMeter:
    """Adds up FLOPs and tokens of a rank's model calls. `twin` makes the model on the meta device as it computes."""

    def __init__(self, adapter: Adapter, twin: Callable[[], nn.Module]) -> None:
        self.flops, self.tokens = 0.0, 0.0
        self._adapter, self._make = adapter, twin
        self._twin: nn.Module | None = None
        self._costs: dict[Hashable, Cost] = {}
        self._newest = Cost(0.0, 0.0)
        self._counts = True

    @contextmanager
    def counted(self, counts: bool) -> Iterator[None]:
        """Calls inside that do not count only keep the ranks in step."""
        self._counts, before = counts, self._counts
        try:
            yield
        finally:
            self._counts = before

    def forward(self, latents: Tensor, given: Conditioning, guidance_scale: float) -> None:
        """A model call on `latents` (batch, ...) is made."""
        text = {name: tuple(value.shape[1:]) for name, value in given.positive.items()}
        guided = guidance_scale > 1
        form = (tuple(latents.shape[1:]), tuple(text.items()), guided)
        if form not in self._costs:
            self._costs[form] = self._cost(tuple(latents.shape[1:]), text, guided)
        self._newest = self._costs[form]
        if self._counts:
            self.flops += self._newest.forward * len(latents)
            self.tokens += self._adapter.tokens(given) * len(latents) * (2 if guided else 1)

    def backward(self, samples: int) -> None:
        """The backward of the newest call is made, what is computed again for it included."""
        if self._counts:
            self.flops += self._newest.backward * samples

    def _cost(self, latents: tuple[int, ...], text: dict[str, tuple[int, ...]], guided: bool) -> Cost:
        if self._twin is None:
            self._twin = self._make()
        branch = {name: torch.empty(1, *shape, device="meta") for name, shape in text.items()}
        given = Conditioning(branch, branch if guided else None)
        state, time = torch.empty(1, *latents, device="meta"), torch.empty(1, device="meta")
        with torch.enable_grad():
            with _Watch() as forward:
                out = self._adapter.velocity(self._twin, state, time, given, 2.0 if guided else 1.0)
            with _Watch() as backward:
                if out.requires_grad:
                    out.sum().backward()
        self._twin.zero_grad(set_to_none=True)
        return Cost(forward.flops, backward.flops)


class _Watch(TorchDispatchMode):
    """Adds up torch's formulas for the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation as it is."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out
