"""How much was computed, and how fast: FLOPs of model calls, and their share of the machine's peak (MFU).

A call of each form is watched once; later ones are multiplied. Counting changes no bit: torch's own FlopCounterMode
takes operations apart to count them, and then the gradient of a SiLU rounds otherwise.
"""

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stages.context import StageContext
from stages.engine.mesh import total

# Dense peak in FLOP/s by part of the device's name: (bfloat16, float32 without TF32), from the makers' data sheets.
_PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 75e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "RTX 4090": (165e12, 82.6e12),
    "MI300X": (1307e12, 163e12),
}
_SIDE, _TRIES = 1024, 4  # of the product that measures an unknown machine


class FlopMeter:
    """Adds up the FLOPs of a rank's model calls, multiply and add counted as two."""

    def __init__(self) -> None:
        self.total = 0.0
        self._per_sample: dict[Hashable, float] = {}
        self._newest: Hashable = None
        self._counts = True

    @contextmanager
    def forward(self, form: Hashable, samples: int) -> Iterator[None]:
        """A call of the model on `samples`; calls of one `form` cost the same for each sample."""
        self._newest = form
        with self._call(("forward", form), samples):
            yield

    @contextmanager
    def backward(self, samples: int) -> Iterator[None]:
        """The backward of the newest call, what is computed again for it included."""
        with self._call(("backward", self._newest), samples):
            yield

    @contextmanager
    def counted(self, counts: bool) -> Iterator[None]:
        """Calls inside that do not count only keep the ranks in step."""
        self._counts, before = counts, self._counts
        try:
            yield
        finally:
            self._counts = before

    @contextmanager
    def _call(self, form: Hashable, samples: int) -> Iterator[None]:
        if form in self._per_sample:
            yield
        else:
            with _Watch() as watch:
                yield
            self._per_sample[form] = watch.flops / samples
        if self._counts:
            self.total += self._per_sample[form] * samples


class _Watch(TorchDispatchMode):
    """Adds up torch's formulas for the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation as it is."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _CPU_ATTENTION.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


class Work:
    """A stage's computing, from when its weights are loaded."""

    def __init__(self, ctx: StageContext, meter: FlopMeter, compute: torch.dtype) -> None:
        self._ctx, self._meter, self._compute = ctx, meter, compute
        self._begun, self._before = time.perf_counter(), meter.total

    def close(self, pictures: int) -> None:
        """Notes FLOPs of all ranks, MFU, and pictures a second."""
        seconds = time.perf_counter() - self._begun
        flops = float(total(torch.tensor([self._meter.total - self._before], dtype=torch.float64)))
        peak = peak_flops(self._ctx.device, self._compute) * self._ctx.world_size
        self._ctx.measured.update(flops=flops, mfu=flops / (seconds * peak), images_per_second=pictures / seconds)


@cache
def peak_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of one device in this dtype: the maker's for known GPUs, else what a matrix product reaches here."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        known = next((peaks for part, peaks in _PEAKS.items() if part in name), None)
        if known is not None:
            return known[0] if dtype == torch.bfloat16 else known[1]
    return _measured(torch.device(device), dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE * (8 if device.type == "cuda" else 1)
    one, best = torch.ones(side, side, dtype=dtype, device=device), float("inf")
    for _ in range(_TRIES):
        begun = time.perf_counter()
        product = one @ one
        float(product[0, 0])  # waits for it
        best = min(best, time.perf_counter() - begun)
    return 2 * side**3 / best


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


# The CPU's attention kernel, for which torch has no formula.
_CPU_ATTENTION: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
