"""A recall during which the file is open already: reads wait for their own range only.

The backing file is filled by several threads: first the chunks that reads wait for, then onwards from there. One thread
more does only what reads wait for, so that a read need not wait for the chunks being fetched ahead.

Integrity: the digests of the chunks of an archived large file are in the catalog, so that every chunk is checked
before it is written and before a read gets it. Where they are missing (a very large file) reads wait until the whole
file is here and has its digest. A chunk that is not what was written makes reads of it EIO for as long as the file
stays open, is logged with the file's name, and keeps the file from becoming a replica; right chunks can still be read.

A tier that fails is asked again for as long as the file is open, at once when another read comes; a read gives up with
EIO when nothing has come for the policy's ``limits.read_timeout``.

Where the tier turns out to have no room for the file, it gets back what it gave, and what is read from then on comes
from where the file stands (`direct`).

The file has a temporary name until it is complete: what a killed daemon leaves goes as such, and the next daemon
starts the recall of a handle that it took over afresh. An incomplete recall is given up when nobody has the file open
any more: who reads the header of a file of 100 GB should not fill the memory with it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import trio

from tierfs.durable import TemporaryFile
from tierfs.errors import DigestMismatch, FsError, SourceChanged, TierError
from tierfs.fs.mover import FULL
from tierfs.fs.ports import Filling
from tierfs.migrator.transfer import STREAMS
from tierfs.migrator.tries import RETRY_FIRST, RETRY_LAST
from tierfs.points import At, reach
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.beside import Describe
from tierfs.tiers.content import Content
from tierfs.tiers.copy import CHUNK, Destination, chunk_digest, tree_digest
from tierfs.types import Replica

LOST_AFTER = 4
"""Failures to read a chunk, while others come, until it counts as lost."""
COMPLAINTS = 8
"""Lines in the log about one file: a damaged one has many chunks."""

WANTED, COMING, HERE, BAD = range(4)

T = TypeVar("T")


class Host(Protocol):
    """What a recall needs of the migrator. Called on the event loop."""

    def locate(self, source: Replica) -> Callable[[], Content]:
        """What opens the source, in a thread, where it stands now. That raises OSError, TierError."""

    def arrived(self, recall: Recall, replica: Replica) -> None:
        """All is here, verified and published."""

    def settled(self, replica: Replica) -> None:
        """The recall is over, one way or another: its space need not be reserved any more. Called once."""

    def crowded(self, recall: Recall, source: Replica) -> Filling:
        """The tier has no room for it: what takes its place for the open file, with its descriptor."""

    def superfluous(self, replica: Replica) -> None:
        """Nobody wants the file that was just published: remove it."""

    def complain(self, replica: Replica, tier: str, what: str, *, damaged: bool = False) -> None:
        """Something that an operator must see; ``damaged``: the tier has other bytes than were written."""


@dataclass(kw_only=True, eq=False)
class Recall:
    """What an open inode's `filling` is.

    Threads may hang in the archive for ever, so nobody waits for them: nothing is written to the file once ``_stopped``
    is seen under ``_writing``, and the descriptors are closed by whoever leaves last, the owner (the open inode, until
    `abandon`, `cut` or the end) or such a thread.
    """

    source: Replica | None
    """None: no tier has these bytes any more, and every read fails."""
    replica: Replica
    mtime_ns: int
    store: ReplicaStore
    temp: TemporaryFile
    chunks: list[bytes] | None
    describe: Describe | None
    """What to keep beside the replica."""
    """Digests to check each chunk with; None: only the whole can be checked."""
    host: Host
    limiter: trio.CapacityLimiter
    patience: float
    """Seconds until a read fails with EIO when no chunk of its file has come."""

    def __post_init__(self) -> None:
        self.fd = os.dup(self.temp.fd)
        count = -(-self.replica.size // CHUNK)
        self._states = bytearray(count)
        self._digests = [b""] * count
        self._demand: deque[int] = deque()
        self._next = 0
        self._arrived = 0
        self._moved = trio.Event()
        self._asked = trio.Event()
        self._poked = trio.Event()
        self._failure: str | None = None
        self._full = False
        """The last write to the file found no room."""
        self._successor: Filling | None = None
        self._trouble = ""
        self._complaints = 0
        self._complete = False
        self._stopped = False
        self._settled = False
        self._scope = trio.CancelScope()
        self._content: Content | None = None
        self._destination = Destination(self.temp.fd)
        self._writing = threading.Lock()
        self._counting = threading.Lock()
        self._users = 1

    # for the open file

    async def wait(self, offset: int, length: int) -> bytes | None:
        """None when this range is here and known to be right. FsError EIO when it is not to be had."""
        end = min(offset + length, self.replica.size)
        if offset >= end:
            return None
        wanted = slice(offset // CHUNK, -(-end // CHUNK))
        for index in range(wanted.start, wanted.stop):
            if self._states[index] == WANTED and index not in self._demand:
                self._demand.append(index)
                self._asked.set()
        self._poked.set()
        self._poked = trio.Event()
        while not self._complete:
            if self._successor is not None:
                return await self._successor.wait(offset, length)
            states = self._states[wanted]
            if self._failure is not None or BAD in states:
                raise FsError(errno.EIO)
            if self.chunks is not None and states.count(HERE) == len(states):
                return None
            await self._progress()
        return None

    async def complete(self) -> None:
        """Returns when the whole file is a replica in the catalog. FsError EIO when it cannot be; ENOSPC."""
        while not self._complete:
            if self._successor is not None:
                return await self._successor.complete()
            if self._failure is not None or BAD in self._states or self._stopped:
                raise FsError(errno.EIO)
            await self._progress()

    async def _progress(self) -> None:
        with trio.move_on_after(self.patience):
            await self._moved.wait()
            return
        self._complain(f"nothing came for {self.patience:g} s {self._trouble}")
        raise FsError(errno.EIO)

    async def cut(self) -> None:
        """Stop, and make the file a replica without a byte: the next version starts in it."""
        if self._complete:
            return
        self._complete = True
        self._stop()
        self._settle()
        await trio.to_thread.run_sync(self._cut)

    def _cut(self) -> None:
        with self._writing:
            os.ftruncate(self.fd, 0)
            if not self.temp.committed:
                self._destination.close()
                self.store.publish(self.temp, self.replica.key)
        self._leave()

    def abandon(self) -> None:
        """Nobody has the file open any more: give up, and close ``fd``. Freeing the memory of a large file takes a
        while, so a thread does it."""
        self._stop()
        self._settle()

        def leave() -> None:
            os.close(self.fd)
            self._leave()

        trio.lowlevel.start_thread_soon(leave, lambda outcome: None)

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self.host.settled(self.replica)

    def _stop(self) -> None:
        self._stopped = True
        self._scope.cancel()
        self._notify()

    def _notify(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    def _fail(self, what: str, *, damaged: bool = False) -> None:
        self._complain(what, damaged=damaged)
        self._failure = what
        self._notify()

    def _complain(self, what: str, *, damaged: bool = False) -> None:
        if self._stopped:
            return  # given up: threads that come to nothing because of that are no fault
        self._complaints += 1
        if self._complaints <= COMPLAINTS:
            tier = self.source.tier if self.source else self.replica.tier
            self.host.complain(self.replica, tier, what, damaged=damaged)

    # the task

    async def run(self) -> None:
        """Fetch everything, then make it a replica."""
        with self._scope:
            if self.source is None:
                self._fail("no tier has its content any more")
                return
            size = await self._persist(partial(self._open, self.source))
            if size != self.source.size:
                self._fail(f"it has {size} bytes there, not {self.source.size}", damaged=True)
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fetch_demanded)
                for _ in range(STREAMS):
                    nursery.start_soon(self._fetch_all)
            if self._states.count(HERE) == len(self._states):
                await self._finish(self.source)

    async def _persist(self, attempt: Callable[[], Callable[[], T]], tries: Callable[[], bool] = lambda: True) -> T:
        """The first result of ``attempt`` (made on the loop, called in a thread) without an error. Raises the error
        when ``tries`` says that it is enough."""
        delay = RETRY_FIRST
        while True:
            try:
                return await self._in_thread(attempt())
            except SourceChanged:
                raise
            except (OSError, TierError) as error:
                self._trouble = f"({error})"
                if not tries():
                    raise
            with trio.move_on_after(delay):
                await self._poked.wait()
            delay = min(RETRY_LAST, 2 * delay)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def run() -> T:
            with self._counting:
                if not self._users:
                    raise SourceChanged("the recall is over")
                self._users += 1
            try:
                return work()
            finally:
                self._leave()

        return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self.limiter)

    def _leave(self) -> None:
        """The last user closes what is left. Blocks."""
        with self._counting:
            self._users -= 1
            if self._users:
                return
        self._destination.close()
        self.temp.discard()
        if self._content is not None:
            self._content.close()

    def _open(self, source: Replica) -> Callable[[], int]:
        opener = self.host.locate(source)

        def open_source() -> int:
            """The source's size in bytes."""
            content = self._content = opener()
            if self.store.persistent:
                self._destination.prefer_direct()
            return content.size

        return open_source

    async def _fetch_all(self) -> None:
        while (index := self._pick()) is not None:
            await self._fetch(index)
        self._asked.set()

    async def _fetch_demanded(self) -> None:
        while WANTED in self._states:
            index = self._pick_demanded()
            if index is not None:
                await self._fetch(index)
            else:
                self._asked = trio.Event()
                await self._asked.wait()

    def _pick(self) -> int | None:
        """The next chunk: what a read waits for, else onwards from there, at last what was passed over."""
        index = self._pick_demanded()
        if index is not None:
            return index
        index = self._states.find(WANTED, self._next)
        if index < 0:
            index = self._states.find(WANTED)
        if index < 0:
            return None
        self._next = index + 1
        return index

    def _pick_demanded(self) -> int | None:
        while self._demand:
            index = self._demand.popleft()
            if self._states[index] == WANTED:
                self._next = index + 1
                return index
        return None

    async def _fetch(self, index: int) -> None:
        self._states[index] = COMING
        self._states[index] = state = await self._outcome(index)
        self._arrived += state == HERE
        self._notify()

    async def _outcome(self, index: int) -> int:
        """Get one chunk: HERE or BAD."""
        others, failures = self._arrived, 0

        def tries() -> bool:
            nonlocal failures
            failures += 1
            return failures < LOST_AFTER or (self._arrived == others and not self._full)

        try:
            if await self._persist(lambda: partial(self._copy, index), tries):
                return HERE
            what = f"bytes {index * CHUNK} and on are not those that were written; reading them gives EIO"
            self._complain(what, damaged=True)
        except (OSError, TierError) as error:
            if self._full:
                self._crowd()
                return WANTED
            self._complain(f"bytes {index * CHUNK} and on cannot be read: {error}")
        return BAD

    def _crowd(self) -> None:
        """The tier has no room after all."""
        if not self._stopped and self.source is not None:
            self._successor = self.host.crowded(self, self.source)
            self._stop()
            self._settle()
            trio.lowlevel.start_thread_soon(self._leave, lambda outcome: None)

    def _copy(self, index: int) -> bool:
        """Copy a chunk, in a thread; False when it is not what was written."""
        offset = index * CHUNK
        assert self._content is not None
        try:
            data = self._content.read(offset, min(CHUNK, self.replica.size - offset))
        except DigestMismatch:
            return False
        digest = chunk_digest(data)
        if self.chunks is not None and digest != self.chunks[index]:
            return False
        with self._writing:
            if not self._stopped:
                self._put(data, offset)
                self._digests[index] = digest
        reach(At.FILL_FETCHED)
        return True

    def _put(self, data: memoryview, offset: int) -> None:
        try:
            self._destination.write(data, offset)
        except OSError as error:
            self._full = error.errno in FULL
            raise
        self._full = False

    async def _finish(self, source: Replica) -> None:
        digest = tree_digest(self._digests)
        if source.digest is not None and digest != source.digest:
            self._fail("its bytes are not those that were written; reading it gives EIO", damaged=True)
            return
        try:
            with trio.CancelScope(shield=True):
                published = await self._in_thread(partial(self._publish, digest))
        except (OSError, TierError) as error:
            if error.errno in FULL:
                self._crowd()
            else:
                self._complain(f"it cannot stay on tier {self.replica.tier}: {error}")
            return
        if not self._stopped:
            self._complete = True
            self._settle()
            reach(At.FILL_NAMED)
            self.host.arrived(self, self.replica._replace(digest=digest))
            reach(At.FILL_RECORDED)
            self._notify()
            await trio.to_thread.run_sync(self._leave)
        elif published and not self._complete:
            self.host.superfluous(self.replica)

    def _publish(self, digest: bytes) -> bool:
        """Give the file its name; False when it is not wanted any more."""
        with self._writing:
            if self._stopped:
                return False
            self._destination.close()
            os.utime(self.temp.fd, ns=(self.mtime_ns, self.mtime_ns))
            self.store.publish(self.temp, self.replica.key, self.describe, digest)
            return True
