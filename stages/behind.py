"""Work that goes on behind the model calls, in one thread and in order."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from stages.context import StageContext


class Behind:
    """Does jobs one after the other; the first error is raised by the next `put` or at the end of the block.

    `ahead` jobs may wait, each with what it holds in memory.
    """

    def __init__(self, ctx: StageContext, ahead: int) -> None:
        self._ctx, self._ahead = ctx, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._jobs: deque[Future[None]] = deque()
        _without_pool(self._thread)

    def put(self, job: Callable[[], None]) -> None:
        """Adds a job; waits when too many are waiting."""
        self._jobs.append(self._thread.submit(job))
        self._wait(self._ahead)

    def _wait(self, left: int) -> None:
        with self._ctx.timed("idle"):
            while len(self._jobs) > left or (self._jobs and self._jobs[0].done()):
                self._jobs.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)


def _without_pool(thread: ThreadPoolExecutor) -> None:
    """A second OpenMP pool on the same cores puts both to sleep at each barrier: model calls took twice as long."""
    threads = torch.get_num_threads()
    # torch gives a thread its number at the first look, so it looks now.
    thread.submit(lambda: (torch.set_num_threads(1), torch.get_num_threads())).result()
    torch.set_num_threads(threads)  # MKL has one number for all threads
