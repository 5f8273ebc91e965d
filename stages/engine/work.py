"""How fast a stage computed: FLOP/s as a share of the machine's peak (MFU), pictures and tokens a second."""

import time
from functools import cache

import torch

from stages.context import StageContext
from stages.engine.flops import FlopMeter
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


class Work:
    """A stage's computing, from when its weights are loaded."""

    def __init__(self, ctx: StageContext, meter: FlopMeter, compute: torch.dtype) -> None:
        self._ctx, self._meter, self._compute = ctx, meter, compute
        self._begun, self._before = time.perf_counter(), (meter.flops, meter.tokens)

    def close(self, pictures: int) -> None:
        """Notes FLOPs of all ranks, MFU, pictures and transformer tokens a second."""
        seconds = time.perf_counter() - self._begun
        mine = [now - before for now, before in zip((self._meter.flops, self._meter.tokens), self._before, strict=True)]
        flops, tokens = total(torch.tensor(mine, dtype=torch.float64)).tolist()
        peak = peak_flops(self._ctx.device, self._compute) * self._ctx.world_size
        self._ctx.measured.update(
            flops=flops,
            mfu=flops / (seconds * peak),
            images_per_second=pictures / seconds,
            tokens_per_second=tokens / seconds,
        )


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
