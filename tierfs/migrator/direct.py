"""Reading a cold file for which no tier above has room: from where it stands, through the daemon, until its last close.

It is an open inode's `filling` that never fills anything: the inode's descriptor is an empty file of the same size in
memory, and `wait` gives the bytes themselves, chunk by chunk, each compared with its digest before it is handed out.
Where the catalog has no digests of chunks (small files, see `Recaller.remember`), all of the file is read once and
compared before the first read is answered, and the digests found so are what later reads are compared with.

The next open tries again to bring the file up, and so does whoever wants to write.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from tierfs.errors import DigestMismatch, FsError, SourceChanged, TierError
from tierfs.migrator.tries import RETRY_FIRST, RETRY_LAST
from tierfs.tiers.content import Content
from tierfs.tiers.copy import CHUNK, chunk_digest, tree_digest
from tierfs.types import Replica

KEPT = 16
"""Chunks in memory for the reads that follow, of all such files together."""

Kept = OrderedDict[tuple[int, int], bytes]
"""(`Direct.number`, index of the chunk) → its bytes; the one that was asked for last is the last."""


class Host(Protocol):
    """What this module needs of the recaller. Called on the event loop."""

    def locate(self, source: Replica) -> Callable[[], Content]:
        """What opens the source, in a thread, where it stands now. That raises OSError, TierError."""

    async def whole(self, replica: Replica) -> tuple[Replica, int]:
        """Recall the version: the replica in the catalog and a descriptor. FsError: ENOSPC while there is no room."""

    def empty(self, replica: Replica) -> int:
        """Make the replica's file, without a byte: a descriptor. Raises OSError."""

    def brought(self, direct: Direct, replica: Replica) -> None:
        """The file's descriptor has the bytes now, and ``replica`` is in the catalog."""

    def complain(self, replica: Replica, tier: str, what: str, *, damaged: bool = False) -> None:
        """Something that an operator must see; ``damaged``: the tier has other bytes than were written."""


