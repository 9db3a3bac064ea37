"""What a start finds and nobody wrote down: at a fresh mount bytes that the memory tier lost (a reboot), after a killed
daemon the files that it had not entered in the catalog yet, or no longer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping

import trio

from tierfs.catalog import Catalog
from tierfs.errors import TierError
from tierfs.migrator.transfer import remove_files
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.types import Replica, ReplicaState

log = logging.getLogger("tierfs.recovery")

CHUNK, PAUSE = 128, 0.01
"""Keys looked up at a time, and seconds between, so that requests are served meanwhile."""


def recover_lost_memory(
    catalog: Catalog,
    policy: Policy,
    stores: Mapping[str, ReplicaStore],
    storing: Callable[[int, int], bool] = lambda ino, version: False,
) -> None:
    """At a fresh mount, on the tiers that a reboot empties: drop replicas whose file is gone, roll files back to their
    newest durable version, and remove files that the catalog no longer names. What was rolled back or lost is logged
    by path. ``storing(ino, version)`` tells contents that are complete on the archive and only wait for their name."""
    lost: dict[int, list[Replica]] = {}
    for name, store in stores.items():
        if policy.tier(name).persistent:
            continue
        present = set(store.keys())
        for replica in catalog.replicas_on(name):
            if replica.key in present:
                present.discard(replica.key)
            else:
                lost.setdefault(replica.ino, []).append(replica)
        for key in present:
            store.remove(key)
    for ino, replicas in lost.items():
        _fall_back(catalog, ino, replicas, storing)


def _fall_back(catalog: Catalog, ino: int, replicas: list[Replica], storing: Callable[[int, int], bool]) -> None:
    with catalog.transaction():
        for replica in replicas:
            catalog.remove_replica(replica)
        attributes = catalog.attributes(ino)
        left = catalog.replicas(ino)
        if attributes is None or attributes.nlink == 0 or any(r.version == attributes.version for r in left):
            return
        if storing(ino, attributes.version):
            return
        path = b"/".join(catalog.path_of(ino) or ()).decode(errors="replace")
        durable = [r for r in left if r.state is ReplicaState.DURABLE]
        if not durable:
            log.error("lost: %s had bytes in memory only", path)
            return
        newest = max(durable, key=lambda r: r.version)
        catalog.roll_back(ino, newest.version, newest.size)
        log.error("rolled back: %s is again its version %d of %d bytes", path, newest.version, newest.size)


async def reclaim_orphans(catalog: Catalog, stores: Mapping[str, ReplicaStore], former: Callable[[str], bool]) -> int:
    """Remove the files of daemons that died before they entered them in the catalog, or after they took them out: how
    many. Runs beside everything else: ``former`` tells the keys that no living daemon gave out, and a key that is not
    in the catalog never comes back."""
    removed = 0
    for name, store in stores.items():
        keys = filter(former, store.keys())
        try:
            while chunk := await trio.to_thread.run_sync(_take, keys):
                orphans = [(name, key) for key in chunk if not _named(catalog, name, key)]
                if orphans:
                    failed = await trio.to_thread.run_sync(remove_files, stores, orphans)
                    removed += len(orphans) - len(failed)
                await trio.sleep(PAUSE)
        except OSError as error:
            log.info("tier %s: not searched for orphans: %s", name, error)
    for store in stores.values():
        try:
            removed += await trio.to_thread.run_sync(store.remove_temporaries, former)
        except TierError as error:
            log.info("%s", error)
    if removed:
        log.info("removed %d files that a killed daemon left behind", removed)
    return removed


def _take(keys: Iterator[str]) -> list[str]:
    return list(itertools.islice(keys, CHUNK))


def _named(catalog: Catalog, tier: str, key: str) -> bool:
    return any(r.tier == tier and r.key == key for r in catalog.replicas(int(key.partition("-")[0], 16)))
