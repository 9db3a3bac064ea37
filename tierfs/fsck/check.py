"""fsck: does what the catalog says agree with itself and with what stands on the tiers? Changes nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tierfs.catalog import Catalog, PublishedName
from tierfs.errors import DigestMismatch, SourceChanged, TierError
from tierfs.fs.copies import drains_of
from tierfs.fsck.memory import foresee, gone
from tierfs.fsck.session import Progress, catalog_path, has_catalog, opened
from tierfs.migrator.joining import known_disks
from tierfs.migrator.rollback import find_loss
from tierfs.migrator.steps import Batch
from tierfs.policy.match import RuleMatcher
from tierfs.policy.model import Policy
from tierfs.tiers.base import OWNER, ReplicaStore
from tierfs.tiers.content import Content, FileContent
from tierfs.tiers.kinds import Tree
from tierfs.tiers.root import RESERVED
from tierfs.tiers.walk import walk
from tierfs.types import Replica, ReplicaState

Problem = dict[str, str]
T = TypeVar("T")

REPORT_EVERY = 256
"""Replicas or names between two reports of progress."""


def check_all(policy: Policy, progress: Progress, *, data: bool = False) -> list[Problem]:
    """Every disagreement, as {severity, what, path}; with ``data`` every replica is read and compared with its digest.
    Where a reboot took the memory tier, first that, and what the next mount will do about it: `tierfs.fsck.memory`.
    MountError while the policy is mounted; CatalogDamaged."""
    path = catalog_path(policy)
    if not has_catalog(policy):
        return [
            {"severity": "error", "what": f"no catalog, but tier {tier.name} has files of one", "path": str(path)}
            for tier in policy.tiers
            if tier.path is not None and _is_owned(tier.path, archive=tier is policy.tiers[-1])
        ]
    with opened(policy) as tiers:
        catalog = Catalog(path, verify=True)
        try:
            tiers.check_catalog(catalog.uuid, known_disks(catalog, policy), claim=False)
            loss = find_loss(catalog, policy, tiers.stores)
            problems = broken = check_catalog(catalog, progress)
            if tiers.tree.position() < catalog.logged:
                what = "an older copy of the archive; mount the archive itself, or, if this is all, use --repair"
                problems = [*problems, {"severity": "error", "what": what, "path": str(tiers.tree.root)}]
            problems = problems + _check_bytes(catalog, tiers.stores, tiers.tree, progress, loss.gone)
            if catalog.drains == drains_of(policy):  # else the next mount queues what the rules want of every file
                problems += check_queued(catalog, policy)
            problems += check_damage(catalog, tiers.stores, tiers.tree, read=data)
            if data:
                problems += check_data(catalog, tiers.stores, tiers.tree, progress)
            if not loss.gone:
                return problems
            if broken:
                return gone(tiers, loss, "what the next mount does can be told once the catalog is repaired") + problems
            return foresee(catalog, policy, tiers, loss) + problems
        finally:
            catalog.close(as_found=True)


def _is_owned(path: Path, *, archive: bool) -> bool:
    return (path / os.fsdecode(RESERVED) if archive else path).joinpath(os.fsdecode(OWNER)).exists()


def check_tiers(
    catalog: Catalog,
    stores: Mapping[str, ReplicaStore],
    tree: Tree,
    progress: Progress,
    *,
    data: bool = False,
) -> list[Problem]:
    """The checks themselves, on tiers that are open already."""
    problems = check_catalog(catalog, progress) + _check_bytes(catalog, stores, tree, progress)
    problems += check_damage(catalog, stores, tree, read=data)
    return problems + check_data(catalog, stores, tree, progress) if data else problems


def check_catalog(catalog: Catalog, progress: Progress) -> list[Problem]:
    """What the catalog says that contradicts itself."""
    progress(0, 0, "catalog")
    problems = [{"severity": "error", "what": text, "path": str(catalog.path)} for text in catalog.check()]
    progress(0, 0, "names")
    return problems + _names(catalog)


def _check_bytes(
    catalog: Catalog,
    stores: Mapping[str, ReplicaStore],
    tree: Tree,
    progress: Progress,
    gone: Collection[str] = (),
) -> list[Problem]:
    """What stands on the tiers; of the ``gone`` ones nothing is expected."""
    replicas = [replica for replica in catalog.all_replicas() if replica.tier not in gone]
    published = catalog.all_published()
    total = len(replicas) + len(published)
    problems = _replicas(catalog, stores, _counted(replicas, 0, total, "replicas", progress))
    problems += _archive(catalog, tree, _counted(published, len(replicas), total, "archive", progress))
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
    for name, store in stores.items():
        problems += [
            {"severity": "orphan", "what": f"record without a replica on {name}", "path": path}
            for path in store.loose_records()
        ]
    for name, left in keys.items():
        problems += [{"severity": "orphan", "what": f"file without a replica on {name}", "path": key} for key in left]
    return problems


def _archive(catalog: Catalog, tree: Tree, published: Iterable[PublishedName]) -> list[Problem]:
    """What a batch that was cut short may have moved already, and all below, is for the next mount to finish."""
    problems = []
    begun = catalog.intent()
    under_way = set() if begun is None else {path for step in Batch.decode(begun).steps for path in step.touches}
    for row in published:
        names = catalog.published_path(row.parent, row.name)
        if names is None or not row.occupant:
            continue
        if under_way and any(names[:depth] in under_way for depth in range(1, len(names) + 1)):
            continue
        shown = f"{tree.root}/{b'/'.join(names).decode(errors='replace')}"
        status = tree.status(names)
        if status is None:
            problems.append({"severity": "error", "what": "missing on the archive", "path": shown})
            continue
        for replica in catalog.replicas(row.ino):
            archived = replica.tier == tree.name and abs(row.occupant) == row.ino and stat.S_ISREG(status.st_mode)
            if archived and (lacks := tree.lacks(names)) is not None:
                problems.append({"severity": "error", "what": f"on the archive {lacks}", "path": shown})
            elif archived and replica.size != status.st_size:
                what = f"archive has {status.st_size} bytes, not {replica.size}"
                problems.append({"severity": "error", "what": what, "path": shown})
    return problems


def check_strays(catalog: Catalog, tree: Tree) -> list[Problem]:
    """What stands on the archive under a name that it should not have; of a directory not what is in it."""
    rows = catalog.all_published()
    known = {path for row in rows if (path := catalog.published_path(row.parent, row.name)) is not None}
    problems, strays = [], set()
    for standing in walk(tree):
        if standing.path[:-1] in strays:
            strays.add(standing.path)
        elif standing.path not in known:
            strays.add(standing.path)
            shown = f"{tree.root}/{b'/'.join(standing.path).decode(errors='replace')}"
            what = "was renamed or deleted since this copy of the archive was made, or is nobody's; move it away"
            problems.append({"severity": "error", "what": what, "path": shown})
    return problems


def check_queued(catalog: Catalog, policy: Policy) -> list[Problem]:
    """Files that belong on the archive and would never come there."""
    archive, matcher = policy.tiers[-1].name, RuleMatcher(policy.rules)
    problems = []
    for ino in catalog.unqueued(archive):
        path = b"/".join(catalog.path_of(ino) or (b"?",))
        if matcher.rule_for(path)[1].lowest == archive:
            what = "neither on the archive nor queued for it"
            problems.append({"severity": "error", "what": what, "path": path.decode(errors="replace")})
    return problems


def archive_paths(catalog: Catalog, ino: int) -> list[tuple[bytes, ...]]:
    """Where the inode's own object stands on the archive."""
    rows = [row for row in catalog.published_names(ino) if abs(row.occupant) == ino]
    paths = [catalog.published_path(row.parent, row.name) for row in rows]
    return [path for path in paths if path is not None]


