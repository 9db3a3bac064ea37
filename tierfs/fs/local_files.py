"""Backing files on local tiers, opened and changed without ever waiting for long on a disk that hangs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from tierfs.fs.lanes import Lanes
from tierfs.fs.ports import LocalStore
from tierfs.policy.model import Policy
from tierfs.types import Replica

SOON = 5.0
"""Seconds to wait for a disk to open a file that another tier has, too."""

T = TypeVar("T")


@dataclass
class LocalFiles:
    """Memory is asked on the spot, a disk in a thread of its lane, if it has one."""

    policy: Policy
    stores: Mapping[str, LocalStore]
    lanes: Lanes

    def create(self, tier: str, key: str) -> int:
        """A new empty replica: its descriptor. Raises OSError: ETIMEDOUT when the tier hangs."""
        return self._descriptor(tier, partial(self.stores[tier].create, key), "create")

    def open_now(self, replica: Replica) -> int:
        """Descriptor of a replica, without giving way to other tasks. Raises OSError: ETIMEDOUT when the tier hangs."""
        return self._descriptor(replica.tier, partial(self.stores[replica.tier].open, replica.key), "open")

    def _descriptor(self, tier: str, work: Callable[[], int], what: str) -> int:
        lane = self.lanes.get(tier)
        if lane is None or not self.policy.tier(tier).persistent:
            return work()
        return lane.call(work, what, _close)

    def at_once(self, tier: str, work: Callable[[], T], what: str) -> T:
        """``work`` on a tier, without giving way to other tasks. Raises OSError: ETIMEDOUT when the tier hangs."""
        lane = self.lanes.get(tier)
        if lane is None or not self.policy.tier(tier).persistent:
            return work()
        return lane.call(work, what)

    async def open(self, replica: Replica, *, elsewhere: bool) -> int:
        """Descriptor of a replica; without a try when its tier hangs and the bytes are ``elsewhere``, too.
        Raises OSError, TierError."""
        store, lane = self.stores[replica.tier], self.lanes.get(replica.tier)
        if lane is None or not self.policy.tier(replica.tier).persistent:
            return store.open(replica.key)
        if lane.hangs and elsewhere:
            raise lane.silence("open", "it does not answer")
        patience = self.policy.limits.read_timeout
        if elsewhere:
            patience = min(patience, SOON)
        return await lane.run(partial(store.open, replica.key), "open", patience=patience, late=_close)

    async def read(self, tier: str, fd: int, length: int, offset: int) -> bytes:
        """Raises OSError, TierError."""
        lane = self.lanes.get(tier)
        if lane is None or not self.policy.tier(tier).persistent:
            return os.pread(fd, length, offset)
        patience = self.policy.limits.read_timeout
        return await lane.run(partial(os.pread, fd, length, offset), "read", patience=patience)

    def close(self, tier: str, fd: int) -> None:
        """Even that may take long on a tier that hangs."""
        lane = self.lanes.get(tier)
        if lane is None or not lane.hangs:
            os.close(fd)
        else:
            trio.lowlevel.start_thread_soon(partial(os.close, fd), lambda outcome: None)


def _close(fd: int | None) -> None:
    """What came back when nobody waited for it any more."""
    if fd is not None:
        os.close(fd)
