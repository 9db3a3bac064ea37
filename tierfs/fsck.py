"""fsck: does what the catalog says agree with itself and with what stands on the tiers? Changes nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tierfs.catalog import Catalog, PublishedName
from tierfs.catalog.database import journals
from tierfs.policy.model import Policy
from tierfs.state import CATALOG, state_lock
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.memory import mounted_at
from tierfs.types import Replica, ReplicaState

Problem = dict[str, str]
Progress = Callable[[int, int, str], object]
T = TypeVar("T")

REPORT_EVERY = 256
"""Replicas or names between two reports of progress."""


def check_all(policy: Policy, progress: Progress) -> list[Problem]:
    """Every disagreement, as {severity, what, path}. MountError while the policy is mounted."""
    path = policy.state / CATALOG
    if not path.exists() and not any(journal.exists() for journal in journals(path)):
        return []
    with state_lock(policy.state):
        memory = policy.state / "memory"
        found = {config.name for config in policy.tiers if mounted_at(memory / config.name) is not None}
        tiers = Tiers.open(policy)
        try:
            catalog = Catalog(path)
            try:
                tiers.check_catalog(catalog.uuid, (), claim=False)
                return check_tiers(catalog, tiers.stores, tiers.tree.root, progress)
            finally:
                catalog.close()
        finally:
            for mount in tiers.mounts:
                if mount.name not in found:  # what a clean umount had taken away
                    mount.unmount()


def check_tiers(
    catalog: Catalog,
    stores: Mapping[str, ReplicaStore],
    archive_root: Path,
    progress: Progress,
) -> list[Problem]:
    """The checks themselves, on tiers that are open already."""
    progress(0, 0, "catalog")
    problems = [{"severity": "error", "what": text, "path": str(catalog.path)} for text in catalog.check()]
    progress(0, 0, "names")
    problems += _names(catalog)
    replicas, published = list(catalog.all_replicas()), catalog.all_published()
    total = len(replicas) + len(published)
    problems += _replicas(catalog, stores, _counted(replicas, 0, total, "replicas", progress))
    problems += _archive(catalog, archive_root, _counted(published, len(replicas), total, "archive", progress))
    progress(total, total, "done")
    return problems


def _counted(items: Sequence[T], before: int, total: int, what: str, progress: Progress) -> Iterator[T]:
    """The items; every now and then how far they are."""
    for index, item in enumerate(items):
        if index % REPORT_EVERY == 0:
            progress(before + index, total, what)
        yield item


def _names(catalog: Catalog) -> list[Problem]:
    problems = []
    for what, ino in catalog.inconsistencies():
        path = b"/".join(catalog.path_of(ino) or (b"?",)).decode(errors="replace")
        problems.append({"severity": "error", "what": what, "path": f"{path} (inode {ino})"})
    return problems


def _replicas(catalog: Catalog, stores: Mapping[str, ReplicaStore], replicas: Iterable[Replica]) -> list[Problem]:
    problems = []
    keys = {name: set(store.keys()) for name, store in stores.items()}
    for replica in replicas:
        if replica.tier not in stores:
            continue
        path = b"/".join(catalog.path_of(replica.ino) or (b"?",)).decode(errors="replace")
        if replica.key not in keys[replica.tier]:
            problems.append({"severity": "error", "what": f"no file for the replica on {replica.tier}", "path": path})
            continue
        keys[replica.tier].discard(replica.key)
        size = stores[replica.tier].size(replica.key)
        if replica.state is not ReplicaState.OPEN and size != replica.size:
            what = f"replica on {replica.tier} has {size} bytes, not {replica.size}"
            problems.append({"severity": "error", "what": what, "path": path})
    for name, left in keys.items():
        problems += [{"severity": "orphan", "what": f"file without a replica on {name}", "path": key} for key in left]
    return problems


def _archive(catalog: Catalog, root: Path, published: Iterable[PublishedName]) -> list[Problem]:
    problems = []
    for row in published:
        names = catalog.published_path(row.parent, row.name)
        if names is None or not row.occupant:
            continue
        path = os.fsencode(root) + b"/" + b"/".join(names)
        shown = path.decode(errors="replace")
        try:
            status = os.lstat(path)
        except OSError as error:
            problems.append({"severity": "error", "what": f"missing on the archive: {error.strerror}", "path": shown})
            continue
        for replica in catalog.replicas(row.ino):
            archived = not replica.key and row.occupant == row.ino and stat.S_ISREG(status.st_mode)
            if archived and replica.size != status.st_size:
                what = f"archive has {status.st_size} bytes, not {replica.size}"
                problems.append({"severity": "error", "what": what, "path": shown})
    return problems
