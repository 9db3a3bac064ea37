"""Held deletes: what was deleted, or replaced by a newer version, stays on a disk until every file closed before that
is durable there or further down (plan.retention says when). Until then a lost memory tier can be answered by undoing
the delete (migrator.rollback). On the archive the order of its replay does the same.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.fs.handles import OpenInode
from tierfs.fs.open_files import OpenFiles
from tierfs.plan.retention import NEVER, frontier
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.types import Replica, ReplicaState

ROWS = 256
"""Rows looked at in one transaction."""
URGENT = 256

SNAPSHOT_AFTER, GIVE_UP_AFTER = 10, 60
"""Seconds that deletes, and the archive, wait for a file that was opened for writing again before its last close was
durable. After the first, what is there of it is made durable as by an fsync, unless it was begun anew: half of it must
not take the place of what is durable. After the second, also if it was closed and written again and again meanwhile,
its closes until then count as those of a file that was deleted."""
AWAITED = 1
"""Instead of both while somebody waits for what was done before. More than nothing: the kernel tells of a close a
little later."""


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    policy: Policy
    files: OpenFiles


class HeldDeletes:
    def __init__(self, host: Host) -> None:
        self._host = host
        names = [tier.name for tier in host.policy.tiers]
        self._lasting = [tier.name for tier in host.policy.tiers if tier.persistent]
        self._disks = [name for name in self._lasting if name != names[-1]]
        self._reached: dict[str, int] = {}
        """Per tier, a number up to which no close waits any more: where to go on looking."""
        self._overtaken: dict[int, float] = {}
        """Files that were opened for writing while a former close waits, and since when."""
        self._given_up: dict[int, int] = {}
        """Those of which nothing waits for the closes of versions before this one."""

    def frontier(self, tier: str) -> int:
        """Every file closed before this number is durable on ``tier`` or below it, or was deleted and waits for
        nothing."""
        catalog = self._host.catalog
        if tier not in self._disks:
            return catalog.first_operation() or NEVER
        below = self._lasting[self._lasting.index(tier) :]
        queues = [name for name in below if name in self._disks]
        waiting = catalog.first_waiting(self._reached.get(tier, 0), queues, below)
        limit = frontier(waiting, catalog.deleted_before_durable(0))
        if waiting is not None:
            self._reached[tier] = waiting
        return limit

    def safe(self) -> int:
        """What was deleted before this number never has to come back: nothing closed before it can be lost."""
        return self.frontier(self._lasting[0])

    def release(self) -> None:
        """Drop what is held no longer: its rows now, its bytes soon."""
        catalog = self._host.catalog
        if not catalog.holds_anything():
            return
        limits = {tier: self.frontier(tier) for tier in self._disks}
        safe, after = self.safe(), 0
        while rows := catalog.held(after, safe, ROWS):
            with catalog.transaction():
                for row in rows:
                    if row.version:
                        self._release_version(row.seq, row.ino, row.version, limits)
                    else:
                        self._release_name(row.seq, row.ino, row.forgotten, limits)
            after = rows[-1].seq
            reach(At.HELD_RELEASED)
        with catalog.transaction():
            catalog.drop_vouched(safe)

    def hasten(self, *, awaited: bool = False) -> None:
        """Have nothing wait for a file that stays open, or is written again and again: see `SNAPSHOT_AFTER`.
        ``awaited``: somebody waits for what was done before. To be called now and then."""
        catalog, files, now = self._host.catalog, self._host.files, trio.current_time()
        for inode in files.inodes.values():
            if _is_written(inode) and inode.ino not in self._overtaken and self._waits(inode.ino):
                self._overtaken[inode.ino] = now
        for ino, since in list(self._overtaken.items()):
            opened = files.inodes.get(ino)
            if not self._waits(ino):
                del self._overtaken[ino]
            elif opened is None or not _is_written(opened):
                continue  # what makes up for the former closes is complete, and on its way
            elif now - since >= (AWAITED if awaited and opened.anew else GIVE_UP_AFTER):
                del self._overtaken[ino]
                self._given_up[ino] = opened.replica.version
                with catalog.transaction():
                    catalog.drop_overtaken(ino)
            elif not opened.anew and now - since >= (AWAITED if awaited else SNAPSHOT_AFTER):
                files.take_snapshot(opened)
        self._given_up = {ino: v for ino, v in self._given_up.items() if catalog.overtakes(ino, 0, v)}

    def _waits(self, ino: int) -> bool:
        """Whether a close of an older version of the file is waited for."""
        attributes = self._host.catalog.attributes(ino)
        return attributes is not None and self._host.catalog.overtakes(
            ino, self._given_up.get(ino, 0), attributes.version
        )

    def given_up(self, ino: int, version: int) -> bool:
        """Whether nothing waits for the close of this version of the file."""
        return version < self._given_up.get(ino, 0)

    def _still_held(self, seq: int, replica: Replica, limits: dict[str, int]) -> bool:
        return replica.state is ReplicaState.DURABLE and limits.get(replica.tier, NEVER) <= seq

    def _release_version(self, seq: int, ino: int, version: int, limits: dict[str, int]) -> None:
        catalog, files = self._host.catalog, self._host.files
        stays = False
        for replica in catalog.replicas(ino):
            if replica.version == version and replica.tier in self._disks:
                if self._still_held(seq, replica, limits) or not self._replaced(replica):
                    stays = True
                else:
                    files.forget_replica(replica)
        if not stays:
            catalog.drop_held(seq)
        catalog.drop_versions(ino)

    def _replaced(self, replica: Replica) -> bool:
        """Whether a newer version is durable on the replica's tier or below."""
        enough = self._lasting[self._lasting.index(replica.tier) :]
        return any(
            r.version > replica.version and r.tier in enough and r.state is ReplicaState.DURABLE
            for r in self._host.catalog.replicas(replica.ino)
        )

    def _release_name(self, seq: int, ino: int, forgotten: int, limits: dict[str, int]) -> None:
        catalog, files = self._host.catalog, self._host.files
        attributes = catalog.attributes(ino)
        gone = attributes is not None and attributes.nlink == 0 and forgotten
        replicas = catalog.replicas(ino) if gone else []
        if any(self._still_held(seq, replica, limits) for replica in replicas):
            for replica in replicas:
                if replica.tier in self._disks and not self._still_held(seq, replica, limits):
                    files.forget_replica(replica)
            return
        catalog.drop_held(seq)
        if gone and not catalog.holds(ino):
            files.remove_content(ino)
            catalog.drop_inodes([ino])

    def supersede(self, new: Replica, closed: int) -> None:
        """``new`` has just become durable on its tier, as the copy of the close ``closed`` (0: unknown). Older versions
        there go, unless files closed before that may still be lost. Inside a transaction of the caller."""
        catalog, files = self._host.catalog, self._host.files
        older = [r for r in catalog.replicas(new.ino) if r.tier == new.tier and r.version < new.version]
        if not older:
            return
        latest = max((r for r in older if r.state is ReplicaState.DURABLE), key=lambda r: r.version, default=None)
        held = {row.version for row in catalog.held_versions(new.ino)}
        keep = bool(closed) and self.frontier(new.tier) < closed
        for replica in older:
            if replica is latest and keep:
                catalog.hold_version(closed, replica.ino, replica.version)
            elif replica.version not in held:
                files.forget_replica(replica)
        catalog.drop_versions(new.ino)

    def vouch(self, ino: int, version: int) -> None:
        """Somebody is about to be told that this version is durable."""
        if self.safe() < NEVER:
            with self._host.catalog.transaction():
                self._host.catalog.vouch(ino, version)

    def barrier(self) -> int:
        """The first close that may still be lost and whose content is not among those that the archive waits for."""
        host, archive = self._host, self._host.policy.tiers[-1].name
        if all(rule.lowest == archive or not host.policy.tier(rule.lowest).persistent for rule in host.policy.rules):
            return NEVER
        for seq, ino, _ in host.catalog.waiting_closes(self._lasting):
            _, rule = host.files.rule_of(host.catalog.path_of(ino))
            if rule.lowest != archive:
                return seq
        return NEVER

    # space

    def sums(self) -> tuple[int, int]:
        """(files, bytes) that are on persistent tiers only because they are held."""
        return self._host.catalog.held_sums(self._lasting)

    def urgent(self) -> set[tuple[int, int]]:
        """(ino, version) of closes that held deletes wait for, when a tier that they fill is short of space: to be
        drained before anything else."""
        catalog, policy = self._host.catalog, self._host.policy
        last = catalog.last_held()
        if not last:
            return set()
        for tier in self._lasting:
            with contextlib.suppress(OSError):
                usage = self._host.files.space.usage(tier)
                full = usage.used > usage.capacity * policy.tier(tier).high or not usage.available
                if full and catalog.held_sums([tier])[1]:
                    return set(catalog.waiting(last, URGENT))
        return set()


def _is_written(inode: OpenInode) -> bool:
    """Whether a version that follows another is being written."""
    return inode.writers > 0 and inode.replica.state is ReplicaState.OPEN and inode.replica.version > 1
