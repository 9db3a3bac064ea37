"""At a fresh mount: what the memory tier lost while nobody looked (a reboot) falls back to what is durable."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tierfs.catalog import Catalog
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.types import Replica, ReplicaState

log = logging.getLogger("tierfs.recovery")


def recover_lost_memory(catalog: Catalog, policy: Policy, stores: Mapping[str, ReplicaStore]) -> None:
    """Drop replicas whose file is gone, roll files back to their newest durable version, and remove files that the
    catalog no longer names. What was rolled back or lost is logged by path."""
    present = {name: set(store.keys()) for name, store in stores.items()}
    lost: dict[int, list[Replica]] = {}
    for replica in list(catalog.all_replicas()):
        if replica.tier not in present:
            continue
        if replica.key in present[replica.tier]:
            present[replica.tier].discard(replica.key)
        else:
            lost.setdefault(replica.ino, []).append(replica)
    for ino, replicas in lost.items():
        _fall_back(catalog, ino, replicas)
    for name, keys in present.items():
        for key in keys:
            stores[name].remove(key)


def _fall_back(catalog: Catalog, ino: int, replicas: list[Replica]) -> None:
    with catalog.transaction():
        for replica in replicas:
            catalog.remove_replica(replica)
        attributes = catalog.attributes(ino)
        left = catalog.replicas(ino)
        if attributes is None or attributes.nlink == 0 or any(r.version == attributes.version for r in left):
            return
        path = b"/".join(catalog.path_of(ino) or ()).decode(errors="replace")
        durable = [r for r in left if r.state is ReplicaState.DURABLE]
        if not durable:
            log.error("lost: %s had bytes in memory only", path)
            return
        newest = max(durable, key=lambda r: r.version)
        catalog.roll_back(ino, newest.version, newest.size)
        log.error("rolled back: %s is again its version %d of %d bytes", path, newest.version, newest.size)
