"""After the memory tier was lost (a reboot): what the catalog said that is true no longer is taken back.

Names go back to how they were when the first lost file was closed, files to their newest durable version, or to the
one that they had then (plan.retention). All of it is one transaction of SQLite: killed anywhere, the next start does
it again. What it did is in the report, by path.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierfs.catalog import Catalog, Operation
from tierfs.catalog.held import Held
from tierfs.fs.open_files import OpenFiles
from tierfs.plan.retention import NEVER, Change, Fact, Name, Rewound, frontier, rewind
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.report import Lost, Report, RolledBack, Undone
from tierfs.tiers.base import ReplicaStore
from tierfs.types import Attributes, OpKind, Replica, ReplicaState

_NAMES = (OpKind.LINK, OpKind.UNLINK, OpKind.RENAME, OpKind.EXCHANGE)


@dataclass
class Loss:
    """What is not on the tiers that a reboot empties, although the catalog says so, and the other way round."""

    replicas: dict[int, list[Replica]] = field(default_factory=dict)
    """By inode: those whose file is gone."""
    strays: dict[str, set[str]] = field(default_factory=dict)
    """By tier: keys of files that the catalog does not name."""
    gone: list[str] = field(default_factory=list)
    """Tiers on which the catalog has replicas and of which not one is there."""


def find_loss(catalog: Catalog, policy: Policy, stores: Mapping[str, ReplicaStore]) -> Loss:
    """Raises OSError."""
    loss = Loss()
    for name, store in stores.items():
        if policy.tier(name).persistent:
            continue
        keys = set(store.keys())
        known = list(catalog.replicas_on(name))
        for replica in known:
            if replica.key not in keys:
                loss.replicas.setdefault(replica.ino, []).append(replica)
        loss.strays[name] = keys.difference(replica.key for replica in known)
        if known and len(loss.strays[name]) == len(keys):
            loss.gone.append(name)
    return loss


def foresee_recovery(
    catalog: Catalog,
    policy: Policy,
    loss: Loss,
    files: OpenFiles,
    storing: Callable[[int, int], bool],
) -> Report:
    """What `recover_lost_memory` would report, orphans left out. The catalog stays as it is; ``files`` must not be used
    any more. Raises CatalogError."""
    report = Report()
    try:
        with catalog.bulk():
            _Rollback(catalog, policy, files, storing, report).run(loss.replicas)
            raise _Foreseen
    except _Foreseen:
        catalog.forget_paths()
    return report


class _Foreseen(Exception):
    """Takes a recovery back that was only to be looked at."""


def recover_lost_memory(
    catalog: Catalog,
    policy: Policy,
    stores: Mapping[str, ReplicaStore],
    files: OpenFiles,
    storing: Callable[[int, int], bool] = lambda ino, version: False,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """At a fresh mount, on the tiers that a reboot empties: drop replicas whose file is gone and take back what cannot
    stand without them; remove files that the catalog does not name. ``storing(ino, version)`` tells contents that
    are complete on the archive and only wait for their name. ``keep`` stores the report, before it becomes true.
    Raises OSError, CatalogError."""
    report = Report()
    loss = find_loss(catalog, policy, stores)
    for name, strays in loss.strays.items():
        for key in strays:
            stores[name].remove(key)
        report.orphans_removed += len(strays)
    if loss.replicas:
        with catalog.bulk():
            reach(At.ROLLBACK_BEGUN)
            _Rollback(catalog, policy, files, storing, report).run(loss.replicas)
            if report:
                keep(report)
            reach(At.ROLLBACK_REPORTED)
        reach(At.ROLLBACK_COMMITTED)
        catalog.forget_paths()
    elif report:
        keep(report)
    return report


@dataclass
class _Rollback:
    catalog: Catalog
    policy: Policy
    files: OpenFiles
    storing: Callable[[int, int], bool]
    report: Report
    _facts: dict[int, Fact] = field(default_factory=dict)
    _restored: set[int] = field(default_factory=set)
    """Inodes that had no name when the memory was lost and have one again."""
    _renew: set[int] = field(default_factory=set)
    """Inodes whose copies or attributes have to be queued again."""
    _before: dict[int, dict[Name, str]] = field(default_factory=dict)
    """Names and paths of all inodes whose names may change, as of the loss."""
    _back: dict[int, int] = field(default_factory=dict)
    """File → the version after which nothing of it is left; 0 for lost files."""

    def run(self, lost: Mapping[int, list[Replica]]) -> None:
        catalog = self.catalog
        self._vouched = catalog.vouched()
        for replicas in lost.values():
            for replica in replicas:
                catalog.remove_replica(replica)
        damaged = [a for ino in lost if (a := catalog.attributes(ino)) is not None and self._is_damaged(a)]
        paths: dict[int, str] = {attributes.ino: self._path(attributes.ino) for attributes in damaged}
        closes = catalog.closes()
        first = self._first_lost(damaged, closes)
        held = catalog.held(0, NEVER, -1)
        rewound = Rewound()
        if first is not None:
            due = self._due(first, held)
            # Everything since then is still in the oplog, but what the archive has followed already.
            followed = catalog.first_operation() or catalog.archived + 1
            first = max(followed, min(first, due))
            rewound = self._rewind(first, due, held, paths)
        self._roll_files_back(damaged, first, held, rewound, paths)
        for seq, ino, version in closes:
            if version > self._back.get(ino, version):
                catalog.drop_place(seq)
        for ino in self._renew:
            self._queue_again(ino)
        for ino in catalog.unqueued(self.policy.tiers[-1].name):
            self._queue_copies(ino)

    def _is_damaged(self, attributes: Attributes) -> bool:
        return (
            attributes.nlink > 0
            and not self.storing(attributes.ino, attributes.version)
            and not any(r.version == attributes.version for r in self.catalog.replicas(attributes.ino))
        )

    def _first_lost(self, damaged: list[Attributes], closes: list[tuple[int, int, int]]) -> int | None:
        """The first close that was lost, be it of a version that another was to make up for; None when nothing was but
        what was never closed, or never to be durable."""
        left: dict[int, int] = {}
        for attributes in damaged:
            newest = self._newest(attributes.ino)
            left[attributes.ino] = newest.version if newest else 0
        return min((seq for seq, ino, version in closes if version > left.get(ino, version)), default=None)

    def _due(self, first: int, held: list[Held]) -> int:
        """Deletes before this number stand. Files that are closed, lost, and were deleted after another loss count as
        lost, too: what followed them vouches for them as it does for ``first``."""
        lasting = [tier.name for tier in self.policy.tiers if tier.persistent]
        pairs = [(row.since, row.seq) for row in held if row.since]
        return frontier(first, pairs + self.catalog.deleted_before_durable_on(lasting))

    # names

    def _fact(self, ino: int) -> Fact:
        fact = self._facts.get(ino)
        if fact is None:
            fact = self._facts[ino] = self._find_fact(ino)
        return fact

    def _find_fact(self, ino: int) -> Fact:
        attributes = self.catalog.attributes(ino)
        if attributes is None:
            return Fact(False, False)
        live = attributes.nlink > 0
        if not stat.S_ISREG(attributes.mode):
            return Fact(live, True, stat.S_ISDIR(attributes.mode))
        usable = self._newest(ino) is not None or self.storing(ino, attributes.version)
        return Fact(live, usable, False, self._vouched.get(ino, 0) >= attributes.version)

    def _newest(self, ino: int) -> Replica | None:
        durable = [r for r in self.catalog.replicas(ino) if r.state is ReplicaState.DURABLE]
        return max(durable, key=lambda r: r.version, default=None)

    def _lookup(self, parent: int, name: bytes) -> int:
        found = self.catalog.lookup(parent, name)
        return found.ino if found else 0

    def _rewind(self, first: int, due: int, held: list[Held], paths: dict[int, str]) -> Rewound:
        """Take the names back to the operation ``first`` and make the oplog lead there."""
        catalog = self.catalog
        operations = catalog.operations_after(first - 1)
        victims = {row.seq: row.ino for row in held if not row.version}
        changes = [_change(op, victims) for op in operations if op.kind in _NAMES]
        earlier = [row for row in held if due < row.seq < first and not row.version and self._on_disk(row.ino)]
        names = [(row.ino, (row.parent, row.name)) for row in earlier]
        rewound = rewind(changes, self._lookup, catalog.names_of, self._fact, names)
        affected = {change.ino for change in changes} | {row.ino for row in held if row.seq > first or row in earlier}
        affected |= set(rewound.names.values()) - {0}  # an exchange names one of its two files
        self._before = {ino: self._paths_of(ino) for ino in affected}
        for ino in rewound.dropped:
            paths.setdefault(ino, self._path(ino))
        self._restored = {ino for ino in affected if not self._fact(ino).live}.intersection(rewound.names.values())
        self._apply(rewound)
        self._rewrite_oplog(first, operations, rewound)
        self._lost_below(operations, held, rewound)
        for row in held:
            if not row.version and (row.seq > first or row.ino in self._restored):
                catalog.drop_held(row.seq)
        self._describe(changes, rewound)
        return rewound

    def _on_disk(self, ino: int) -> bool:
        """Whether it can come back although the archive has followed its delete."""
        replicas = [r for r in self.catalog.replicas(ino) if r.state is ReplicaState.DURABLE]
        return any(r.tier in self.files.stores for r in replicas) or self._fact(ino).directory

    def _apply(self, rewound: Rewound) -> None:
        catalog = self.catalog
        touched: set[int] = set()
        for (parent, name), ino in rewound.names.items():
            old = self._lookup(parent, name)
            touched |= {parent, old, ino}
            if not ino:
                catalog.remove_entry(parent, name)
            elif old:
                catalog.set_entry(parent, name, ino)
            else:
                catalog.add_entry(parent, name, ino)
        for ino in touched - {0}:
            catalog.recount_links(ino)
        catalog.forget_paths()

    def _rewrite_oplog(self, first: int, operations: list[Operation], rewound: Rewound) -> None:
        catalog, now = self.catalog, time.time_ns()
        self._renew |= {op.ino for op in operations if op.kind not in _NAMES} | self._restored
        catalog.drop_operations_from(first)
        for (parent, name), ino in rewound.unlinked:
            attributes = catalog.attributes(ino)
            mode = attributes.mode if attributes else stat.S_IFREG
            catalog.log(OpKind.UNLINK, ino, now, parent=parent, name=name, arg=mode)
        for (parent, name), ino in rewound.linked:
            attributes = catalog.attributes(ino)
            assert attributes is not None
            catalog.log(OpKind.LINK, ino, now, parent=parent, name=name, arg=attributes.mode)
            self._renew.add(ino)

    def _lost_below(self, operations: list[Operation], held: list[Held], rewound: Rewound) -> None:
        """Files that directories which are back had, and that were deleted before they were durable."""
        closed = {row.ino: 0 for row in held if row.since}
        closed |= {op.ino: op.arg for op in operations if op.kind is OpKind.CONTENT}
        for (parent, name), ino in rewound.unlinked:
            fact = self._fact(ino)
            if parent in self._restored and ino in closed and not fact.live and not self._lookup(parent, name):
                self.report.lost.append(Lost(self._path_of((parent, name)), closed[ino], 0))

    # contents

    def _roll_files_back(
        self,
        damaged: list[Attributes],
        first: int | None,
        held: list[Held],
        rewound: Rewound,
        paths: dict[int, str],
    ) -> None:
        replaced: dict[int, int] = {}
        for row in reversed(held):
            if row.version and first is not None and row.seq > first:
                if self._vouched.get(row.ino, 0) <= row.version:
                    replaced[row.ino] = row.version
                else:
                    self._forget_version(row)
        others = dict.fromkeys(ino for ino in (*sorted(self._restored), *replaced) if ino not in paths)
        for ino in [*(attributes.ino for attributes in damaged), *others]:
            attributes = self.catalog.attributes(ino)
            if attributes is not None and stat.S_ISREG(attributes.mode):
                self._roll_back(attributes, replaced.get(ino), paths)
        for ino in rewound.dropped:
            self._give_up(ino, paths)

    def _forget_version(self, row: Held) -> None:
        """A version that was held, and need not come back because somebody was told that the next one is durable."""
        for replica in self.catalog.replicas(row.ino):
            if replica.version == row.version and replica.tier in self.files.stores:
                self.files.forget_replica(replica)
        self.catalog.drop_held(row.seq)
        self.catalog.drop_versions(row.ino)

    def _roll_back(self, attributes: Attributes, version: int | None, paths: dict[int, str]) -> None:
        catalog, ino = self.catalog, attributes.ino
        if version is None:
            if not self._is_damaged(attributes) and attributes.nlink:
                return
            newest = self._newest(ino)
            version = newest.version if newest else None
        path = self._path(ino) if attributes.nlink else paths.get(ino, "")
        if version is None:
            self._back[ino] = 0
            self.report.lost.append(Lost(path, attributes.version, attributes.size))
            return
        if not attributes.nlink:
            return
        for replica in catalog.replicas(ino):
            if replica.version > version:
                self.files.forget_replica(replica)
        size = max(r.size for r in catalog.replicas(ino) if r.version == version)
        catalog.roll_back(ino, version, size)
        self._back[ino] = version
        self._renew.add(ino)
        self.report.rolled_back.append(RolledBack(path, attributes.version, attributes.size, version, size))

    def _give_up(self, ino: int, paths: dict[int, str]) -> None:
        """A file that has bytes, but whose path is another's again."""
        attributes = self.catalog.attributes(ino)
        if attributes is None or not self._fact(ino).usable or self._fact(ino).directory:
            return
        other = self.catalog.resolve(tuple(os.fsencode(paths[ino]).split(b"/")))
        version, size = (other.version, other.size) if other else (0, 0)
        self.report.rolled_back.append(
            RolledBack(paths[ino], attributes.version, attributes.size, version, size)
        )

    def _queue_again(self, ino: int) -> None:
        attributes = self.catalog.attributes(ino)
        if attributes is not None and attributes.nlink:
            self._queue_copies(ino)
            self.catalog.log(OpKind.ATTRIBUTES, ino, time.time_ns())

    def _queue_copies(self, ino: int) -> None:
        """To the tiers that its rule wants, and that neither have the file nor wait for it."""
        catalog, files = self.catalog, self.files
        attributes = catalog.attributes(ino)
        if attributes is None:
            return
        local = files.local_replica(attributes) if stat.S_ISREG(attributes.mode) else None
        if local is not None and local.state is not ReplicaState.OPEN:
            _, rule = files.rule_of(catalog.path_of(ino))
            present = {
                r.tier
                for r in catalog.replicas(ino)
                if r.version == attributes.version and r.state is ReplicaState.DURABLE
            }
            present |= catalog.queued(ino, attributes.version, self.policy.tiers[-1].name)
            files.copies.queue(local, rule, time.time_ns(), present)

    # the report

    def _describe(self, changes: list[Change], rewound: Rewound) -> None:
        """The names that came back, each with what had taken it away."""
        replaced = {change.victim for change in changes if change.kind is OpKind.RENAME and change.victim}
        found: list[Undone] = []
        for ino, before in self._before.items():
            after = self._paths_of(ino)
            # What is in another directory now, at the same path, is where it was.
            came = sorted(path for name, path in after.items() if name not in before and path not in before.values())
            went = sorted(path for name, path in before.items() if name not in after and path not in after.values())
            if ino in rewound.beside:
                former = os.fsdecode(rewound.beside[ino])
                found += [Undone("name", path, path[: path.rfind("/") + 1] + former) for path in came]
            elif self._fact(ino).live and len(came) == len(went):
                found += [Undone("rename", path, to) for path, to in zip(came, went, strict=True)]
            else:
                kind = "rmdir" if self._fact(ino).directory else "replace" if ino in replaced else "unlink"
                found += [Undone(kind, path) for path in came]
        self.report.undone += sorted(found, key=lambda undone: undone.path)

    def _path(self, ino: int) -> str:
        return os.fsdecode(b"/".join(self.catalog.path_of(ino) or ()))

    def _path_of(self, name: Name) -> str:
        return os.fsdecode(b"/".join((*(self.catalog.path_of(name[0]) or ()), name[1])))

    def _paths_of(self, ino: int) -> dict[Name, str]:
        return {name: self._path_of(name) for name in self.catalog.names_of(ino)}


def _change(op: Operation, victims: Mapping[int, int]) -> Change:
    if op.kind in (OpKind.RENAME, OpKind.EXCHANGE):
        return Change(op.seq, op.kind, op.ino, op.parent, op.name, op.arg, op.name2, victims.get(op.seq, 0))
    return Change(op.seq, op.kind, op.ino, op.parent, op.name)
