"""Bytes that the catalog no longer names: removed soon, each tier's by itself, so that one that hangs keeps no
others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from tierfs.errors import CatalogError, TierError
from tierfs.fs.lanes import Lanes
from tierfs.migrator.outage import Outages
from tierfs.migrator.transfer import remove_files
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore

log = logging.getLogger("tierfs.migrator")

AGAIN_SECONDS = 2.0
"""Until the next try when the catalog could not be synced."""


class Host(Protocol):
    """What this module needs of the migrator."""

    policy: Policy
    stores: dict[str, ReplicaStore]
    lanes: Lanes
    outages: Outages

    async def sync(self) -> None: ...


class Remover:
    def __init__(self, host: Host, advanced: Callable[[], None]) -> None:
        """``advanced`` is called when something was removed."""
        self._host = host
        self._advanced = advanced
        self._doomed: dict[str, list[str]] = {}
        self._busy: set[str] = set()
        self._not_before = 0.0

    def discard(self, tier: str, key: str) -> None:
        """These bytes are no longer in the catalog: remove them soon."""
        self._doomed.setdefault(tier, []).append(key)

    @property
    def doomed(self) -> list[tuple[str, str]]:
        """(tier, key) of what waits."""
        return [(tier, key) for tier, keys in self._doomed.items() for key in keys]

    def start(self, nursery: trio.Nursery) -> None:
        """Remove what can be removed now, in tasks of ``nursery``."""
        for tier in self._doomed:
            if self._doomed[tier] and tier not in self._busy and self._may(tier):
                self._busy.add(tier)
                nursery.start_soon(self._run, tier)

    def _may(self, tier: str) -> bool:
        waits = self._host.policy.tier(tier).persistent and trio.current_time() < self._not_before
        return not waits and not self._host.outages.wait(tier)

    async def _run(self, tier: str) -> None:
        try:
            await self._remove(tier)
        finally:
            self._busy.discard(tier)
            self._advanced()

    async def remove_all(self) -> None:
        """Everything that waits, once, not to be cancelled: the catalog has forgotten these files already."""
        with trio.CancelScope(shield=True):
            for tier in [tier for tier, keys in self._doomed.items() if keys and not self._host.lanes[tier].hangs]:
                await self._remove(tier)

    async def _remove(self, tier: str) -> None:
        """All that is doomed on one tier. What cannot be removed now stays doomed while the tier fails as a whole, or
        stays behind until the next mount when it is this file's own fault."""
        host = self._host
        keys, self._doomed[tier] = self._doomed[tier], []
        try:
            if host.policy.tier(tier).persistent:
                # After a power cut the catalog must not name bytes of which only the removal came through.
                await host.sync()
            reach(At.REMOVE_SYNCED)
            failed = await host.lanes[tier].run(
                partial(remove_files, host.stores, [(tier, key) for key in keys]), "remove files"
            )
            reach(At.REMOVE_DONE)
        except (CatalogError, OSError):  # said by whoever syncs the catalog now and then
            self._doomed[tier] += keys
            self._not_before = trio.current_time() + AGAIN_SECONDS
            return
        except TierError as error:
            self._doomed[tier] += keys
            host.outages.failed(tier, error)
            return
        except trio.Cancelled:
            self._doomed[tier] += keys
            raise
        for _, key, reason in failed:
            log.info("tier %s: %s stays behind until the next mount: %s", tier, key, reason)
