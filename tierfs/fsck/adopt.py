"""What the tiers know and a rebuilt catalog does not: taken into it, newest statement first.

A statement is true as of a sequence number: the catalog's names as of `Adoption.horizon`, a record beside a replica as
of its own. Content is found by inode and version, so a rename after the last statement costs a file its new name,
never its bytes. Nothing that has bytes is dropped for another file's sake: it gets a name in ``tierfs-recovered``.

A file on the archive that is not what was recorded of it, and that no other tier has, is taken as it is found there: it
may be all that is left, and nobody can say whether it is right. So each of them is in the report.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from tierfs.catalog import MendableCatalog
from tierfs.errors import SourceChanged, TierError
from tierfs.fsck.memory import memory_is_lost, take_back
from tierfs.fsck.session import Progress, Report
from tierfs.migrator.steps import Batch
from tierfs.policy.model import Policy
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.beside import Beside, Chain
from tierfs.tiers.copy import digest_file
from tierfs.tiers.walk import Standing, walk
from tierfs.types import ROOT_INO, Attributes, Ino, Replica, ReplicaState

Path = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A replica file that the catalog does not name."""

    tier: str
    key: str
    status: os.stat_result
    record: Beside | None

    @property
    def ino(self) -> int:
        return int(self.key.partition("-")[0], 16)

    @property
    def serial(self) -> int:
        return int(self.key.partition("-")[2], 16)


