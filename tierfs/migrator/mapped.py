"""Files that a program still writes to through a shared mapping although it closed them.

With passthrough the mapping is of the backing file, so the kernel sends the last RELEASE when the descriptor is closed,
and the version looks complete. The kernel refuses a read lease on a file that anybody has open or mapped for writing
(fcntl(2), F_SETLEASE): such a file is not copied until the mapping is gone. A flush does not wait for that: it
gets the bytes of the moment, and afterwards the file counts as changed, so that the rest follows.
"""

from __future__ import annotations

from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.errors import TierError
from tierfs.fs.open_files import OpenFiles
from tierfs.tiers.base import ReplicaStore
from tierfs.types import Replica

LOOK_AGAIN = 1.0
"""Seconds until the next look at a file that was mapped."""
TRIES, BETWEEN = 5, 0.01
"""Looks before a file counts as mapped, and seconds between: the kernel drops its references a moment after RELEASE."""


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    stores: dict[str, ReplicaStore]
    files: OpenFiles

    def durable(self, ino: int, version: int, tier: str, *, below: bool = False) -> bool: ...


class MappedFiles:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._look_again: dict[int, float] = {}
        self._copied: dict[int, int] = {}
        """Version of a file that was copied while it was mapped, by inode."""

    async def writes_go_on(self, source: Replica) -> bool:
        """Whether somebody can still change the bytes of a closed file. Raises TierError."""
        if self._host.files.backing is None:
            return False
        store = self._host.stores[source.tier]
        try:
            for _ in range(TRIES):
                if source.ino in self._host.files.inodes:
                    return False  # opened meanwhile: what refuses the lease is our own descriptor
                if not await trio.to_thread.run_sync(store.is_written, source.key):
                    return False
                await trio.sleep(BETWEEN)
        except OSError as error:
            raise TierError.of(source.tier, "lease", error) from error
        return True

    def postpone(self, ino: int) -> None:
        self._look_again[ino] = trio.current_time() + LOOK_AGAIN

    def waits(self, ino: int) -> bool:
        """Whether it is too early to look at this file again."""
        at = self._look_again.get(ino)
        if at is None:
            return False
        if trio.current_time() < at:
            return True
        del self._look_again[ino]
        return False

    @property
    def any(self) -> bool:
        return bool(self._look_again or self._copied)

    def copied(self, source: Replica) -> None:
        """This version was copied while it could change."""
        self._copied[source.ino] = source.version

    def renew(self) -> None:
        """Let the files copied while they were mapped count as changed, once their copies are where they belong."""
        for ino, version in list(self._copied.items()):
            attributes = self._host.catalog.attributes(ino)
            if attributes is None or attributes.nlink == 0 or attributes.version != version:
                del self._copied[ino]
            elif self._settled(ino, version) and self._host.files.renew(attributes):
                del self._copied[ino]
                self.postpone(ino)

    def _settled(self, ino: int, version: int) -> bool:
        """Whether every copy of this version that the rule wants is there."""
        _, rule = self._host.files.rule_of(self._host.catalog.path_of(ino))
        return self._host.durable(ino, version, rule.lowest)
