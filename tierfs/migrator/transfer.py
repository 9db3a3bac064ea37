"""One file's bytes from a tier to another: copy, sync, digest. Executes; decides nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierfs.durable import TemporaryFile
from tierfs.errors import DigestMismatch, TierError
from tierfs.migrator.throttle import Throttle
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.copy import copy_file, digest_file
from tierfs.tiers.tree import TreeStore
from tierfs.types import Replica

STREAMS = 3
"""Chunks of one file in flight; two already keep an NVMe busy, the third hides the hashing."""


@dataclass
class Transfer:
    """A running copy. ``cancel`` may be set from any thread; the copy then ends with SourceChanged."""

    ino: int
    version: int
    tier: str
    size: int
    cancel: threading.Event = field(default_factory=threading.Event)


def copy_to_store(
    source: Replica,
    source_store: ReplicaStore,
    target: ReplicaStore | TreeStore,
    key: str,
    transfer: Transfer,
    throttle: Throttle,
    *,
    stable: bool,
) -> tuple[TemporaryFile, bytes]:
    """Copy ``source`` into a temporary file of ``target``, synced: (file, digest).

    ``stable`` says that nobody can write to the source; otherwise it is read again after the copy and the
    copy is void (DigestMismatch) when it changed. Raises TierError, SourceChanged.
    """
    try:
        fd = source_store.open(source.key)
    except OSError as error:
        raise TierError.of(source_store.name, "open", error) from error
    try:
        temp = target.temporary(key)
        try:
            digest = copy_file(
                fd,
                temp,
                source.size,
                streams=STREAMS,
                throttle=throttle,
                cancelled=transfer.cancel.is_set,
                stable=stable,
            )
            os.fsync(temp.fd)
            if not stable and digest_file(fd, source.size, cancelled=transfer.cancel.is_set) != digest:
                raise DigestMismatch(f"inode {source.ino} changed while it was copied")
        except BaseException:
            temp.discard()
            raise
        return temp, digest
    except OSError as error:
        raise TierError.of(target.name, "write", error) from error
    finally:
        os.close(fd)


def recall_file(
    open_source: Callable[[], int],
    source: Replica,
    target: ReplicaStore,
    key: str,
    mtime_ns: int,
) -> bytes:
    """Copy a cold replica up to ``target`` as ``key``, checking its digest. Raises TierError, DigestMismatch."""
    try:
        fd = open_source()
    except OSError as error:
        raise TierError.of(source.tier, "open", error) from error
    try:
        size = os.fstat(fd).st_size
        if size != source.size:
            raise DigestMismatch(f"tier {source.tier}: inode {source.ino} has {size} bytes, not {source.size}")
        temp = target.temporary(key)
        try:
            digest = copy_file(fd, temp, size, streams=STREAMS, throttle=None, cancelled=None, stable=False)
            if source.digest is not None and digest != source.digest:
                raise DigestMismatch(f"tier {source.tier}: inode {source.ino} does not have the bytes written to it")
            os.utime(temp.fd, ns=(mtime_ns, mtime_ns))
            target.publish(temp, key)
        except BaseException:
            temp.discard()
            raise
        return digest
    except OSError as error:
        raise TierError.of(target.name, "recall", error) from error
    finally:
        os.close(fd)


def remove_files(stores: Mapping[str, ReplicaStore], files: list[tuple[str, str]]) -> list[tuple[str, str, OSError]]:
    """Remove (tier, key) each; what failed comes back with its error. Freeing a large tmpfs file takes a while."""
    failed = []
    for tier, key in files:
        try:
            stores[tier].remove(key)
        except OSError as error:
            failed.append((tier, key, error))
    return failed
