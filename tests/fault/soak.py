"""What the soak does to a mount, and what it measures: test_soak.py."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

from tests.fault.conftest import Switches
from tests.mount.conftest import eventually
from tierfs.control.protocol import MountRecord, mount_directory
from tierfs.errors import TierfsError
from tierfs.state import CATALOG
from tierfs.testing.mounting import TestMount

WRITERS, FILES = 3, 40
"""Together they hold more bytes than the tiers above the archive."""
LARGEST = 6 << 20
PIECE = 1 << 20
LOG = "train.log"
PAUSE = 0.06
"""Longest pause of a writer in seconds between two operations: the pace of the soak."""
BACKOFF = 1.0
"""Seconds that a writer waits when every tier is full."""
FAILING = 0.1
"""Part of the archive's calls that fail."""


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def put(file: RawIOBase, data: bytes) -> None:
    """All of it, in pieces. Raises OSError."""
    at = 0
    while at < len(data):
        at += file.write(data[at : at + PIECE]) or 0


@dataclass
class Writer:
    """A program with a directory of its own, and what must be in it."""

    top: Path
    seed: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held during each operation."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path → (seed, size) of its content."""
    log: bytes = b""
    done: int = 0
    bytes: int = 0
    """Written, and read and compared."""
    refused: int = 0
    """Writes that found every tier full."""
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._number = 0
        self._where = "run-0"
        self._writing: str | None = None
        """What is being written; it may end anywhere when that fails."""

    def work(self, stop: threading.Event) -> None:
        """Until told to stop, or until something is not as it should be."""
        try:
            (self.top / self._where).mkdir(parents=True)
            steps: list[tuple[int, Callable[[], None]]] = [
                (6, self._save),
                (2, self._overwrite),
                (2, self._patch),
                (3, self._delete),
                (2, self._rename),
                (6, self._read),
                (1, self._map),
                (4, self._append),
                (1, self._move_directory),
            ]
            weights = [weight for weight, _ in steps]
            while not stop.wait(self._random.uniform(0, PAUSE)):
                with self.turn:
                    full = self._step(self._random.choices(steps, weights)[0][1])
                if full:
                    stop.wait(BACKOFF)
        except BaseException as error:
            self.failure = error
            stop.set()

    def _step(self, step: Callable[[], None]) -> bool:
        """Whether every tier was full. Then what was being written goes, as with a program that tidies up."""
        self.done += 1
        try:
            step()
        except OSError as error:
            if error.errno != errno.ENOSPC or self._writing is None:
                raise
            self.refused += 1
            (self.top / self._writing).unlink(missing_ok=True)
            self.files.pop(self._writing, None)
            if self._writing == LOG:
                self.log = b""
            return True
        finally:
            self._writing = None
        return False

    def expected(self) -> dict[str, bytes]:
        found = {name: content(*what) for name, what in self.files.items()}
        return found | ({LOG: self.log} if self.log else {})

    def _new(self) -> tuple[int, int]:
        self._number += 1
        return self.seed << 32 | self._number, int(2 ** self._random.uniform(10, LARGEST.bit_length() - 1))

    def _pick(self) -> str | None:
        return self._random.choice(sorted(self.files)) if self.files else None

    def _write(self, name: str, what: tuple[int, int]) -> None:
        """In pieces, and the header last, as savers do that do not know it before."""
        data = content(*what)
        self._writing, path = name, self.top / name
        with path.open("wb", buffering=0) as file:
            put(file, bytes(8))
            put(file, data[8:])
            file.seek(0)
            put(file, data[:8])
            if ".ckpt" in path.name:
                os.fsync(file.fileno())
        self._writing = None
        self.bytes += len(data)

    def _save(self) -> None:
        """A file under a temporary name, renamed; the oldest ones go."""
        what = self._new()
        name = f"{self._where}/{what[0] & 0xFFFFFFFF}.{self._random.choice(['pt', 'pt', 'ckpt'])}"
        self._write(f"{name}.tmp", what)
        (self.top / f"{name}.tmp").rename(self.top / name)
        self.files[name] = what
        while len(self.files) > FILES:
            self._remove(next(iter(self.files)))

    def _remove(self, name: str) -> None:
        (self.top / name).unlink()
        del self.files[name]

    def _delete(self) -> None:
        if len(self.files) > FILES // 2:
            self._remove(self._random.choice(sorted(self.files)))

    def _overwrite(self) -> None:
        if name := self._pick():
            what = self._new()
            self._write(name, what)
            self.files[name] = what

    def _patch(self) -> None:
        """Opened without truncation and written from its beginning to its end."""
        if name := self._pick():
            seed, size = self._new()[0], self.files[name][1]
            self._writing = name
            with (self.top / name).open("r+b", buffering=0) as file:
                put(file, content(seed, size))
            self.files[name] = seed, size

    def _rename(self) -> None:
        """To a new name, or over another file."""
        if name := self._pick():
            other = self._pick() if self._random.random() < 0.5 else f"{self._where}/renamed-{self.done}.pt"
            assert other is not None
            (self.top / name).rename(self.top / other)
            self.files[other] = self.files.pop(name)

    def _move_directory(self) -> None:
        fresh = f"run-{self.done}"
        (self.top / self._where).rename(self.top / fresh)
        self.files = {f"{fresh}/{name.partition('/')[2]}": what for name, what in self.files.items()}
        self._where = fresh

    def _append(self) -> None:
        line = b"step %d\n" % self.done
        self._writing = LOG
        with (self.top / LOG).open("ab", buffering=0) as file:
            put(file, line)
        self.log += line

    def _read(self) -> None:
        if name := self._pick():
            found, (seed, size) = (self.top / name).read_bytes(), self.files[name]
            assert found == content(seed, size), f"{name} has other bytes than were written"
            self.bytes += size

    def _map(self) -> None:
        if name := self._pick():
            seed, size = self.files[name]
            with (self.top / name).open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == content(seed, size), f"{name} has other bytes than were written"
            self.bytes += size


