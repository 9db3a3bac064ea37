"""Draining what is still being written: large files are copied while they grow. See docs/ARCHITECTURE.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.errors import NoAnswer, SourceChanged, TierError
from tierfs.fs.lanes import Lanes
from tierfs.fs.open_files import OpenFiles
from tierfs.migrator.outage import Outages
from tierfs.migrator.throttle import Throttle
from tierfs.migrator.transfer import Early, Transfer, discard_early
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.kinds import Tree
from tierfs.tiers.object_tree import ObjectTree
from tierfs.types import Replica, ReplicaState

EARLY = 64 << 20
"""A file is copied while it is still being written once it has this many bytes: smaller ones are closed soon."""
EARLY_STEP = 16 << 20
"""New bytes that make another step of such a copy worth a thread's while."""

Key = tuple[int, int, str]


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    policy: Policy
    stores: dict[str, ReplicaStore]
    files: OpenFiles
    lanes: Lanes
    outages: Outages
    throttle: Throttle
    running: dict[Key, Transfer]
    archive_name: str

    def archive_may(self) -> bool: ...
    def stands(self, source: Replica) -> bool: ...
    def target(self, tier: str) -> ReplicaStore | Tree: ...
    async def tidy(self, tier: str, work: Callable[[], object]) -> None: ...


class EarlyCopies(dict[Key, Early]):
    """Copies of versions that are, or a moment ago were, open for writing; no thread is in them unless ``running``
    of the migrator says so."""

    def __init__(self, host: Host, advanced: Callable[[], None]) -> None:
        """``advanced`` is called at the end of each step."""
        super().__init__()
        self._host = host
        self._advanced = advanced

    def start(self, nursery: trio.Nursery, quiet: Collection[int]) -> None:
        """Copy from large files open for writing, with the slots that closed ones leave; not from the inodes
        ``quiet``."""
        host = self._host
        for inode in host.files.inodes.values():
            source = inode.replica
            if not inode.writers or source.state is not ReplicaState.OPEN:
                continue
            status = os.fstat(inode.fd)
            size = min(status.st_size, 512 * status.st_blocks)
            if size < EARLY or source.ino in host.files.orphans or source.ino in quiet:
                continue
            for tier in host.files.copies.targets(source.tier, inode.rule):
                if isinstance(host.target(tier), ObjectTree):
                    continue  # parts that were sent cannot be sent again when the file changes
                key = (source.ino, source.version, tier)
                early = self.get(key)
                due = size - (early.copy.front if early else 0) >= EARLY_STEP
                if not due or tier == source.tier or key in host.running or not host.outages.choose(tier, [key]):
                    continue
                if len(host.running) >= host.policy.limits.transfers:
                    return
                if host.target(tier).chunked or (tier == host.archive_name and not host.archive_may()):
                    continue  # where chunks end is known once the file is whole
                transfer = Transfer(source.ino, source.version, tier, size)
                host.running[key] = transfer
                host.outages.begin(tier, key)
                nursery.start_soon(self._advance, transfer, source)

    async def _advance(self, transfer: Transfer, source: Replica) -> None:
        """One step of a copy ahead of the close. Cancelled, it leaves what it has for the next step."""
        host, key, lane = self._host, transfer.key, self._host.lanes[transfer.tier]
        try:
            early = self.get(key)
            if early is None:
                begin = partial(Early.begin, source, host.target(transfer.tier), host.files.new_key(transfer.ino))
                early = self[key] = await lane.run(begin, "create a file", late=discard_early)
            store = host.stores[source.tier]
            advance = partial(early.advance, source, store, transfer.tier, transfer, host.throttle)
            if not await lane.run(advance, "copy", beat=transfer.beat, late=partial(discard_early, early)):
                await self._discard(key)
            host.outages.recovered(transfer.tier, key)
        except SourceChanged:
            pass
        except TierError as error:
            if isinstance(error, NoAnswer):
                self.pop(key, None)  # the thread that is still in there discards it
            else:
                await self._discard(key)
            if host.stands(source):
                host.outages.failed(transfer.tier, error, key)
        finally:
            transfer.cancel.set()
            host.outages.end(transfer.tier, key)
            del host.running[key]
            self._advanced()

    def _wanted(self, key: Key) -> bool:
        """Whether this version is, or once closed will be, wanted anywhere."""
        ino, version, _ = key
        attributes = self._host.catalog.attributes(ino)
        return attributes is not None and attributes.nlink > 0 and attributes.version == version

    async def _discard(self, key: Key) -> None:
        early = self.pop(key, None)
        if early is not None:
            await self._host.tidy(key[2], early.discard)

    def drop(self, nursery: trio.Nursery) -> None:
        """Copies of what was deleted or replaced before it was closed, before its turn came, or during it."""
        for key, transfer in self._host.running.items():
            if key not in self and not self._wanted(key):
                transfer.cancel.set()
        for key in [key for key in self if not self._wanted(key)]:
            if key in self._host.running:
                self._host.running[key].cancel.set()
            else:
                nursery.start_soon(self._host.tidy, key[2], self.pop(key).discard)
