"""One file's bytes from a tier to another: copy, sync, digest. Executes; decides nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from tierfs.durable import TemporaryFile
from tierfs.errors import DigestMismatch, SourceChanged, TierError
from tierfs.fs.lanes import Beat
from tierfs.migrator.throttle import Throttle
from tierfs.points import At, reach
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.beside import Describe
from tierfs.tiers.content import Content
from tierfs.tiers.copy import CHUNK, PipelinedCopy, Reading, copy_file, data_end, digest_file
from tierfs.tiers.kinds import Tree
from tierfs.tiers.object_content import ObjectTemporary, send_file
from tierfs.tiers.object_names import Path
from tierfs.tiers.object_tree import ObjectTree
from tierfs.tiers.tree import TreeStore
from tierfs.types import Replica

if TYPE_CHECKING:  # it needs packages that a mount without such an archive does not
    from tierfs.tiers.chunked import ChunkedStore

STREAMS = 3
"""Chunks of one file in flight; two already keep an NVMe busy, the third hides the hashing."""

MARGIN = CHUNK
"""How far an early copy stays behind the end of the data: there the writer is at work (and a huge page of tmpfs is
there as a whole once its first byte is written)."""


@dataclass
class Transfer:
    """A running copy. ``cancel`` may be set from any thread; the copy then ends with SourceChanged."""

    ino: int
    version: int
    tier: str
    size: int
    cancel: threading.Event = field(default_factory=threading.Event)
    beat: Beat = field(default_factory=Beat)
    """Called by the copy's threads at each chunk."""
    reading: Reading = field(default_factory=Reading)
    stop: Callable[[], object] | None = None
    """Tells a copy that looks at its source while it sends; called once, from any thread."""

    @property
    def key(self) -> tuple[int, int, str]:
        return self.ino, self.version, self.tier

    def leaves(self) -> bool:
        """Stop: whether no thread looks at the source any more, even if one hangs on its way to the target."""
        self.cancel.set()
        stop, self.stop = self.stop, None
        if stop is not None:
            stop()
        return self.reading.end()


@dataclass
class Early:
    """A copy that began while its source was open for writing. Only ``finish`` makes it the copy of a version."""

    key: str
    """The source's replica file; a version that ends in another file has nothing to do with this copy."""
    temp: TemporaryFile
    copy: PipelinedCopy

    @classmethod
    def begin(cls, source: Replica, target: ReplicaStore | Tree, key: str) -> Early:
        """Raises TierError."""
        temp = target.temporary(key)
        assert isinstance(temp, TemporaryFile)
        return cls(source.key, temp, PipelinedCopy(temp, streams=STREAMS))

    def advance(
        self, source: Replica, source_store: ReplicaStore, target: str, transfer: Transfer, throttle: Throttle
    ) -> bool:
        """Copy what has been written meanwhile. False when the file was cut off below what is copied, so that starting
        over is the better choice. Raises TierError, SourceChanged."""
        try:
            fd = source_store.open(source.key, write=False)
        except OSError as error:
            raise TierError.of(source_store.name, "open", error) from error
        try:
            front = self.copy.front
            if os.fstat(fd).st_size < front:
                return False
            end = data_end(fd, front) - MARGIN
            self.copy.advance(fd, end, throttle=_turns(throttle, transfer), cancelled=transfer.cancel.is_set)
            return True
        except OSError as error:
            raise TierError.of(target, "write", error) from error
        finally:
            os.close(fd)

    def discard(self) -> None:
        """Remove what was copied. Blocks."""
        self.copy.close()
        self.temp.discard()


def _turns(throttle: Throttle, transfer: Transfer) -> Callable[[int], None]:
    def turn(size: int) -> None:
        transfer.beat()
        throttle(size, transfer.cancel, transfer.beat)

    return turn


@dataclass(frozen=True, slots=True)
class Encoding:
    """How chunks are made of a file's bytes."""

    codec: str = "none"
    threads: int = STREAMS
    nice: int = 0


PLAIN = Encoding()


@dataclass(frozen=True, slots=True)
class Copied:
    """A complete copy that has no name yet. One for the archive is synced; a ReplicaStore does that when it publishes,
    together with what lies beside the replica."""

    temp: TemporaryFile | ObjectTemporary
    digest: bytes
    chunks: list[bytes]
    """Digests of the chunks."""


