"""What a start finds and nobody wrote down: files of a killed daemon that it had not entered in the catalog yet, or no
longer. For bytes that the memory tier lost see `rollback`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping

import trio

from tierfs.catalog import Catalog
from tierfs.errors import TierError
from tierfs.migrator.transfer import remove_files
from tierfs.points import At, reach
from tierfs.tiers.base import ReplicaStore

log = logging.getLogger("tierfs.recovery")

CHUNK, PAUSE = 128, 0.01
"""Keys looked up at a time, and seconds between, so that requests are served meanwhile."""


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
                    reach(At.ORPHANS_FOUND)
                    failed = await trio.to_thread.run_sync(remove_files, stores, orphans)
                    removed += len(orphans) - len(failed)
                    reach(At.ORPHANS_REMOVED)
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
