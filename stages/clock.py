"""Where a stage's time goes. Times are exclusive: what is timed inside something else is not counted there too.

On CUDA the device's own time is taken, by events that are read at the end: the host never waits for them. There
communication runs beside the model's calls, so that the parts may add up to more than the whole.
"""

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HOST = frozenset(("load", "data", "write", "save", "idle"))  # the device has no part in it


class Clock:
    """Adds up seconds by name; threads may share it."""

    def __init__(self, device: str) -> None:
        self._device = device if device.startswith("cuda") else ""
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []
        self._lock = threading.Lock()
        self._local = threading.local()
        self._begun, self._thread, self._named = time.perf_counter(), threading.get_ident(), 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that its body takes to `name`, what is timed inside left out."""
        if self._device and name not in _HOST:
            begun, ended = self._event(), self._event()
            begun.record()
            try:
                yield
            finally:
                ended.record()
                with self._lock:
                    self._events.append((name, begun, ended))
            return
        outer: float = getattr(self._local, "inside", 0.0)
        self._local.inside, begun = 0.0, time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begun
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + spent - self._local.inside
                self._named += (spent - self._local.inside) if threading.get_ident() == self._thread else 0.0
            self._local.inside = outer + spent

    def parts(self) -> dict[str, float]:
        """`time/NAME` in seconds; waits for the device. On the CPU `time/other` is the rest of the stage's thread."""
        out = dict(self._seconds)
        if not self._device:
            out["other"] = time.perf_counter() - self._begun - self._named
        for name, begun, ended in self._events:
            ended.synchronize()
            out[name] = out.get(name, 0.0) + begun.elapsed_time(ended) / 1000
        return {f"time/{name}": seconds for name, seconds in out.items()}

    def _event(self) -> Any:
        return importlib.import_module("torch").cuda.Event(enable_timing=True)
