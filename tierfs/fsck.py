"""fsck: does what the catalog says agree with itself and with what stands on the tiers? Changes nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from tierfs.catalog import Catalog
from tierfs.policy.model import Policy
from tierfs.state import CATALOG, state_lock
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.base import ReplicaStore
from tierfs.types import ReplicaState

Problem = dict[str, str]


def check_all(policy: Policy, progress: Callable[[int, int, str], object]) -> list[Problem]:
    """Every disagreement, as {severity, what, path}. MountError while the policy is mounted."""
    path = policy.state / CATALOG
    if not path.exists():
        return []
    with state_lock(policy.state):
        tiers = Tiers.open(policy)
        catalog = Catalog(path)
        try:
            return check_tiers(catalog, tiers.stores, tiers.tree.root, progress)
        finally:
            catalog.close()


def check_tiers(
    catalog: Catalog,
    stores: Mapping[str, ReplicaStore],
    archive_root: Path,
    progress: Callable[[int, int, str], object],
) -> list[Problem]:
    """The checks themselves, on tiers that are open already."""
    progress(0, 4, "catalog")
    problems = [{"severity": "error", "what": text, "path": str(catalog.path)} for text in catalog.check()]
    progress(1, 4, "names")
    problems += _names(catalog)
    progress(2, 4, "replicas")
    problems += _replicas(catalog, stores)
    progress(3, 4, "archive")
    problems += _archive(catalog, archive_root)
    progress(4, 4, "done")
    return problems


def _names(catalog: Catalog) -> list[Problem]:
    problems = []
    for what, ino in catalog.inconsistencies():
        path = b"/".join(catalog.path_of(ino) or (b"?",)).decode(errors="replace")
        problems.append({"severity": "error", "what": what, "path": f"{path} (inode {ino})"})
    return problems


def _replicas(catalog: Catalog, stores: Mapping[str, ReplicaStore]) -> list[Problem]:
    problems = []
    keys = {name: set(store.keys()) for name, store in stores.items()}
    for replica in catalog.all_replicas():
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


def _archive(catalog: Catalog, root: Path) -> list[Problem]:
    problems = []
    for row in catalog.all_published():
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
