"""How long somebody has been silent, by the listener's own clock."""

import time

_STEP = 2.0  # seconds; looks should come closer together than this


class Pulse:
    """Silence, without the time in which the listener itself stood still, as after Ctrl-Z or in a frozen machine.

    `beat` may be called from another thread than `silence`.
    """

    def __init__(self) -> None:
        self._silent = 0.0
        self._looked = time.monotonic()

    def beat(self) -> None:
        """A sign of life."""
        self._silent = 0.0

    def silence(self) -> float:
        """Seconds since the last sign; counts at most a step since the last look."""
        now = time.monotonic()
        self._silent += min(now - self._looked, _STEP)
        self._looked = now
        return self._silent


def interval(heartbeat: float) -> float:
    """Seconds between two signs of life of someone who counts as lost after `heartbeat` seconds without."""
    return min(1.0, heartbeat / 5)
