"""A worker that torchrun started: it meets the foreman in a folder; schemas/mailbox.py says what lies there."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from schemas.mailbox import LEFT, REPLIES, Foreman, Hello, Order, foreman_of
from schemas.pulse import Pulse, interval
from stages.transports.logs import begin_log, write_stacks
from stages.transports.pipe import die_with
from stages.transports.serving import Perform, Reply, beat, free_port, replies, serve

_LOOK = 0.2  # seconds between looks at the foreman
_QUICK = 0.02  # seconds between looks for an order, at first


class Post:
    """This worker's place in the mailbox, once it has met the foreman."""

    def __init__(self, mailbox: Path, foreman: Foreman) -> None:
        self.mailbox, self.foreman = mailbox, foreman
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.name = f"rank{self.rank}-{uuid.uuid4().hex[:12]}"
        self.folder = mailbox / foreman.session

    def write(self, line: str) -> None:
        """Appends to its replies; closed each time, for on some shared file systems only that lets others see it."""
        with (self.folder / (self.name + REPLIES)).open("a", encoding="utf-8") as stream:
            stream.write(line)

    def announce(self) -> None:
        """Its first line."""
        address = os.environ.get("MASTER_ADDR", "127.0.0.1") if self.rank == 0 else socket.gethostname()
        hello = Hello(
            rank=self.rank,
            world_size=self.world_size,
            host=socket.gethostname(),
            process=os.getpid(),
            address=address,
            port=free_port(),
        )
        _agent(self.mailbox, self.foreman.session).touch()
        self.write(hello.model_dump_json() + "\n")

    def orders(self) -> Iterator[str]:
        """Requests to this worker, for ever."""
        done, pause = "", _QUICK
        while True:
            for path in sorted(self.folder.glob("order-*.json")):
                order = self._order(path) if path.name > done else None
                if order is None:
                    continue
                done, pause = path.name, _QUICK
                # Ranks meet where the foreman says: torchrun's own store outlives a start and remembers the last one.
                meeting = {"MASTER_ADDR": order.address, "MASTER_PORT": str(order.port)}
                os.environ.update(meeting, TORCHELASTIC_USE_AGENT_STORE="False")
                yield json.dumps(order.request)
            time.sleep(pause)
            pause = min(pause * 1.2, _LOOK)

    def _order(self, path: Path) -> Order | None:
        try:
            order = Order.model_validate_json(path.read_bytes())
        except OSError:  # taken back
            return None
        return order if self.name in order.crew else None

    def watch(self, reply: Reply) -> None:
        """Leaves when the foreman says so or is gone, amid whatever the stage does."""
        pulse, asked = Pulse(), False
        while True:
            time.sleep(_LOOK)
            now = foreman_of(self.mailbox)
            if now is not None and now != self.foreman:
                pulse.beat()
                self.foreman = now
            if self.foreman.session != self.folder.name:
                _leave(reply, LEFT, "another foreman has come")
            if not self.foreman.open:
                _leave(reply, 0, "the foreman has no more work")
            if self.name in self.foreman.dismissed:
                _leave(reply, LEFT, "dismissed, to be started anew by torchrun (--max-restarts)")
            if pulse.silence() > self.foreman.heartbeat:
                _leave(reply, 0, f"no sign of the foreman for {self.foreman.heartbeat:g} s (resources.heartbeat)")
            if self.name in self.foreman.stacks and not asked:
                asked = True
                write_stacks()


def run(perform: Perform, mailbox: Path, wait: float) -> None:
    """Serves until the foreman has no more work, or is gone; waits `wait` seconds for its first sign."""
    die_with(os.getppid())
    if _orphan():
        sys.exit("stages.worker: torchrun, which started it, is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches torchrun, which ends its workers
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        sys.exit(f"stages.worker: --mailbox wants {', '.join(missing)} in the environment; start it by torchrun")
    post = Post(mailbox.resolve(), _met(mailbox.resolve(), wait))
    if post.foreman.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(post.foreman.threads)  # torch, not loaded yet, reads it when it is
    log = Path(post.foreman.logs) / f"compute-rank{post.rank}.log"
    print(f"stages.worker: rank {post.rank} of {post.world_size} found the foreman, goes on in {log}", flush=True)
    begin_log(log)
    post.announce()
    reply = replies(post.write)
    beat(reply, interval(post.foreman.heartbeat))
    threading.Thread(target=post.watch, args=(reply,), name="watch", daemon=True).start()
    serve(perform, reply, post.orders())


def _orphan() -> bool:
    """Whether torchrun died while this process was starting, before the kernel was asked to tell."""
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # another system, or another user's process
        return False
    return "TORCHELASTIC_RUN_ID" in os.environ and b"torch" not in parent


def _met(mailbox: Path, wait: float) -> Foreman:
    """The foreman, once it shows that it lives: what an earlier one left does not change."""
    first, end = foreman_of(mailbox), time.monotonic() + wait
    while time.monotonic() < end:
        now = foreman_of(mailbox)
        if now is not None:
            ours = _agent(mailbox, now.session).exists()
            if not now.open and (ours or now != first):
                print("stages.worker: the foreman has no more work", flush=True)
                sys.exit(0)
            if now.open and now != first:
                return now
        time.sleep(_LOOK)
    sys.exit(f"stages.worker: no foreman in {mailbox} for {wait:g} s; start `rewardflow run` with launcher torchrun")


def _agent(mailbox: Path, session: str) -> Path:
    """Marks that workers of this torchrun agent have met that foreman, for those that it starts anew."""
    return mailbox / session / f"agent-{socket.gethostname()}-{os.getppid()}"


def _leave(reply: Reply, code: int, why: str) -> None:
    with contextlib.suppress(OSError):
        print(f"stages.worker: leaves: {why}", flush=True)
        reply("bye")
    os._exit(code)