@dataclass(frozen=True)
class Figures:
    """Of one process."""

    memory: int
    """Bytes of its own."""
    descriptors: int
    """Without directories: a tier keeps those that it uses open, 256 at most."""
    deleted: int
    """Of these, files that are deleted: their bytes stay in their tier."""
    threads: int

    @classmethod
    def of(cls, pid: int) -> Figures:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        memory = int(status["RssAnon"].split()[0]) << 10
        found = list(cls._open(Path(f"/proc/{pid}/fd")))
        deleted = sum(path.startswith("/var/tmp") and path.endswith(" (deleted)") for path in found)
        return cls(memory, len(found), deleted, int(status["Threads"]))

    @staticmethod
    def _open(descriptors: Path) -> Iterator[str]:
        for descriptor in descriptors.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if not descriptor.is_dir():
                    yield str(descriptor.readlink())


@dataclass(frozen=True)
class Measured:
    daemon: Figures
    keeper: Figures
    wal: int
    """Bytes of the catalog's WAL."""


@dataclass
class Soak:
    mnt: TestMount
    switches: Switches
    disk: Path
    """Root of the filesystem that the archive lies on."""
    seed: int
    kills: int = 0
    events: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.stop = threading.Event()
        self.writers = [Writer(self.mnt.path / f"w{number}", self.seed + number) for number in range(WRITERS)]
        self._threads = [threading.Thread(target=writer.work, args=(self.stop,)) for writer in self.writers]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            self.calm()
            for thread in self._threads:
                thread.join()

    def raise_failures(self) -> None:
        for writer in self.writers:
            if writer.failure is not None:
                raise writer.failure

    # what happens to the mount

    def storm(self) -> None:
        self.switches.errors(FAILING, "archive")

    def calm(self) -> None:
        """The archive works, whatever it did before."""
        self.switches.repair()
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.disk / "filler"

    def _for_a_while(self) -> None:
        self.stop.wait(self.random.uniform(1, 5))

    def hang(self) -> None:
        """For a while no call into the archive returns."""
        self.switches.hang("archive")
        self._for_a_while()
        self.calm()
        self.storm()

    def full(self) -> None:
        """For a while the archive's filesystem has no room: half of the time not a byte, else next to nothing."""
        spared = self.random.choice([0, 2 << 20])
        with self._filler.open("wb") as file, contextlib.suppress(OSError):
            room = os.statvfs(self.disk)
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - spared))
        self._for_a_while()
        self._filler.unlink()

    def kill(self) -> None:
        """The daemon, by surprise; not one that was started a moment ago and has not said so."""
        pid = self._record().daemon_pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills += 1
        eventually(lambda: self._record().daemon_pid != pid, "no new daemon", seconds=30)

    def _record(self) -> MountRecord:
        while True:
            with contextlib.suppress(TierfsError, OSError, ValueError):
                record = MountRecord.read(mount_directory(self.mnt.path))
                self.mnt.pids |= set(record.pids)  # a test that fails leaves none of them behind
                return record

    def restart(self) -> None:
        self.mnt.cli("restart", self.mnt.path)

    def scrub(self) -> None:
        self.mnt.cli("scrub", self.mnt.path, "--tier", "nvme", timeout=120)

    def flush(self) -> None:
        """Perhaps in vain."""
        flushed = self.mnt.cli("flush", self.mnt.path, "--timeout", "2s", check=False)
        assert flushed.code in (0, 3), flushed.err

    def pause(self) -> None:
        self.mnt.cli("pause", self.mnt.path)
        self._for_a_while()
        self.mnt.cli("resume", self.mnt.path)

    def happen(self, *events: Callable[[], None]) -> None:
        event = self.random.choice(events)
        event()
        self.events[event.__name__] = self.events.get(event.__name__, 0) + 1

    # what is measured

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nobody writes, the archive works, everything is drained."""
        with contextlib.ExitStack() as stack:
            for writer in self.writers:
                stack.enter_context(writer.turn)
            self.calm()
            self.mnt.flush(timeout=120)
            yield
        self.storm()

    def measure(self, threads: int) -> Measured:
        """While all is quiet, and once no more than ``threads`` are left: those that have nothing to do end after a
        while."""
        record = self._record()
        assert record.keeper_pid is not None
        eventually(lambda: Figures.of(record.daemon_pid).threads <= threads, "threads do not end", seconds=60)
        wal = Path(f"{self.mnt.state / CATALOG}-wal")
        return Measured(Figures.of(record.daemon_pid), Figures.of(record.keeper_pid), wal.stat().st_size)

    # what must be there

    def expected(self) -> dict[str, bytes]:
        return {
            f"{writer.top.name}/{name}": data for writer in self.writers for name, data in writer.expected().items()
        }
