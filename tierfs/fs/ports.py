"""What open files need of the layers around them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from tierfs.types import Attributes, Replica


class LocalStore(Protocol):
    """What this module needs of tiers.base.ReplicaStore."""

    def create(self, key: str) -> int: ...
    def open(self, key: str) -> int: ...
    def remove(self, key: str) -> None: ...


class Backing(Protocol):
    """What this module needs of fuse.backing.BackingIds."""

    def open(self, fd: int) -> int: ...
    def close(self, backing_id: int) -> None: ...


class Recall(Protocol):
    """What migrator.recall.Recaller.recall does."""

    async def __call__(self, attributes: Attributes, tier: str, avoid: Collection[str] = ()) -> Replica:
        """Bring the current version to the named tier, or a slower one if that is full: the replica there. Tiers to
        ``avoid`` neither give nor take it. FsError EIO when it is not to be had."""


class Filling(Protocol):
    """A backing file whose bytes are still on their way from a slower tier."""

    fd: int
    """The file, open for reading and writing; the inode's to close."""
    replica: Replica
    """What it is going to be; not in the catalog before it is complete."""

    async def wait(self, offset: int, length: int) -> None:
        """Returns when this range is here and known to be right. FsError EIO when it is not to be had."""

    async def complete(self) -> None:
        """Returns when the whole file is a replica in the catalog. FsError EIO when it cannot be."""

    async def cut(self) -> None:
        """Stop, and make the file a replica without a byte: the next version starts in it."""

    def abandon(self) -> None:
        """Nobody has the file open any more: give up what is not complete."""