@dataclass
class Adoption:
    catalog: MendableCatalog
    policy: Policy
    tiers: Tiers
    report: Report
    progress: Progress
    horizon: int
    """The catalog says what was true when this was the next sequence number; 0: it says nothing."""
    now: int
    undone: Batch | None = None
    """The last one in the archive's log, if the archive is not what it would leave: what stands at the names that it
    gives is what it says, or was changed since."""
    made: set[int] = field(default_factory=set)
    """Inodes of which nothing is recorded."""
    unplaced: set[int] = field(default_factory=set)
    """Inodes whose names come from records alone: an archive that has them under other names knows better."""
    restored: int = 0
    unverified: int = 0
    """Files on the archive of which nothing is recorded, because there is neither a copy of the catalog nor a log."""
    doubtful: set[int] = field(default_factory=set)
    """Inodes that were reported as taken as found."""

    def run(self) -> None:
        """Raises OSError, TierError, CatalogError."""
        found = self._local()
        self._memory(found)
        for item in sorted((f for f in found if f.record), key=lambda f: (f.record.seq if f.record else 0, f.serial)):
            assert item.record is not None
            with self.catalog.transaction():
                self._take(item, item.record)
        self.catalog.forget_paths()
        leftovers: dict[int, Found] = {}
        for item in (f for f in found if f.record is None and f.status.st_size):
            if item.ino not in leftovers or leftovers[item.ino].serial < item.serial:
                leftovers[item.ino] = item
        for item in leftovers.values():
            with self.catalog.transaction():
                self._take_unrecorded(item)
        self.catalog.forget_paths()
        self._archive()
        self.report.facts["files_from_tiers"] = self.restored
        self.report.facts["unverified"] = self.unverified

    def _shown(self, ino: int) -> bytes:
        return b"/".join(self.catalog.path_of(ino) or (b"inode %d" % ino,))

    # local tiers

    def _local(self) -> list[Found]:
        """Drops the rows of replicas that are not there; the replicas without a row."""
        found = []
        for name, store in self.tiers.stores.items():
            rows = {replica.key: replica for replica in self.catalog.replicas_on(name)}
            for key in list(store.keys()):
                row = rows.pop(key, None)
                try:
                    status = store.status(key)
                    record = store.record(key) if store.persistent else None
                except OSError:
                    continue  # not a plain file, or not where its name belongs
                if not stat.S_ISREG(status.st_mode):
                    continue
                item = Found(name, key, status, record)
                if record is not None and record.ino != item.ino:
                    item = Found(name, key, status, None)
                if row is None:
                    found.append(item)
                else:
                    self._look_again(row, item)
            if store.persistent:
                for replica in rows.values():
                    with self.catalog.transaction():
                        self.catalog.remove_replica(replica)
        with self.catalog.transaction():
            most = max((f.ino for f in found), default=1)
            seq = max((f.record.seq for f in found if f.record), default=0)
            self.catalog.skip_ids(most, max(seq, self.catalog.seq))
        return found

    def _memory(self, found: list[Found]) -> None:
        """Memory tiers that are empty were lost with the machine: what the mount does about that comes first, once the
        contents are known that became durable since the catalog was copied. Else a replica that is not there was let
        go by a daemon, because something newer or as good is elsewhere."""
        memory = [name for name, store in self.tiers.stores.items() if not store.persistent]
        for item in found:
            if item.record is None or self.catalog.attributes(item.ino) is None:
                continue
            if (item.record.size, item.record.file_mtime_ns) != (item.status.st_size, item.status.st_mtime_ns):
                continue
            if self.catalog.replica(item.ino, item.record.version, item.tier) is None:
                with self.catalog.transaction():
                    self._put(item, item.record.version)
        if not any(next(self.tiers.stores[name].keys(), None) for name in memory):
            if memory_is_lost(self.catalog, self.policy, self.tiers):
                take_back(self.catalog, self.policy, self.tiers, self.report)
                self.catalog.forget_paths()
            return
        for name in memory:
            present = set(self.tiers.stores[name].keys())
            for replica in self.catalog.replicas_on(name):
                if replica.key not in present:
                    with self.catalog.transaction():
                        self.catalog.remove_replica(replica)

    def _look_again(self, row: Replica, item: Found) -> None:
        """A replica that the catalog knows may have been written to, in place, after the catalog was copied."""
        changed = row.state is not ReplicaState.OPEN and item.status.st_size != row.size
        if not changed and item.record and item.record.file_mtime_ns != item.status.st_mtime_ns:
            changed = row.digest is not None and not self._digest_is(item, row.digest)
        version = row.version + 1
        if item.record is not None and item.record.version > row.version:
            version, changed = item.record.version, True
        if not changed:
            return
        attributes = self.catalog.attributes(row.ino)
        with self.catalog.transaction():
            self.catalog.remove_replica(row)
            self._put(item, version)
            if attributes is not None and version > attributes.version:
                self._set_current(attributes.ino, version, item)

    def _digest_is(self, item: Found, digest: bytes) -> bool:
        fd = self.tiers.stores[item.tier].open(item.key, write=False)
        try:
            return digest_file(fd, item.status.st_size) == digest
        except SourceChanged:
            return False
        finally:
            os.close(fd)

    def _put(self, item: Found, version: int) -> None:
        """The row of a replica: as its record says or, when there is none or it was written to since, as it is."""
        record = item.record
        status = item.status
        as_recorded = (
            record is not None
            and record.version == version
            and (record.size, record.file_mtime_ns) == (status.st_size, status.st_mtime_ns)
        )
        state = ReplicaState.DURABLE if as_recorded else ReplicaState.WRITTEN
        digest = record.digest if record is not None and as_recorded else None
        old = self.catalog.replica(item.ino, version, item.tier)
        if old is None or old.key == item.key or int(old.key.partition("-")[2], 16) < item.serial:
            self.catalog.put_replica(
                Replica(Ino(item.ino), version, item.tier, state, item.key, status.st_size, digest)
            )

    def _set_current(self, ino: int, version: int, item: Found) -> None:
        record = item.record
        mtime = record.mtime_ns if record is not None and record.version == version else item.status.st_mtime_ns
        self.catalog.set_version(ino, version, item.status.st_size, mtime, item.status.st_blocks)

    def _take(self, item: Found, record: Beside) -> None:
        """A replica with a record: its content and, where it is the newer statement, its names and attributes."""
        attributes = self.catalog.attributes(record.ino)
        newer = record.seq >= self.horizon
        if (attributes is None or not attributes.nlink) and not newer:
            return  # deleted before the catalog was copied: an orphan, unless the delete is held
        if attributes is not None and not stat.S_ISREG(attributes.mode):
            self._recover(item, b"inode", "its inode is something else")
            return
        if newer or attributes is None:
            version = attributes.version if attributes else 0
            self.catalog.put_inode(_inode(record, item, max(version, record.version)), None, record.xattrs)
            self._place(record)
            self.unplaced.add(record.ino)
            self.restored += attributes is None
        changed = (record.size, record.file_mtime_ns) != (item.status.st_size, item.status.st_mtime_ns)
        if changed and record.digest is not None and record.size == item.status.st_size:
            changed = not self._digest_is(item, record.digest)
        version = record.version + 1 if changed else record.version
        if not changed and (record.size, record.file_mtime_ns) != (item.status.st_size, item.status.st_mtime_ns):
            record = record.of_file(record.digest, record.size, item.status.st_mtime_ns)
            item = Found(item.tier, item.key, item.status, record)
        self._put(item, version)
        now = self.catalog.attributes(record.ino)
        if now is not None and version >= now.version:
            self._set_current(record.ino, version, item)

    # names

    def _place(self, record: Beside) -> None:
        """The names of a record, instead of those that the file has."""
        wanted = [place for chain in record.names if (place := self._parent(chain, record)) is not None]
        for parent, name in self.catalog.all_entries(record.ino):
            if (parent, name) not in wanted:
                self.catalog.take_entry(parent, name, self.now)
        for parent, name in wanted:
            there = self.catalog.lookup(parent, name)
            if there is not None and there.ino == record.ino:
                continue
            if there is not None and stat.S_ISDIR(there.mode):
                continue
            if there is not None:
                self._displace(parent, name, there)
            self.catalog.put_entry(parent, name, record.ino, self.now)
        if not self.catalog.all_entries(record.ino):
            hint = record.names[0][-1][1] if record.names else b"inode"
            path = self.catalog.put_recovered(record.ino, hint, self.now)
            self.report.did("its name was taken by a directory", path, "recovered")

    def _displace(self, parent: int, name: bytes, there: Attributes) -> None:
        """Another file has this name now; the one that had it may have been renamed since."""
        self.catalog.take_entry(parent, name, self.now)
        if stat.S_ISREG(there.mode) and self.catalog.replicas(there.ino) and not self.catalog.all_entries(there.ino):
            self.unplaced.add(there.ino)
            path = self.catalog.put_recovered(there.ino, name, self.now)
            self.report.did(f"another file has the name {name.decode(errors='replace')} now", path, "recovered")

    def _parent(self, chain: Chain, record: Beside) -> tuple[int, bytes] | None:
        """(directory, name) of a recorded name, with the directories on the way made or moved; None when something
        else is in the way."""
        parent: int = ROOT_INO
        for ino, name in chain[:-1]:
            there = self.catalog.lookup(parent, name)
            known = self.catalog.attributes(ino)
            if there is not None and stat.S_ISDIR(there.mode):
                parent = there.ino  # perhaps another one than then; what is in either stays together
                continue
            if there is not None or (known is not None and not stat.S_ISDIR(known.mode)):
                return None
            if known is None:
                self._make_directory(ino, record)
            elif self._is_above(ino, parent):
                return None
            else:
                for old in self.catalog.all_entries(ino):
                    self.catalog.take_entry(*old, self.now)
            self.catalog.put_entry(parent, name, ino, self.now)
            self.catalog.forget_paths()
            parent = ino
        return parent, chain[-1][1]

    def _is_above(self, ino: int, parent: int) -> bool:
        while parent != ROOT_INO:
            if parent == ino:
                return True
            above = self.catalog.names(parent, 1)
            if not above:
                return False
            parent = above[0][0]
        return False

    def _make_directory(self, ino: int, record: Beside) -> None:
        found = record.directories.get(ino)
        mode, uid, gid, mtime = (
            (found.mode, found.uid, found.gid, found.mtime_ns) if found else (stat.S_IFDIR | 0o755, 0, 0, self.now)
        )
        self.catalog.put_inode(Attributes(Ino(ino), mode, uid, gid, 2, 0, 0, mtime, mtime, mtime, 0), None, {})
        self.unplaced.add(ino)

    # bytes without a record

    def _take_unrecorded(self, item: Found) -> None:
        """What was written and not recorded as durable: the newest content of a file that is known, or a file without
        a name. Older than what is known of the file, it is an orphan."""
        attributes = self.catalog.attributes(item.ino)
        if attributes is None or not stat.S_ISREG(attributes.mode) or not self.catalog.all_entries(item.ino):
            self._recover(item, b"inode", "no tier knows its name")
            return
        serials = [int(r.key.partition("-")[2], 16) for r in self.catalog.replicas(item.ino) if r.key]
        if max(serials, default=0) > item.serial:
            return
        self._put(item, attributes.version + 1)
        self._set_current(item.ino, attributes.version + 1, item)
        self.report.did(f"newer bytes on {item.tier}, not durable there", self._shown(item.ino), "restored")

    def _recover(self, item: Found, hint: bytes, why: str) -> None:
        status = item.status
        ino, path = self.catalog.adopt_file(status.st_size, status.st_blocks, status.st_mtime_ns, hint)
        self.catalog.put_replica(Replica(ino, 1, item.tier, ReplicaState.WRITTEN, item.key, status.st_size, None))
        self.report.did(f"kept bytes on {item.tier}: {why}", path, "recovered")

    # the archive

    def _archive(self) -> None:
        """Everything that stands on the archive is in the catalog afterwards."""
        directories: dict[Path, int] = {(): ROOT_INO}
        links: dict[tuple[int, int], int] = {}
        by_content = self._by_content()
        for number, standing in enumerate(walk(self.tiers.tree)):
            if number % 256 == 0:
                self.progress(number, 0, "archive")
            parent = directories.get(standing.path[:-1])
            if parent is None:
                continue  # below what is no directory on the mount any more
            with self.catalog.transaction():
                ino = self._stands(parent, standing, links, by_content)
            if ino is not None and stat.S_ISDIR(standing.status.st_mode):
                directories[standing.path] = ino

    def _by_content(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for ino in self.unplaced:
            attributes = self.catalog.attributes(ino)
            if attributes is not None and attributes.size and stat.S_ISREG(attributes.mode):
                found.setdefault((attributes.size, attributes.mtime_ns), []).append(ino)
        return found

    def _stands(
        self,
        parent: int,
        standing: Standing,
        links: dict[tuple[int, int], int],
        by_content: dict[tuple[int, int], list[int]],
    ) -> int | None:
        """The inode of an object on the archive, known or new; None when the mount has something else there."""
        name, status = standing.path[-1], standing.status
        regular, linked = stat.S_ISREG(status.st_mode), not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1
        identity = (status.st_dev, status.st_ino)
        row = self.catalog.published(parent, name)
        known = self.catalog.lookup(parent, name)
        stood = abs(row.occupant) if row is not None else 0
        if stood and (occupant := self.catalog.attributes(stood)) is not None:
            if not regular or known is None or known.ino == stood or self._is_known(occupant, standing):
                if linked:
                    links.setdefault(identity, stood)
                if regular:
                    self._content(stood, standing)
                return stood
            for replica in self.catalog.replicas(stood):  # the archive went on, unlogged
                if replica.tier == self.tiers.tree.name:
                    self.catalog.remove_replica(replica)
        if known is not None and stat.S_IFMT(known.mode) != stat.S_IFMT(status.st_mode):
            return None
        if known is None:
            ino = links.get(identity) if linked else None
            if ino is None:
                ino = self._logged(parent, standing)
            if ino is None and regular:
                ino = self._renamed(standing, by_content)
            if ino is None:
                ino = self._new(standing)
            self.catalog.add_entry(parent, name, ino)
        else:
            ino = known.ino
            if ino in self.unplaced:
                self._refresh(known, standing)
        self.catalog.put_published(parent, name, ino, ino)
        if linked:
            links.setdefault(identity, ino)
        if regular:
            self._content(ino, standing)
        return ino

    def _refresh(self, known: Attributes, standing: Standing) -> None:
        """The archive has heard of changes of mode and attributes that came after the record; owners and large
        attributes it may have refused."""
        status = standing.status
        xattrs = {**dict(self.catalog.xattrs(known.ino)), **standing.xattrs}
        fresh = known._replace(mode=status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            fresh = fresh._replace(mtime_ns=status.st_mtime_ns)
        self.catalog.put_inode(fresh, standing.target, xattrs)

    def _is_known(self, attributes: Attributes, standing: Standing) -> bool:
        """Whether the archive's file is the content that the catalog has of this inode there."""
        return any(
            replica.tier == self.tiers.tree.name
            and replica.size == standing.status.st_size
            and self._unchanged(attributes, replica, standing)
            for replica in self.catalog.replicas(attributes.ino)
        )

    def _renamed(self, standing: Standing, by_content: dict[tuple[int, int], list[int]]) -> int | None:
        """A file that a local tier knows by the name that it had when it came there."""
        for ino in by_content.get((standing.status.st_size, standing.status.st_mtime_ns), ()):
            if ino in self.unplaced and not self.catalog.published_names(ino) and self._same(ino, standing) is not None:
                self.unplaced.discard(ino)
                known = self.catalog.attributes(ino)
                if known is not None:
                    self._refresh(known, standing)
                for parent, name in self.catalog.all_entries(ino):
                    self.catalog.take_entry(parent, name, self.now)
                return ino
        return None

    def _logged(self, parent: int, standing: Standing) -> int | None:
        """The inode to which the last batch gave this name."""
        row = self.undone.names.get((parent, standing.path[-1])) if self.undone is not None else None
        known = self.catalog.attributes(row.ino) if row is not None and row.occupant == row.ino else None
        if known is None or stat.S_IFMT(known.mode) != stat.S_IFMT(standing.status.st_mode):
            return None
        return None if stat.S_ISDIR(known.mode) and self.catalog.all_entries(known.ino) else known.ino

    def _new(self, standing: Standing) -> Ino:
        status = standing.status
        directory = stat.S_ISDIR(status.st_mode)
        made = self.catalog.add_inode(
            status.st_mode,
            status.st_uid,
            status.st_gid,
            self.now,
            nlink=2 if directory else 1,
            rdev=0 if directory or stat.S_ISREG(status.st_mode) else status.st_rdev,
            target=standing.target,
        )
        size = made.size if directory or standing.target is not None else status.st_size
        mtime = status.st_mtime_ns
        filled = made._replace(size=size, blocks=status.st_blocks, atime_ns=mtime, mtime_ns=mtime, ctime_ns=mtime)
        self.catalog.put_inode(filled, standing.target, standing.xattrs)
        self.restored += 1
        self.made.add(made.ino)
        return made.ino

    def _same(self, ino: int, standing: Standing) -> Replica | None:
        """The closed local replica of the inode that has the bytes of the archive's file."""
        for replica in self.catalog.replicas(ino):
            if replica.tier not in self.tiers.stores or replica.size != standing.status.st_size:
                continue
            try:
                digest = replica.digest or self._digest_of(replica)
                content = self.tiers.tree.content(standing.path)
                try:
                    if content.digest(replica.size) == digest:
                        return replica._replace(digest=digest)
                finally:
                    content.close()
            except (OSError, SourceChanged, TierError):
                continue
        return None

    def _digest_of(self, replica: Replica) -> bytes:
        fd = self.tiers.stores[replica.tier].open(replica.key, write=False)
        try:
            return digest_file(fd, replica.size)
        finally:
            os.close(fd)

    def _unchanged(self, attributes: Attributes, replica: Replica, standing: Standing) -> bool:
        """Whether what stands on the archive is what the catalog says; read only when its time leaves a doubt."""
        if standing.status.st_mtime_ns == attributes.mtime_ns or replica.digest is None:
            return True
        try:
            content = self.tiers.tree.content(standing.path)
            try:
                return content.digest(replica.size) == replica.digest
            finally:
                content.close()
        except (OSError, SourceChanged, TierError):
            return False

    def _content(self, ino: int, standing: Standing) -> None:
        """The archive's bytes of a file: as the catalog knows them, as a local replica has them, or as they are."""
        attributes = self.catalog.attributes(ino)
        if attributes is None or not stat.S_ISREG(attributes.mode):
            return
        archive, size = self.tiers.tree.name, standing.status.st_size
        other = None
        if self.undone is not None and (logged := self.undone.stored.pop(ino, None)) is not None:
            self.catalog.put_replica(logged)
        for replica in self.catalog.replicas(ino):
            if replica.tier == archive:
                if replica.size == size and self._unchanged(attributes, replica, standing):
                    if replica.digest is None and standing.status.st_mtime_ns != attributes.mtime_ns:
                        self._found(ino, "has another time on the archive than recorded, and no digest")
                    return
                self.catalog.remove_replica(replica)
                other = f"has {size} bytes on the archive, not {replica.size}"
                if replica.size == size:
                    other = "has another time and other bytes on the archive than recorded"
        stored = Replica(Ino(ino), attributes.version, archive, ReplicaState.DURABLE, "", size, None)
        local = [r for r in self.catalog.replicas(ino) if r.tier in self.tiers.stores]
        if not local:
            recorded = attributes.size, attributes.mtime_ns
            if other is None and recorded != (size, standing.status.st_mtime_ns):
                other = "has another size or time on the archive than recorded"
            if other is not None or not attributes.version:
                stored = stored._replace(version=attributes.version + 1)
            self.catalog.set_version(ino, stored.version, size, standing.status.st_mtime_ns, standing.status.st_blocks)
            self.catalog.put_replica(stored)
            if other is not None:
                self._found(ino, other)
            elif ino in self.made and (self.horizon or self.undone):
                self._found(ino, "is on the archive and nothing is recorded of it")
            elif ino in self.made:
                self.unverified += 1
            return
        same = self._same(ino, standing)
        if same is not None:
            self.catalog.put_replica(stored._replace(version=same.version, digest=same.digest))
        elif standing.status.st_mtime_ns > attributes.mtime_ns:
            newer = attributes.version + 1
            self.catalog.set_version(ino, newer, size, standing.status.st_mtime_ns, standing.status.st_blocks)
            self.catalog.put_replica(stored._replace(version=newer))
            self._found(ino, "is newer on the archive than on any other tier")

    def _found(self, ino: int, why: str) -> None:
        if ino not in self.doubtful:
            self.doubtful.add(ino)
            self.report.did(f"{why}: taken as found, not verified", self._shown(ino), "as found")


def _inode(record: Beside, item: Found, version: int) -> Attributes:
    return Attributes(
        Ino(record.ino),
        record.mode,
        record.uid,
        record.gid,
        max(1, len(record.names)),
        0,
        record.size,
        record.atime_ns,
        record.mtime_ns,
        record.ctime_ns,
        version,
        item.status.st_blocks,
    )