def placeholder(size: int) -> int:
    """A descriptor for an inode whose bytes are nowhere near: fstat tells their number."""
    fd = os.memfd_create("tierfs", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


@dataclass(kw_only=True, eq=False)
class Direct:
    source: Replica
    replica: Replica
    """What it will be if it is cut: not in the catalog, without a file."""
    fd: int
    chunks: list[bytes] | None
    """The chunks' digests, known to be right."""
    host: Host
    limiter: trio.CapacityLimiter
    patience: float
    """Seconds until a read fails with EIO when nothing of its file has come."""
    kept: Kept
    number: int
    """Tells it from all others."""

    def __post_init__(self) -> None:
        self._turn = trio.Lock()
        self._arrived = 0
        self._held: Content | None = None
        """The source, open: it may be deleted while the file is still read. Under ``_holding``."""
        self._holding = threading.Lock()
        self._over = False

    # for the open file

    async def wait(self, offset: int, length: int) -> bytes:
        """The bytes of this range, known to be right. FsError EIO when they are not to be had."""
        end = min(offset + length, self.replica.size)
        pieces = []
        while offset < end:
            index, skip = divmod(offset, CHUNK)
            data = await self._chunk(index)
            pieces.append(data[skip : skip + end - offset])
            offset += len(pieces[-1])
        return b"".join(pieces)

    async def complete(self) -> None:
        """Returns when the file is a replica in the catalog. FsError: ENOSPC while no tier has room, EIO."""
        replica, fd = await self.host.whole(self.replica)
        self._take(fd)
        self.host.brought(self, replica)

    async def cut(self) -> None:
        """Make the file a replica without a byte: the next version starts in it. Raises OSError: ENOSPC."""
        self._take(self.host.empty(self.replica))

    def abandon(self) -> None:
        """Nobody has the file open any more."""
        self._end()
        os.close(self.fd)

    def _take(self, fd: int) -> None:
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)
        self._end()

    def _end(self) -> None:
        with self._holding:
            self._over = True
            held, self._held = self._held, None
        if held is not None:
            held.close()
        for key in [key for key in self.kept if key[0] == self.number]:
            del self.kept[key]

    # one chunk at a time

    async def _chunk(self, index: int) -> bytes:
        key = self.number, index
        while True:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
            arrived = self._arrived
            with trio.move_on_after(self.patience) as waiting:
                await self._turn.acquire()
            if waiting.cancelled_caught:
                if self._arrived == arrived:
                    raise self._failed("nothing came")
                continue
            try:
                if key not in self.kept:
                    return await self._fetch(index)
            finally:
                self._turn.release()

    async def _fetch(self, index: int) -> bytes:
        delay, mistaken, trouble = RETRY_FIRST, False, ""
        with trio.CancelScope(deadline=trio.current_time() + self.patience) as scope:
            while True:
                try:
                    return await self._read(index, scope)
                except (DigestMismatch, SourceChanged) as error:
                    if mistaken:  # not even where the file stands now
                        raise self._damaged(str(error)) from None
                    mistaken = True
                except (OSError, TierError) as error:
                    trouble = str(error)
                self._let_go()
                if trio.current_time() + delay >= scope.deadline:
                    raise self._failed("nothing came", trouble)
                await trio.sleep(delay)
                delay = min(RETRY_LAST, 2 * delay)
        raise self._failed("nothing came", trouble)

    async def _read(self, index: int, scope: trio.CancelScope) -> bytes:
        token = trio.lowlevel.current_trio_token()

        def extend() -> None:
            self._arrived += 1
            scope.deadline = trio.current_time() + self.patience

        work = partial(self._load, index, self.host.locate(self.source), partial(token.run_sync_soon, extend))
        data, self.chunks = await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self.limiter)
        self._arrived += 1
        if not self._over:
            self.kept[self.number, index] = data
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        return data

    def _failed(self, what: str, trouble: str = "") -> FsError:
        why = f" ({trouble})" if trouble else ""
        self.host.complain(self.replica, self.source.tier, f"{what} for {self.patience:g} s{why}")
        return FsError(errno.EIO)

    def _damaged(self, what: str) -> FsError:
        self.host.complain(self.replica, self.source.tier, what, damaged=True)
        return FsError(errno.EIO)

    # in a thread, which may hang in the tier for ever

    def _load(
        self, index: int, opener: Callable[[], Content], alive: Callable[[], object]
    ) -> tuple[bytes, list[bytes]]:
        """A chunk that was checked, and the digests of all. Raises OSError, TierError, DigestMismatch."""
        content = self._open(opener)
        try:
            chunks = self.chunks or self._survey(content, alive)
            offset = index * CHUNK
            data = bytes(content.read(offset, min(CHUNK, self.source.size - offset)))
            if chunk_digest(data) != chunks[index]:
                raise DigestMismatch(f"bytes {offset} and on are not those that were written; reading them gives EIO")
            return data, chunks
        finally:
            content.close()

    def _open(self, opener: Callable[[], Content]) -> Content:
        with self._holding:
            if self._held is not None:
                return self._held.share()
        content = opener()
        with self._holding:
            if not self._over and self._held is None:
                self._held = content.share()
        return content

    def _let_go(self) -> None:
        """Look anew where the file stands. Under ``_turn``; a thread given up has a descriptor of its own."""
        with self._holding:
            held, self._held = self._held, None
        if held is not None:
            held.close()

    def _survey(self, content: Content, alive: Callable[[], object]) -> list[bytes]:
        if (size := content.size) != self.source.size:
            raise DigestMismatch(f"it has {size} bytes there, not {self.source.size}")
        chunks = []
        for offset in range(0, size, CHUNK):
            chunks.append(chunk_digest(content.read(offset, min(CHUNK, size - offset))))
            alive()
        if self.source.digest is not None and tree_digest(chunks) != self.source.digest:
            raise DigestMismatch("its bytes are not those that were written; reading it gives EIO")
        return chunks
