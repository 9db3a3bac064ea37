"""fsck --repair: make the catalog agree with itself and with the tiers, losing nothing.

What the catalog names and no tier has is dropped from it; what a tier has and a sound catalog does not name is what a
crash left behind (docs/DURABILITY.md: a crash leaves orphans, never dangling references) and goes. Whatever else has
bytes stays: it is mended from a good replica, or gets a name in the directory ``tierfs-recovered``.

What a scrub listed as damaged is read, also where nothing else is: it is replaced, or right again, or stays listed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass

from tierfs.catalog import MendableCatalog, PublishedName
from tierfs.errors import ContentMissing, DigestMismatch, SourceChanged, TierError
from tierfs.fsck.check import archive_paths, check_strays, check_tiers, has_digest, open_replica
from tierfs.fsck.memory import memory_is_lost, take_back
from tierfs.fsck.session import Progress, Report, catalog_path, has_catalog, opened
from tierfs.migrator.archive import Archive
from tierfs.migrator.describe import beside
from tierfs.migrator.joining import known_disks
from tierfs.migrator.keeping import keep_closed
from tierfs.policy.model import Policy
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.beside import describer
from tierfs.tiers.kinds import Copies, copies_on
from tierfs.types import Attributes, Ino, OpKind, Replica, ReplicaState


def repair_all(
    policy: Policy, progress: Progress, *, data: bool = False, gone: Collection[str] = ()
) -> Report:
    """Mend the catalog of an unmounted policy; with ``data`` every replica is read. MountError while it is mounted;
    CatalogDamaged: `rebuild_all`; TierError, too, for a tier of which nothing is there but that is not among those that
    are ``gone`` for good: it may only not be mounted."""
    if not has_catalog(policy):
        return Report()
    with opened(policy) as tiers:
        catalog = MendableCatalog(catalog_path(policy), verify=True)
        try:
            tiers.check_catalog(catalog.uuid, known_disks(catalog, policy).difference(gone), claim=False)
            copies = copies_on(tiers.tree)
            copies.forget_clean()
            report = Report()
            older = tiers.tree.position() < catalog.logged
            if older:
                report.did("the archive is an older copy of itself: read and compared", str(tiers.tree.root))
            Repair(catalog, policy, tiers, copies, report, progress, data=data, older=older).run()
            report.problems = check_tiers(catalog, tiers.stores, tiers.tree, progress, data=data or older)
            if older:
                report.problems += check_strays(catalog, tiers.tree)
                with catalog.transaction():
                    catalog.put_logged(tiers.tree.position())
        finally:
            catalog.close()
        keep_closed(catalog.path, catalog.uuid, catalog.seq, copies)
        return report


@dataclass
class Repair:
    catalog: MendableCatalog
    policy: Policy
    tiers: Tiers
    copies: Copies
    report: Report
    progress: Progress
    data: bool = False
    older: bool = False
    """The archive is a copy that was made before the catalog's last batches: nothing there is taken on trust."""

    def __post_init__(self) -> None:
        self.stores: dict[str, ReplicaStore] = self.tiers.stores
        self.archive_name = self.tiers.tree.name
        self.now = time.time_ns()
        self._keys = self.now >> 10
        self._replaced: set[tuple[str, str]] = set()
        """(tier, key) of bad replicas in whose place good ones are"""

    def run(self) -> None:
        """Each step leaves a catalog that the next run could go on from. Raises OSError, TierError, CatalogError."""
        for what, step in (
            ("archive", self._finish_batch),
            ("memory", self._memory),
            ("names", self._names),
            ("replicas", self._replicas),
            ("archive", self._archive),
            ("versions", self._versions),
            ("links", self._links),
            ("orphans", self._orphans),
        ):
            self.progress(0, 0, what)
            step()

    def _shown(self, ino: int) -> bytes:
        return b"/".join(self.catalog.path_of(ino) or (b"inode %d" % ino,))

    def _finish_batch(self) -> None:
        archive = Archive(self.catalog, self.tiers.tree, self.archive_name, copies=self.copies)
        if archive.pending is None:
            return
        try:
            archive.finish()
            self.report.did("carried out what a daemon had begun on the archive", "")
        except ContentMissing as error:
            archive.abandon(archive.pending)
            self.report.did(f"{error}", "")

    def _memory(self) -> None:
        if memory_is_lost(self.catalog, self.policy, self.tiers):
            take_back(self.catalog, self.policy, self.tiers, self.report)

    # names

    def _names(self) -> None:
        for parent, name, ino in self.catalog.dangling_entries():
            with self.catalog.transaction():
                self.catalog.take_entry(parent, name, self.now)
            self.report.did(f"dropped a name of inode {ino}, which is not there or not below a directory", name)
        while lost := self.catalog.unreachable():
            with self.catalog.transaction():
                ino = lost[0]
                for parent, name in self.catalog.all_entries(ino):  # of a ring of directories, which it opens
                    self.catalog.take_entry(parent, name, self.now)
                path = self.catalog.put_recovered(ino, b"inode", self.now)
            self.catalog.forget_paths()
            self.report.did(f"inode {ino} had no path from the root", path, "recovered")
        for ino in self.catalog.forsaken():
            self._readopt(ino)

    def _readopt(self, ino: int) -> None:
        """Replicas of an inode that is not there: bytes without a file."""
        replicas = [r for r in self.catalog.replicas(ino) if r.tier in self.stores]
        newest = max((r.version for r in replicas), default=0)
        for replica in replicas:
            if replica.version == newest:
                self._set_aside(replica, b"inode", "its inode was not in the catalog")
        with self.catalog.transaction():
            for replica in self.catalog.replicas(ino):
                self.catalog.remove_replica(replica)

    def _set_aside(self, replica: Replica, hint: bytes, why: str) -> None:
        """The replica's file becomes a file of its own, and is the replica's no more."""
        status = self.stores[replica.tier].status(replica.key)
        with self.catalog.transaction():
            self.catalog.remove_replica(replica)
            ino, path = self.catalog.adopt_file(status.st_size, status.st_blocks, status.st_mtime_ns, hint)
            self.catalog.put_replica(
                Replica(ino, 1, replica.tier, ReplicaState.WRITTEN, replica.key, status.st_size, None)
            )
        self.report.did(f"kept bytes on {replica.tier}: {why}", path, "recovered")

    # replicas on local tiers

    def _replicas(self) -> None:
        keys = {name: set(store.keys()) for name, store in self.stores.items()}
        replicas = [r for r in self.catalog.all_replicas() if r.tier in self.stores]
        for index, replica in enumerate(replicas):
            if index % 256 == 0:
                self.progress(index, len(replicas), "replicas")
            there = replica.key in keys[replica.tier]
            size = self.stores[replica.tier].size(replica.key) if there else -1
            bad = size != replica.size and replica.state is not ReplicaState.OPEN
            whole = there and not bad
            if whole and not ((self.data or self.catalog.is_damaged(replica)) and self._is_wrong(replica)):
                continue
            if self._replace(replica):
                what = f"replaced the {'bad' if there else 'missing'} replica on {replica.tier}"
                self._replaced.add((replica.tier, replica.key))
                self.report.did(what, self._shown(replica.ino))
            elif whole and not self.data:
                continue  # listed, and nobody asked for all that is wrong to be put aside
            elif there:
                hint = (self.catalog.path_of(replica.ino) or (b"inode",))[-1]
                shown = self._shown(replica.ino).decode(errors="replace")
                self._set_aside(replica, hint, f"not what was written to {shown}")
            else:
                with self.catalog.transaction():
                    self.catalog.remove_replica(replica)
                self.report.did(f"dropped the replica on {replica.tier}, which is not there", self._shown(replica.ino))

    def _is_wrong(self, replica: Replica) -> bool:
        """Whether its bytes are others than were written. One that was listed as damaged and is right is no more."""
        right = has_digest(self.catalog, self.stores, self.tiers.tree, replica)
        if right and self.catalog.is_damaged(replica):
            with self.catalog.transaction():
                self.catalog.drop_damage(replica.ino, replica.version, replica.tier)
            self.report.did(f"has the right bytes on {replica.tier} again", self._shown(replica.ino))
        return right is False

    def _replace(self, bad: Replica) -> bool:
        """Copy a good replica of the same version to where ``bad`` should be. Of a tier that lost its bytes with the
        machine's memory nothing is replaced: the next read brings it back."""
        store = self.stores[bad.tier]
        if not store.persistent or bad.state is ReplicaState.OPEN:
            return False
        for source in self.catalog.replicas(bad.ino):
            if source.tier == bad.tier or source.version != bad.version or source.state is ReplicaState.OPEN:
                continue
            if source.size != bad.size:
                continue
            new = self._copy(source, bad)
            if new is not None:
                with self.catalog.transaction():
                    self.catalog.put_replica(new)
                return True
        return False

    def _copy(self, source: Replica, bad: Replica) -> Replica | None:
        store = self.stores[bad.tier]
        wanted = bad.digest or source.digest
        self._keys += 1
        key = f"{bad.ino:x}-{self._keys:x}"
        try:
            content = open_replica(self.catalog, self.stores, self.tiers.tree, source)
        except (OSError, TierError):
            return None
        try:
            if content.size != source.size:
                return None
            temp = store.temporary(key)
            try:
                digest = content.copy(temp, source.size)
                if wanted is None or digest != wanted:
                    return None
                describe = describer(beside(self.catalog, bad.ino, bad.version))
                store.publish(temp, key, describe, digest)
            finally:
                temp.discard()
            return bad._replace(key=key, digest=digest, state=ReplicaState.DURABLE)
        except (SourceChanged, DigestMismatch):
            return None
        finally:
            content.close()

    # the archive

    def _archive(self) -> None:
        tree = self.tiers.tree
        published = self.catalog.all_published()
        missing: list[PublishedName] = []
        changed: dict[int, os.stat_result] = {}
        lacking: dict[int, str] = {}
        for index, row in enumerate(published):
            if index % 256 == 0:
                self.progress(index, len(published), "archive")
            path = self.catalog.published_path(row.parent, row.name)
            if path is None:
                missing.append(row)
            elif row.occupant:
                status = tree.status(path)
                if status is None:
                    missing.append(row)
                elif abs(row.occupant) == row.ino and stat.S_ISREG(status.st_mode):
                    for replica in self.catalog.replicas(row.ino):
                        if replica.tier != self.archive_name:
                            continue
                        if (lacks := tree.lacks(path)) is not None:
                            lacking[row.ino] = lacks
                        elif replica.size != status.st_size:
                            changed[row.ino] = status
        self._restore_names(missing)
        for ino, status in changed.items():
            self._changed_on_archive(ino, status)
        for ino, lacks in lacking.items():
            self._lacking_on_archive(ino, lacks)
        self._archive_data()

    def _restore_names(self, missing: list[PublishedName]) -> None:
        """Names that the archive lost are made there again, as the mount has them now."""
        if not missing:
            return
        for row in missing:
            with self.catalog.transaction():
                self.catalog.remove_published(row.parent, row.name)
        for ino in sorted({ino for row in missing for ino in (row.ino, abs(row.occupant)) if ino}):
            shown = self._shown(ino)
            with self.catalog.transaction():
                if not archive_paths(self.catalog, ino):
                    for replica in self.catalog.replicas(ino):
                        if replica.tier == self.archive_name:
                            self.catalog.remove_replica(replica)
                attributes = self.catalog.attributes(ino)
                if attributes is None:
                    continue
                for parent, name in self.catalog.all_entries(ino):
                    if self.catalog.published(parent, name) is None:
                        self.catalog.log(OpKind.LINK, ino, self.now, parent=parent, name=name, arg=attributes.mode)
                self._publish_again(attributes)
            self.report.did("missing on the archive; to be made there again", shown)

    def _publish_again(self, attributes: Attributes) -> None:
        """Queue the content for the archive, if a local tier has it. Inside a transaction."""
        if not stat.S_ISREG(attributes.mode):
            return
        held = {r.tier for r in self.catalog.replicas(attributes.ino) if r.version == attributes.version}
        queued = self.catalog.queued(attributes.ino, attributes.version, self.archive_name)
        if held & self.stores.keys() and not (held | queued) & {self.archive_name}:
            self.catalog.log(OpKind.CONTENT, attributes.ino, self.now, arg=attributes.version)

    def _changed_on_archive(self, ino: int, status: os.stat_result) -> None:
        """The archive's file is not the one that was written there."""
        attributes = self.catalog.attributes(ino)
        if attributes is None:
            return
        with self.catalog.transaction():
            old = [r for r in self.catalog.replicas(ino) if r.tier == self.archive_name]
            for replica in old:
                self.catalog.remove_replica(replica)
            if any(r.tier in self.stores and r.version == attributes.version for r in self.catalog.replicas(ino)):
                self._publish_again(attributes)
                what, kind = "other bytes on the archive; to be copied there again", "mended"
            else:
                version = attributes.version + 1
                self.catalog.set_version(ino, version, status.st_size, status.st_mtime_ns, status.st_blocks)
                self.catalog.put_replica(
                    Replica(Ino(ino), version, self.archive_name, ReplicaState.DURABLE, "", status.st_size, None)
                )
                what = f"has {status.st_size} bytes on the archive, not {old[0].size}: taken as found, not verified"
                kind = "as found"
        self.report.did(what, self._shown(ino), kind)

    def _lacking_on_archive(self, ino: int, lacks: str) -> None:
        """What the archive's file stands for is not all there: copied again if there is another copy, else damaged."""
        attributes = self.catalog.attributes(ino)
        replicas = self.catalog.replicas(ino)
        for replica in (r for r in replicas if r.tier == self.archive_name):
            elsewhere = any(r.tier in self.stores and r.version == replica.version for r in replicas)
            with self.catalog.transaction():
                if attributes is not None and elsewhere and replica.version == attributes.version:
                    self.catalog.drop_damage(replica.ino, replica.version, replica.tier)
                    self.catalog.remove_replica(replica)
                    self._publish_again(attributes)
                    self.report.did(f"on the archive {lacks}; to be copied there again", self._shown(ino))
                elif not self.catalog.is_damaged(replica):
                    self.catalog.put_damage(replica, lacks, self.now)

    def _archive_data(self) -> None:
        """With ``data``, or on an older copy, of all files, else of those that a scrub listed."""
        damaged = ((found.ino, found.version) for found in self.catalog.damaged() if found.tier == self.archive_name)
        listed = [r for ino, version in damaged if (r := self.catalog.replica(ino, version, self.archive_name))]
        for replica in self.catalog.replicas_on(self.archive_name) if self.data or self.older else listed:
            attributes = self.catalog.attributes(replica.ino)
            if attributes is None or not self._is_wrong(replica):
                continue
            good = [
                r
                for r in self.catalog.replicas(replica.ino)
                if r.tier in self.stores
                and r.version == replica.version == attributes.version
                and has_digest(self.catalog, self.stores, self.tiers.tree, r) is not False
            ]
            if good:
                with self.catalog.transaction():
                    self.catalog.drop_damage(replica.ino, replica.version, replica.tier)
                    self.catalog.remove_replica(replica)
                    self._publish_again(attributes)
                self.report.did("other bytes on the archive; to be copied there again", self._shown(replica.ino))

    # files

    def _versions(self) -> None:
        """Files whose current version no tier has fall back to the newest durable one, or lose their names."""
        for attributes in self.catalog.bereft():
            shown = self._shown(attributes.ino)
            left = [r for r in self.catalog.replicas(attributes.ino) if r.state is not ReplicaState.OPEN]
            durable = [r for r in left if r.state is ReplicaState.DURABLE] or left
            with self.catalog.transaction():
                if durable:
                    newest = max(durable, key=lambda r: r.version)
                    self.catalog.fall_back(attributes.ino, newest.version, newest.size)
                    self.report.did(f"is again its version {newest.version} of {newest.size} bytes", shown)
                    continue
                for parent, name in self.catalog.all_entries(attributes.ino):
                    self.catalog.take_entry(parent, name, self.now)
                self.catalog.set_links(attributes.ino, 0, self.now)
            self.report.lose("no tier has its bytes", shown)

    def _links(self) -> None:
        with self.catalog.transaction():
            self.catalog.drop_nameless()
        for ino, links, right in self.catalog.wrong_links():
            with self.catalog.transaction():
                self.catalog.mend_links(ino, right)
            self.report.did(f"has {right} links, not {links}", self._shown(ino))
        with self.catalog.transaction():
            wrong = any(what.startswith("sums") for what, _ in self.catalog.inconsistencies())
            self.catalog.mend_sums()
            self.catalog.drop_loose_rows()
            self.catalog.remember_drains("")  # the next mount queues what is not where its rule wants it
        if wrong:
            self.report.did("counted the bytes of each tier anew", "")
        self.catalog.forget_paths()

    # what nothing names

    def _orphans(self) -> None:
        self.catalog.commit()
        self.catalog.sync()
        for name, store in self.stores.items():
            named = {replica.key for replica in self.catalog.replicas_on(name)}
            for key in list(store.keys()):
                if key not in named:
                    store.remove(key)
                    if (name, key) in self._replaced:
                        self.report.did(f"removed a bad replica on {name}", key, "removed")
                    else:
                        self.report.did(f"removed a file on {name} that a crash left behind", key, "removed")
            for record in list(store.loose_records()):
                store.remove(record)
                self.report.did(f"removed a record on {name} without a replica", record, "removed")
        Archive(self.catalog, self.tiers.tree, self.archive_name).sweep()


