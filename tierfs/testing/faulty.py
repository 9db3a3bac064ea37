"""A tier that fails as told: for unit tests around a store (`faulty`), for a real mount by environment (`install`).

Which call fails depends on the seed, the call and how many of its kind came before, not on the order in which threads
run, so that a run can be repeated. Faults: errors, delays, hangs, short reads and flipped bits. The tier's own methods
are struck, and the reads, writes and syncs of files on it that copies do by descriptor.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tierfs.errors import TierError
from tierfs.tiers import assembly, copy
from tierfs.tiers.wrap import wrap

S = TypeVar("S")

ENVIRONMENT = "TIERFS_TEST_FAULTS"
"""Directory with the switches of `install`."""
SPARED = frozenset({"prepare", "owner", "check_catalog", "expect", "note", "close", "prefix", "journals"})
"""What happens before there is a mount that could bear a fault, and what touches no storage."""
RAISES_OSERROR = frozenset({"create", "open", "size", "remove", "keys", "usage", "is_written"})
"""Methods of a ReplicaStore that raise OSError as it comes."""


@dataclass
class Faults:
    """What goes wrong. Thread-safe."""

    seed: int = 0
    rate: float = 0.0
    """Part of the calls that fail, 0..1."""
    errors: Sequence[int] = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT, errno.EROFS)
    delay: float = 0.0
    """Longest delay of a call in seconds; each is delayed by a part of it."""
    spoil_rate: float = 0.0
    """Part of the reads that give a flipped bit, or too little."""
    active: Callable[[], bool] = lambda: True
    hangs: Callable[[], bool] = lambda: False
    """While it says so, no call returns."""
    only: frozenset[str] = frozenset()
    """Calls that may fail; empty: all of them."""
    struck: Counter[str] = field(default_factory=Counter)
    """How often each call failed."""
    calls: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    """Calls that hang at this moment."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strike(self, call: str) -> None:
        """Before ``call``: returns, later or never, or raises OSError."""
        if self.only and call not in self.only:
            return
        if self.hangs():
            self._hang()
        if not self.active():
            return
        chance = self._chance(call)
        if self.delay:
            time.sleep(chance.random() * self.delay)
        if chance.random() < self.rate:
            with self._lock:
                self.struck[call] += 1
            code = chance.choice(self.errors)
            raise OSError(code, os.strerror(code))

    def _hang(self) -> None:
        with self._lock:
            self.inside += 1
        try:
            while self.hangs():
                time.sleep(0.005)
        finally:
            with self._lock:
                self.inside -= 1

    def spoil(self, data: memoryview) -> memoryview:
        """What a read gives: the data, or less, or with a bit flipped."""
        if not self.spoil_rate or not self.active() or not len(data):
            return data
        chance = self._chance("spoil")
        if chance.random() >= self.spoil_rate:
            return data
        with self._lock:
            self.struck["spoil"] += 1
        if chance.random() < 0.5:
            return data[: chance.randrange(len(data))]
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return data

    def _chance(self, call: str) -> random.Random:
        with self._lock:
            self.calls[call] += 1
            return random.Random(f"{self.seed}/{call}/{self.calls[call]}")


def faulty(store: S, faults: Faults) -> S:
    """Looks like ``store`` (a ReplicaStore or TreeStore), and fails as told. Data read and written by descriptor is
    left alone: `install_data` strikes that."""
    raw = RAISES_OSERROR if hasattr(store, "keys") else frozenset({"usage"})

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if name in SPARED:
            return method

        @functools.wraps(method)
        def struck(*args: Any, **kwargs: Any) -> Any:
            try:
                faults.strike(name)
            except OSError as error:
                if name in raw:
                    raise
                raise TierError.of(str(getattr(store, "name", "?")), name, error) from error
            return method(*args, **kwargs)

        return struck

    return wrap(store, around)


def install_data(faults_of: Callable[[int], Faults | None], patch: Callable[[object, str, object], object]) -> None:
    """Strike what copies do by descriptor: ``faults_of(fd)`` tells the faults of the tier that an open file is on.
    ``patch(object, name, value)`` is setattr, or pytest's."""
    read, write = copy._read, copy.Destination.write

    def struck_read(fd: int, offset: int, length: int) -> memoryview:
        faults = faults_of(fd)
        if faults is None:
            return read(fd, offset, length)
        faults.strike("read")
        return faults.spoil(read(fd, offset, length))

    def struck_write(self: copy.Destination, data: memoryview | bytes, offset: int) -> None:
        faults = faults_of(self._fd)
        if faults is not None:
            faults.strike("write")
        write(self, data, offset)

    patch(copy, "_read", struck_read)
    patch(copy.Destination, "write", struck_write)


def by_root(roots: dict[str, Faults]) -> Callable[[int], Faults | None]:
    """For `install_data`: the faults of the tier below whose root a descriptor's file is."""

    def faults_of(fd: int) -> Faults | None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return next((faults for root, faults in roots.items() if path.startswith(root)), None)

    return faults_of


def install() -> None:
    """Make the tiers of every mount of this process faulty, as the files in the directory named by the environment
    say: ``rate`` (a number: errors, while it is there), ``spoil`` (the same for reads), ``hang`` (nothing returns while
    it is there), each followed by ``-`` and the tier's name. Without that directory nothing is changed."""
    where = os.environ.get(ENVIRONMENT)
    if where is None:
        return
    directory, roots = Path(where), dict[str, Faults]()
    opened: Any = assembly
    open_store, tree_store, chunked = opened.open_store, opened.TreeStore, opened.chunked_store

    def faults_for(name: str, root: Path) -> Faults:
        made = roots[str(root)] = Switched(directory, name)
        return made

    def open_faulty(*args: Any) -> Any:
        store, mount = open_store(*args)
        return faulty(store, faults_for(store.name, store.root)), mount

    def faulty_tree(name: str, root: Path, size: int | None = None) -> Any:
        return faulty(tree_store(name, root, size), faults_for(name, root))

    def faulty_chunked() -> Any:
        kind = chunked()
        return lambda name, root, size=None: faulty(kind(name, root, size), faults_for(name, root))

    opened.open_store, opened.TreeStore, opened.chunked_store = open_faulty, faulty_tree, faulty_chunked
    install_data(by_root(roots), setattr)


class Switched(Faults):
    """Faults that files switch on and off while a mount runs."""

    def __init__(self, directory: Path, tier: str) -> None:
        super().__init__(seed=int(os.environ.get("TIERFS_TEST_SEED", "0")))
        self._directory, self._tier = directory, tier
        self.active = self._look
        self.hangs = lambda: (directory / f"hang-{tier}").exists()

    def _look(self) -> bool:
        self.rate, self.spoil_rate = self._number("rate"), self._number("spoil")
        return bool(self.rate or self.spoil_rate)

    def _number(self, what: str) -> float:
        try:
            return float((self._directory / f"{what}-{self._tier}").read_text() or 0)
        except OSError:
            return 0.0
