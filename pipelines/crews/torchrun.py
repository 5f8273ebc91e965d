"""Ranks that torchrun started somewhere; they are met in a folder, as schemas/mailbox.py says."""

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from pipelines.crews.crew import Inbox
from schemas.engine import Resources
from schemas.errors import RewardflowError, UserError
from schemas.mailbox import FOREMAN, REPLIES, Foreman, Hello, Order, put
from schemas.pulse import Pulse, interval

_QUICK, _SLOW = 0.02, 0.2  # seconds between looks at replies: at first, and when nothing comes
_STALE = 5.0  # seconds of silence after which an idle worker is taken for dead
_STACKS = 2.0  # seconds to write them


class Mailbox:
    """The foreman's side. It gives signs of life as long as it is open."""

    def __init__(self, resources: Resources, folder: Path, logs: Path) -> None:
        self.folder, self.logs, self.resources = folder.resolve(), logs.resolve(), resources
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        for old in self.folder.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        self._said = Foreman(
            session=uuid.uuid4().hex[:12],
            beat=0,
            open=True,
            processes=resources.processes,
            threads=resources.threads,
            heartbeat=resources.heartbeat,
            logs=str(self.logs),
            dismissed=(),
            stacks=(),
        )
        self.session.mkdir()
        self._saying = threading.Lock()
        self._closed = threading.Event()
        self.letters: dict[str, Letter] = {}
        threading.Thread(target=self._beats, name="mailbox", daemon=True).start()

    @property
    def session(self) -> Path:
        """Where orders and replies lie."""
        return self.folder / self._said.session

    @property
    def dismissed(self) -> tuple[str, ...]:
        """Workers that belong to no crew any more."""
        return self._said.dismissed

    def begin(self) -> "TorchrunCrew":
        """Looks for workers."""
        return TorchrunCrew(self)

    def say(self, **changes: Any) -> None:
        """Tells workers what has changed, and that the foreman lives."""
        with self._saying:
            self._said = self._said.model_copy(update={"beat": self._said.beat + 1, **changes})
            put(self.folder / FOREMAN, self._said.model_dump_json())

    def look(self) -> list["Letter"]:
        """Reads what workers have written; gives those that are new."""
        new = [path for path in self.session.glob("*" + REPLIES) if path.name not in self.letters]
        found = [Letter(path) for path in sorted(new, key=_age)]
        self.letters |= {letter.path.name: letter for letter in found}
        return found

    def close(self) -> None:
        """Goodbye: all workers leave."""
        if not self._closed.is_set():
            self._closed.set()
            self.say(open=False)
            os.close(self._lock)

    def _beats(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # a full disk: workers give up after resources.heartbeat
                self.say()
            self._closed.wait(interval(self.resources.heartbeat))


class Letter:
    """What one worker has written so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name.removesuffix(REPLIES)
        self.pulse = Pulse()
        self.hello: Hello | None = None
        self._read = 0

    def news(self) -> list[dict[str, Any]]:
        """Whole lines that have come since the last call."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._read)
                data = stream.read()
        except OSError:  # out of reach for the moment
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        if data:
            self.pulse.beat()
        lines = [json.loads(line) for line in data.splitlines()]
        if self.hello is None and lines:
            self.hello = Hello.model_validate(lines.pop(0))
        return lines


class TorchrunCrew:
    """A Crew."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.inbox = Inbox(mailbox.resources.processes)
        self._found: dict[int, Letter] = {}
        self._orders = 0
        self._endings: dict[int, str] = {}
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None

    def missing(self) -> str:
        """Ranks that have not come, or not lately."""
        if self._reader is not None:
            return ""
        self._mailbox.look()
        for letter in self._mailbox.letters.values():
            letter.news()
            if letter.hello is not None and letter.name not in self._mailbox.dismissed:
                self._check(letter.hello)
                self._found[letter.hello.rank] = letter  # the newest, for they are in order of age
        alive = [rank for rank, letter in self._found.items() if letter.pulse.silence() < _STALE]
        absent = [rank for rank in range(self.inbox.ranks) if rank not in alive]
        if absent:
            ranks = ", ".join(map(str, absent))
            return f"rank {ranks}: torchrun ... -m stages.worker --mailbox {self._mailbox.folder}"
        for rank in alive:
            self.inbox.put(rank, {"kind": "hello"})
        self._reader = threading.Thread(target=self._read, name="replies", daemon=True)
        self._reader.start()
        return ""

    def late(self, missing: str, seconds: float) -> RewardflowError:
        """torchrun is the user's to start."""
        return UserError(
            f"after {seconds:g} s (resources.start_timeout) still no {missing}; "
            "torchrun starts workers again only with --max-restarts"
        )

    def send(self, request: str) -> None:
        """As a file for all ranks."""
        self._orders += 1
        first = self._found[0].hello
        assert first is not None
        names = tuple(self._found[rank].name for rank in range(self.inbox.ranks))
        order = Order(crew=names, address=first.address, port=first.port, request=json.loads(request))
        self._withdraw()
        put(self._mailbox.session / f"order-{time.time_ns():020d}.json", order.model_dump_json())

    def log(self, rank: int) -> Path:
        """In the run's folder."""
        return self._mailbox.logs / f"compute-rank{rank}.log"

    def ending(self, rank: int) -> str:
        """What was noticed."""
        return self._endings.get(rank, "does not answer")

    def write_stacks(self) -> None:
        """A frozen one cannot."""
        self._mailbox.say(stacks=tuple(letter.name for letter in self._found.values()))
        time.sleep(_STACKS)

    def end(self, grace: float) -> None:
        """With grace it is goodbye for all; without, workers leave and torchrun starts them anew."""
        if grace:
            self._mailbox.close()
            end = time.monotonic() + grace
            while (
                self._reader is not None and len(set(self.inbox.ended())) < self.inbox.ranks and time.monotonic() < end
            ):
                time.sleep(_QUICK)
        else:
            gone = tuple(letter.name for letter in self._mailbox.letters.values())
            self._mailbox.say(dismissed=gone)
        self._ended.set()
        self._withdraw()

    def _staying(self) -> bool:
        return len(set(self.inbox.ended())) < self.inbox.ranks

    def _check(self, hello: Hello) -> None:
        if hello.world_size != self.inbox.ranks:
            raise UserError(
                f"resources.processes is {self.inbox.ranks}, but torchrun started {hello.world_size} workers "
                f"(WORLD_SIZE of process {hello.process} on {hello.host}); make them equal"
            )

    def _withdraw(self) -> None:
        for old in self._mailbox.session.glob("order-*.json"):
            old.unlink(missing_ok=True)

    def _read(self) -> None:
        pause = _QUICK
        while not self._ended.is_set():
            news = [(rank, message) for rank, letter in self._found.items() for message in letter.news()]
            for rank, message in news:
                self.inbox.put(rank, None if message["kind"] == "bye" else message)
            self._notice()
            pause = _QUICK if news else min(pause * 1.2, _SLOW)
            time.sleep(pause)

    def _notice(self) -> None:
        """Workers that have come since: torchrun starts them only when others have died."""
        for letter in self._mailbox.look():
            letter.news()
            if letter.hello is not None and letter.hello.rank in self._found:
                rank = letter.hello.rank
                self._endings[rank] = "died, and torchrun has started another"
                self.inbox.put(rank, None)


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _locked(folder: Path) -> int:
    """Held as long as the descriptor is open; the kernel frees it when this process dies."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"another command works with the torchrun workers of {folder}; wait for it or stop it"
        ) from None
    return handle