def copy_to_store(
    source: Replica,
    source_store: ReplicaStore,
    target: ReplicaStore | Tree,
    key: str,
    transfer: Transfer,
    throttle: Throttle,
    *,
    stable: bool,
    encoding: Encoding = PLAIN,
    early: Early | None = None,
    towards: Path | None = None,
) -> Copied:
    """Copy ``source`` into a temporary file of ``target``, or complete what ``early`` (taken over) began. On an archive
    with layout chunks that file is a manifest, and ``encoding`` says how chunks are stored. In an object store it is a
    blob, or parts of the one that will stand at ``towards``.

    ``stable`` says that nobody can write to the source; otherwise it is read again after the copy and the
    copy is void (DigestMismatch) when it changed. Raises TierError, SourceChanged.
    """
    try:
        fd = source_store.open(source.key, write=False)
    except OSError as error:
        if early is not None:
            early.discard()
        raise TierError.of(source_store.name, "open", error) from error
    cancelled, turns = transfer.cancel.is_set, _turns(throttle, transfer)
    chunks: list[bytes] = []
    try:
        if isinstance(target, ObjectTree):
            return _send(fd, source.size, target.temporary(key, towards), transfer, turns, stable=stable)
        temp = target.temporary(key) if early is None else early.temp
        try:
            if target.chunked:
                digest, chunks = cast("ChunkedStore", target).store(
                    fd,
                    source.size,
                    temp,
                    encoding.codec,
                    stable=stable,
                    reading=transfer.reading,
                    streams=encoding.threads,
                    nice=encoding.nice,
                    throttle=turns,
                    cancelled=cancelled,
                    alive=transfer.beat,
                )
            elif early is None:
                digest = copy_file(
                    fd,
                    temp,
                    source.size,
                    streams=STREAMS,
                    throttle=turns,
                    cancelled=cancelled,
                    stable=stable,
                    reading=transfer.reading,
                    digests=chunks,
                )
            else:
                digest = early.copy.finish(
                    fd,
                    source.size,
                    throttle=turns,
                    cancelled=cancelled,
                    stable=stable,
                    reading=transfer.reading,
                    digests=chunks,
                )
            transfer.beat(source.size)
            reach(At.DRAIN_COPIED)
            if isinstance(target, TreeStore):
                os.fsync(temp.fd)
                reach(At.PUBLISH_READY)
            if not stable and digest_file(fd, source.size, cancelled=cancelled, throttle=transfer.beat) != digest:
                raise DigestMismatch(f"inode {source.ino} changed while it was copied")
        except BaseException:
            if early is not None:
                early.copy.close()
            temp.discard()
            raise
        return Copied(temp, digest, chunks)
    except OSError as error:
        raise TierError.of(target.name, "write", error) from error
    finally:
        os.close(fd)


def _send(
    fd: int, size: int, temp: ObjectTemporary, transfer: Transfer, turns: Callable[[int], None], *, stable: bool
) -> Copied:
    """As `copy_to_store`, to an object store. Raises OSError, TierError, SourceChanged."""
    chunks: list[bytes] = []
    cancelled = transfer.cancel.is_set
    try:
        transfer.stop = temp.stop
        digest = send_file(
            fd,
            temp,
            size,
            throttle=turns,
            cancelled=cancelled,
            stable=stable,
            reading=transfer.reading,
            digests=chunks,
        )
        transfer.stop = None
        transfer.beat(size)
        reach(At.DRAIN_COPIED)
        reach(At.PUBLISH_READY)
        if not stable and digest_file(fd, size, cancelled=cancelled, throttle=transfer.beat) != digest:
            raise DigestMismatch("the file changed while it was copied")
    except BaseException:
        transfer.stop = None
        temp.discard()
        raise
    return Copied(temp, digest, chunks)


def discard_early(early: Early | None, _: object = None) -> None:
    """Remove a copy ahead of the close that nobody waits for any more. Blocks."""
    if early is not None:
        early.discard()


def discard_copy(copied: Copied | None) -> None:
    """Remove a copy that nobody waits for any more. Blocks."""
    if copied is not None:
        copied.temp.discard()


def publish_copy(store: ReplicaStore, copied: Copied, key: str, describe: Describe | None = None) -> bool:
    """Make the copy the replica ``key``; it is removed when that fails. True. Raises TierError."""
    try:
        assert isinstance(copied.temp, TemporaryFile)
        store.publish(copied.temp, key, describe, copied.digest)
    except BaseException:
        copied.temp.discard()
        raise
    return True


def unpublish(store: ReplicaStore, key: str, published: bool | None) -> None:
    """Remove a replica that was published when nobody waited for it any more. Blocks; raises OSError."""
    if published:
        store.remove(key)


def recall_file(
    open_source: Callable[[], Content],
    source: Replica,
    target: ReplicaStore,
    key: str,
    mtime_ns: int,
    alive: Callable[[int], None],
    cancel: threading.Event,
    describe: Describe | None = None,
) -> bytes:
    """Copy a cold replica up to ``target`` as ``key``, checking its digest: the digest. ``alive`` is called with the
    bytes of each chunk that is about to be read. Once ``cancel`` is set nothing is published any more.
    Raises TierError, DigestMismatch, SourceChanged when cancelled."""
    try:
        content = open_source()
    except OSError as error:
        raise TierError.of(source.tier, "open", error) from error
    try:
        size = content.size
        if size != source.size:
            raise DigestMismatch(f"tier {source.tier}: inode {source.ino} has {size} bytes, not {source.size}")
        temp = target.temporary(key)
        try:
            digest = content.copy(temp, size, streams=STREAMS, throttle=alive, cancelled=cancel.is_set)
            if source.digest is not None and digest != source.digest:
                raise DigestMismatch(f"tier {source.tier}: inode {source.ino} does not have the bytes written to it")
            os.utime(temp.fd, ns=(mtime_ns, mtime_ns))
            reach(At.RECALL_COPIED)
            if not cancel.is_set():
                target.publish(temp, key, describe, digest)
            if cancel.is_set():
                target.remove(key)
                raise SourceChanged("the recall was cancelled")
        except BaseException:
            temp.discard()
            raise
        return digest
    except OSError as error:
        raise TierError.of(target.name, "recall", error) from error
    finally:
        content.close()


def remove_files(stores: Mapping[str, ReplicaStore], files: list[tuple[str, str]]) -> list[tuple[str, str, OSError]]:
    """Remove (tier, key) each; what failed comes back with its error. Freeing a large tmpfs file takes a while."""
    failed = []
    for tier, key in files:
        try:
            stores[tier].remove(key)
        except OSError as error:
            failed.append((tier, key, error))
    return failed