def open_replica(catalog: Catalog, stores: Mapping[str, ReplicaStore], tree: Tree, replica: Replica) -> Content:
    """Its bytes. Raises OSError, TierError."""
    if replica.tier in stores:
        return FileContent(stores[replica.tier].open(replica.key, write=False))
    return tree.content_first(archive_paths(catalog, replica.ino), replica.size)


def has_digest(catalog: Catalog, stores: Mapping[str, ReplicaStore], tree: Tree, replica: Replica) -> bool | None:
    """Whether a replica's bytes are those of its digest; None when it has none, or cannot be read."""
    if replica.digest is None or replica.state is ReplicaState.OPEN:
        return None
    try:
        content = open_replica(catalog, stores, tree, replica)
        try:
            return content.digest(replica.size) == replica.digest
        finally:
            content.close()
    except (SourceChanged, DigestMismatch):
        return False
    except (OSError, TierError):
        return None


def check_damage(
    catalog: Catalog, stores: Mapping[str, ReplicaStore], tree: Tree, *, read: bool
) -> list[Problem]:
    """What a scrub listed as damaged; with ``read`` only what could not be read, as `check_data` says the rest."""
    problems = []
    for found in catalog.damaged():
        replica = catalog.replica(found.ino, found.version, found.tier)
        if replica is None or (found.tier not in stores and found.tier != tree.name):
            continue
        if read and has_digest(catalog, stores, tree, replica) is not None:
            continue
        path = b"/".join(catalog.path_of(found.ino) or (b"?",)).decode(errors="replace")
        remedy = "`tierfs fsck --repair` replaces it from another tier" if found.elsewhere else found.remedy
        what = f"a scrub found the replica on {found.tier} damaged: {found.what}; {remedy}"
        problems.append({"severity": "error", "what": what, "path": path})
    return problems


def check_data(
    catalog: Catalog, stores: Mapping[str, ReplicaStore], tree: Tree, progress: Progress
) -> list[Problem]:
    """Replicas whose bytes are not those that were written; sizes are not looked at again."""
    replicas = list(catalog.all_replicas())
    problems = []
    for replica in _counted(replicas, 0, len(replicas), "data", progress):
        if (replica.tier in stores or replica.tier == tree.name) and has_digest(
            catalog, stores, tree, replica
        ) is False:
            path = b"/".join(catalog.path_of(replica.ino) or (b"?",)).decode(errors="replace")
            what = f"replica on {replica.tier} does not have the bytes written to it"
            problems.append({"severity": "error", "what": what, "path": path})
    return problems
