"""A file that outgrows its tier goes on one tier further down.

With passthrough the kernel holds on to the backing file until the last close, so only a file that nobody has open is
moved. In mode userspace a write that meets the end of its tier moves the file and goes on, same handle and all.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.errors import NoAnswer
from tierfs.fs.admission import LOOK, PATIENCE, STALL, Admission
from tierfs.fs.handles import OpenInode
from tierfs.fs.inode_lock import InodeLock
from tierfs.fs.lanes import Beat, Lanes
from tierfs.fs.ports import LocalStore
from tierfs.policy.model import Rule
from tierfs.types import Replica, ReplicaState

PIECE = 8 << 20
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Files(Protocol):
    """What this module needs of fs.open_files.OpenFiles."""

    catalog: Catalog
    stores: Mapping[str, LocalStore]
    admission: Admission
    lanes: Lanes
    lasting: list[str]

    def ack_tiers(self, rule: Rule) -> list[str]: ...
    def new_key(self, ino: int) -> str: ...
    def locked(self, ino: int) -> InodeLock: ...
    def forget_replica(self, replica: Replica) -> None: ...
    def show_times(self, ino: int, tier: str, fd: int) -> None: ...
    @property
    def quiesce(self) -> Callable[[int], Awaitable[None]]: ...
    @property
    def discard(self) -> Callable[[str, str], None]: ...


class Mover:
    def __init__(self, files: Files) -> None:
        self._files = files

    async def make_room(self, inode: OpenInode, size: int) -> bool:
        """A write of ``size`` bytes met the end of the file's tier. True: try again, something changed."""
        if inode.moving is not None:
            await inode.moving.wait()
            return True
        relief, tier = self._files.admission.relief, inode.replica.tier
        if await relief.evict(tier, size) or await relief.grow(tier, size):
            return True
        return await self._move_open(inode, tier, size) or await self._drained(inode.replica.tier, size)

    async def _move_open(self, inode: OpenInode, full: str, size: int) -> bool:
        """Move the file away from the tier that is full, below the handles that are open."""
        if inode.backing_id:
            return False
        async with self._files.locked(inode.ino):
            if inode.replica.tier != full:  # somebody else's write moved it meanwhile
                return True
            await self._files.quiesce(inode.ino)
            length = os.fstat(inode.fd).st_size
            for tier in self._below(inode.replica.tier, inode.rule):
                if not self._files.admission.space.fits([tier], length + size):
                    continue
                inode.moving = trio.Event()
                try:
                    if await self._swap(inode, tier):
                        return True
                finally:
                    inode.moving.set()
                    inode.moving = None
        return False

    def _below(self, tier: str, rule: Rule) -> list[str]:
        tiers = self._files.ack_tiers(rule)
        return tiers[tiers.index(tier) + 1 :] if tier in tiers else []

    async def _swap(self, inode: OpenInode, tier: str) -> bool:
        """Nobody writes meanwhile: writes wait for ``moving``, truncations for the inode's lock."""
        files = self._files
        key = files.new_key(inode.ino)
        fd = await self._copy(inode.fd, tier, key)
        if fd is None:
            return False
        try:
            old = inode.replica
            state = ReplicaState.OPEN if old.state is ReplicaState.OPEN else ReplicaState.WRITTEN
            new = old._replace(tier=tier, key=key, state=state)
            with files.catalog.transaction():
                files.forget_replica(old)
                files.catalog.put_replica(new)
            status = os.fstat(inode.fd)
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.dup2(fd, inode.fd, inheritable=False)
            inode.replica = new
            files.admission.space.grow(inode.ino, tier, status.st_size, 0)
        finally:
            os.close(fd)
        return True

    async def relocate(self, replica: Replica, source: int, tiers: list[str]) -> tuple[Replica, int] | None:
        """Begin the next version of a closed file that nobody else has open on the first of ``tiers`` with room, with
        the bytes of this one, which are in ``source``: (replica, descriptor). A durable replica there stays what it is.
        Under the inode's lock. None: there is no room, or the replica is not what it was any more."""
        files = self._files
        await files.quiesce(replica.ino)
        for tier in tiers:
            if not files.admission.space.fits([tier], replica.size):
                continue
            key = files.new_key(replica.ino)
            fd = await self._copy(source, tier, key)
            if fd is None:
                continue
            try:
                files.show_times(replica.ino, tier, fd)
            except BaseException:
                os.close(fd)
                files.discard(tier, key)
                raise
            if files.catalog.replica(replica.ino, replica.version, replica.tier) != replica:
                os.close(fd)
                files.discard(tier, key)
                return None
            new = replica._replace(
                version=replica.version + 1, tier=tier, key=key, state=ReplicaState.OPEN, digest=None
            )
            with files.catalog.transaction():
                files.catalog.begin_version(new.ino, new.version, files.lasting)
                files.forget_replica(replica)
                files.catalog.put_replica(new)
            return new, fd
        return None

    async def _copy(self, source: int, tier: str, key: str) -> int | None:
        """A new file of the tier with the bytes of ``source``, open; None when they do not fit, or no answer comes."""
        store, lane, beat = self._files.stores[tier], self._files.lanes.get(tier), Beat()

        def copy() -> int:
            fd = store.create(key)
            try:
                copy_sparse(source, fd, beat)
            except BaseException:
                os.close(fd)
                with contextlib.suppress(OSError):
                    store.remove(key)
                raise
            return fd

        def late(fd: int | None) -> None:
            if fd is not None:
                os.close(fd)
                with contextlib.suppress(OSError):
                    store.remove(key)

        try:
            if lane is None:
                return await trio.to_thread.run_sync(copy)
            return await lane.run(copy, "move a file", beat=beat, late=late)
        except NoAnswer:
            return None
        except OSError as error:
            if error.errno not in FULL:
                raise
            return None

    async def _drained(self, tier: str, size: int) -> bool:
        """Wait for what drains make evictable, for as long as they get on."""
        relief = self._files.admission.relief
        began = moved = trio.current_time()
        copied = relief.copied()
        relief.press(1)
        try:
            while relief.expected():
                now = trio.current_time()
                if now - moved >= STALL or now - began >= PATIENCE:
                    return False
                with trio.move_on_after(LOOK):
                    await relief.progress()
                if await relief.evict(tier, size):
                    return True
                if relief.copied() > copied:
                    copied, moved = relief.copied(), trio.current_time()
            return False
        finally:
            relief.press(-1)


def copy_sparse(source: int, target: int, alive: Callable[[], object] = lambda: None) -> None:
    """All bytes of a file into an empty one; holes stay holes. ``alive`` is called for each piece. Blocks; raises
    OSError."""
    size, at = os.fstat(source).st_size, 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        end = min(size, os.lseek(source, at, os.SEEK_HOLE))
        while at < end:
            data = os.pread(source, min(PIECE, end - at), at)
            if not data:  # cut off meanwhile
                os.ftruncate(target, at)
                return
            done = 0
            while done < len(data):
                done += os.pwrite(target, data[done:], at + done)
            at += len(data)
            alive()
    os.ftruncate(target, size)
