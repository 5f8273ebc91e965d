"""A trace of a stage by torch's profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


@contextmanager
def traced(directory: Path, rank: int, device: str) -> Iterator[None]:
    """Writes ``profile/rankN.json.gz`` of what the body computes, for chrome://tracing or Perfetto."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
    with profile(activities=activities, acc_events=True) as trace:
        yield
    folder = directory / "profile"
    folder.mkdir(exist_ok=True)
    trace.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
