"""A worker as a Ray actor. Its methods are called from Ray's threads; stages run in one of ours."""

import importlib
import os
import queue
import socket
import sys
import threading
from pathlib import Path

from stages.transports.logs import begin_log, write_stacks
from stages.transports.serving import beat, free_port, replies, serve
from stages.worker import Worker


class Actor:
    """One rank; RANK, WORLD_SIZE and the like are in its environment."""

    def __init__(self, log: str, hidden: str) -> None:
        # Ray puts the foreman's folder first; there a user's file may have the name of any package.
        sys.path[:] = [folder for folder in sys.path if folder != hidden]
        begin_log(Path(log))
        self._requests: queue.Queue[str] = queue.Queue()
        self._replies: queue.Queue[str] = queue.Queue()

    def place(self) -> tuple[str, int]:
        """Its machine's address as Ray knows it, and a free port there."""
        return importlib.import_module("ray").util.get_node_ip_address(), free_port()

    def begin(self, address: str, port: int, every: float) -> None:
        """Tells where ranks meet, and starts serving; `every`: seconds between signs of life."""
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        reply = replies(self._replies.put)
        print(f"process {os.getpid()} on {socket.gethostname()}, rank {os.environ['RANK']}", flush=True)
        beat(reply, every)
        work = (Worker().perform, reply, iter(self._requests.get, ""))
        threading.Thread(target=serve, args=work, name="stage", daemon=True).start()

    def order(self, line: str) -> None:
        """A request, as JSON."""
        self._requests.put(line)

    def take(self, seconds: float) -> list[str]:
        """Replies since the last call; waits up to so many seconds for the first."""
        try:
            taken = [self._replies.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._replies.empty():
            taken.append(self._replies.get())
        return taken

    def stacks(self) -> None:
        """Writes the Python stacks of all threads into its log."""
        write_stacks()
