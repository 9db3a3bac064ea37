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

    async def __call__(
        self, attributes: Attributes, tier: str, avoid: Collection[str] = (), *, modest: bool = False
    ) -> Replica:
        """Bring the current version to the named tier, or a slower one if that is full: the replica there. Tiers to
        ``avoid`` neither give nor take it. FsError EIO when it is not to be had, ENOSPC when there is no room for it;
        ``modest``: no more than the policy plans for the tiers."""


class Filling(Protocol):
    """A backing file whose bytes are still on their way from a slower tier, or for which there is no room."""

    fd: int
    """The file, open for reading and writing; the inode's to close."""
    replica: Replica
    """What it is going to be; not in the catalog before it is complete."""

    async def wait(self, offset: int, length: int) -> bytes | None:
        """None when this range is in the file and known to be right; or else its bytes, which do not come to the file.
        FsError EIO when it is not to be had."""

    async def complete(self) -> None:
        """Returns when the whole file is a replica in the catalog. FsError EIO when it cannot be, ENOSPC when there is
        no room for it."""

    async def cut(self) -> None:
        """Stop, and make the file a replica without a byte: the next version starts in it."""

    def abandon(self) -> None:
        """Nobody has the file open any more: give up what is not complete."""
