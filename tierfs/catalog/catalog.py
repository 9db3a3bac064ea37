"""Typed access to the catalog. Every method is synchronous and stands between two awaits of the
daemon's event loop, so each is atomic there; changes belong into a `transaction`, which joins several.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tierfs.catalog.damage import Damaged
from tierfs.catalog.deadlines import Deadlines
from tierfs.catalog.held import HeldQueries
from tierfs.errors import FsError
from tierfs.types import ROOT_INO, Attributes, Ino, OpKind, Replica, ReplicaState

KEPT = 0
"""As the parent in `published`: the object is set aside in the archive's own directory, under its inode's number."""

DEEPEST = 1 << 14
"""Directories above a file; in a damaged catalog they may form a ring."""
PATHS = 1024
"""Paths of directories kept in memory."""

_ATTRIBUTES = "ino, mode, uid, gid, nlink, rdev, size, atime_ns, mtime_ns, ctime_ns, version, blocks"
_QUALIFIED = ", ".join(f"i.{column}" for column in _ATTRIBUTES.split(", "))
_CLOSED = (int(ReplicaState.WRITTEN), int(ReplicaState.DURABLE))
_REPLICA = "ino, version, tier, state, key, size, digest"


class Entry(NamedTuple):
    """One directory entry with what it names; ``cookie`` resumes a listing after it."""

    cookie: int
    name: bytes
    attributes: Attributes


class Operation(NamedTuple):
    """One row of the oplog; the schema says what each field means for each kind."""

    seq: int
    kind: OpKind
    ino: Ino
    parent: Ino
    name: bytes
    arg: int
    name2: bytes
    at_ns: int


class PublishedName(NamedTuple):
    parent: Ino
    name: bytes
    ino: Ino
    occupant: int


def _replica(row: tuple[int, int, str, int, str, int, bytes | None]) -> Replica:
    return Replica(Ino(row[0]), row[1], row[2], ReplicaState(row[3]), row[4], row[5], row[6])


class Catalog(Deadlines, HeldQueries, Damaged):
    """The queries, by what they are about. Reads see every transaction that has ended."""

    def __init__(self, path: Path, *, verify: bool = False) -> None:
        """CatalogError when the catalog is damaged, foreign or cannot be written; see `Database`."""
        super().__init__(path, verify=verify)
        self._paths: dict[int, tuple[bytes, ...]] = {}

    def check(self) -> list[str]:
        """SQLite's own integrity check; an empty list when it finds nothing."""
        return [row[0] for row in self._run("PRAGMA integrity_check") if row[0] != "ok"]

    def inconsistencies(self) -> list[tuple[str, int]]:
        """(what, inode) for rows that contradict each other."""
        actual = "SELECT tier, state, SUM(size) FROM replicas GROUP BY tier, state HAVING SUM(size) <> 0"
        kept = "SELECT tier, state, bytes FROM sums WHERE bytes <> 0"
        checks = (
            ("a name without an inode", "SELECT ino FROM dentries WHERE ino NOT IN (SELECT ino FROM inodes)"),
            (
                "a directory entry below something else than a directory",
                "SELECT d.ino FROM dentries d LEFT JOIN inodes p ON p.ino=d.parent"
                " WHERE p.ino IS NULL OR (p.mode & 61440) <> 16384",
            ),
            (
                "wrong link count of a file",
                "SELECT i.ino FROM inodes i WHERE (i.mode & 61440) <> 16384"
                " AND i.nlink <> (SELECT COUNT(*) FROM dentries d WHERE d.ino=i.ino)",
            ),
            (
                "wrong link count of a directory",
                "SELECT i.ino FROM inodes i WHERE (i.mode & 61440) = 16384 AND i.nlink > 0 AND i.nlink <> 2 +"
                " (SELECT COUNT(*) FROM dentries d JOIN inodes c ON c.ino=d.ino"
                " WHERE d.parent=i.ino AND (c.mode & 61440) = 16384)",
            ),
            (
                "an inode that no path leads to",
                "WITH RECURSIVE below(ino) AS (VALUES(1) UNION SELECT d.ino FROM dentries d JOIN below b"
                " ON d.parent=b.ino) SELECT i.ino FROM inodes i WHERE i.nlink>0 AND i.ino NOT IN below",
            ),
            (  # what the archive has of a deleted file stays until the delete has its turn there
                "a replica without an inode",
                "SELECT ino FROM replicas WHERE ino NOT IN (SELECT ino FROM inodes)"
                " AND NOT (key = '' AND ino IN (SELECT ino FROM published))",
            ),
            (
                "no replica of the current version",
                "SELECT i.ino FROM inodes i WHERE (i.mode & 61440) = 32768 AND i.nlink > 0 AND NOT EXISTS"
                " (SELECT 1 FROM replicas r WHERE r.ino=i.ino AND r.version=i.version)",
            ),
            (
                "sums of a tier that are not those of its replicas",
                f"SELECT 1 FROM ({actual} EXCEPT {kept}) UNION ALL SELECT 1 FROM ({kept} EXCEPT {actual})",
            ),
        )
        return [(what, row[0]) for what, query in checks for row in self._run(query)]

    def all_published(self) -> list[PublishedName]:
        return [PublishedName(*row) for row in self._run("SELECT parent, name, ino, occupant FROM published")]

    # inodes and names

    def attributes(self, ino: int) -> Attributes | None:
        row = self._run(f"SELECT {_ATTRIBUTES} FROM inodes WHERE ino=?", (ino,)).fetchone()
        return Attributes._make(row) if row else None

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        row = self._run(
            f"SELECT {_QUALIFIED} FROM dentries d JOIN inodes i ON i.ino=d.ino WHERE d.parent=? AND d.name=?",
            (parent, name),
        ).fetchone()
        return Attributes._make(row) if row else None

    def entries(self, parent: int, after: int, limit: int) -> list[Entry]:
        """Up to ``limit`` entries whose cookie is above ``after``, in the order they were made."""
        rows = self._run(
            f"SELECT d.cookie, d.name, {_QUALIFIED} FROM dentries d JOIN inodes i ON i.ino=d.ino"
            " WHERE d.parent=? AND d.cookie>? ORDER BY d.cookie LIMIT ?",
            (parent, after, limit),
        )
        return [Entry(row[0], row[1], Attributes(*row[2:])) for row in rows]

    def has_entries(self, parent: int) -> bool:
        return self._run("SELECT 1 FROM dentries WHERE parent=? LIMIT 1", (parent,)).fetchone() is not None

    def target(self, ino: int) -> bytes | None:
        row = self._run("SELECT target FROM inodes WHERE ino=?", (ino,)).fetchone()
        return row[0] if row else None

    def path_of(self, ino: int) -> tuple[bytes, ...] | None:
        """Names from the root to ``ino`` (one of them, if it has several); None when unlinked."""
        names: list[bytes] = []
        while ino != ROOT_INO:
            row = self._run("SELECT parent, name FROM dentries WHERE ino=? LIMIT 1", (ino,)).fetchone()
            if row is None:
                return None
            ino, name = row
            names.append(name)
            if len(names) > DEEPEST:
                return None
        return tuple(reversed(names))

    def names(self, ino: int, limit: int) -> list[tuple[int, bytes]]:
        """(parent, name) of up to ``limit`` names of ``ino``."""
        return self._run("SELECT parent, name FROM dentries WHERE ino=? LIMIT ?", (ino, limit)).fetchall()

    def directory_path(self, ino: int) -> tuple[bytes, ...] | None:
        """As `path_of`, of a directory and remembered until `forget_paths`."""
        path = self._paths.get(ino)
        if path is None:
            path = self.path_of(ino)
            if path is not None:
                if len(self._paths) >= PATHS:
                    self._paths.clear()
                self._paths[ino] = path
        return path

    def forget_paths(self) -> None:
        """A directory was moved."""
        self._paths.clear()

    def resolve(self, path: tuple[bytes, ...]) -> Attributes | None:
        """The inode at ``path``, symlinks not followed."""
        found = self.attributes(ROOT_INO)
        for name in path:
            if found is None:
                return None
            found = self.lookup(found.ino, name)
        return found

    def subtree(self, ino: int) -> Iterator[Attributes]:
        """Every regular file at or below ``ino``."""
        top = self.attributes(ino)
        if top is None:
            return
        if top.mode & 0o170000 == 0o100000:
            yield top
            return
        rows = self._run(
            "WITH RECURSIVE below(ino) AS (VALUES(?) UNION SELECT d.ino FROM dentries d JOIN below b ON d.parent=b.ino)"
            f" SELECT {_QUALIFIED} FROM below b JOIN inodes i ON i.ino=b.ino WHERE i.mode & 61440 = 32768",
            (ino,),
        ).fetchall()
        for row in rows:
            yield Attributes(*row)

    def files_after(self, ino: int, limit: int) -> list[Attributes]:
        """Up to ``limit`` regular files that have a name, above inode ``ino``, in order."""
        rows = self._run(
            f"SELECT {_ATTRIBUTES} FROM inodes WHERE ino>? AND nlink>0 AND mode & 61440 = 32768 ORDER BY ino LIMIT ?",
            (ino, limit),
        )
        return [Attributes(*row) for row in rows]

    @property
    def drains(self) -> str | None:
        """What `remember_drains` was last told."""
        found: str | None = self._meta("drains")
        return found

    def remember_drains(self, drains: str) -> None:
        """The rules and tiers, as text, that the queued copies of all files follow now."""
        self._write("INSERT OR REPLACE INTO meta VALUES ('drains', ?)", (drains,))

    def add_inode(
        self, mode: int, uid: int, gid: int, now: int, *, nlink: int = 1, rdev: int = 0, target: bytes | None = None
    ) -> Attributes:
        version = 1 if mode & 0o170000 == 0o100000 else 0
        size = len(target) if target is not None else 0
        ino = self.new_ino()
        self._write(
            "INSERT INTO inodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (ino, mode, uid, gid, nlink, rdev, size, now, now, now, version, target),
        )
        return Attributes(Ino(ino), mode, uid, gid, nlink, rdev, size, now, now, now, version)

    def add_entry(self, parent: int, name: bytes, ino: int) -> None:
        """FsError EEXIST when the name is taken."""
        try:
            self._write("INSERT INTO dentries VALUES (?, ?, ?, ?)", (parent, name, ino, self.new_seq()))
        except sqlite3.IntegrityError:
            raise FsError(errno.EEXIST) from None

    def remove_entry(self, parent: int, name: bytes) -> None:
        self._write("DELETE FROM dentries WHERE parent=? AND name=?", (parent, name))

    def set_entry(self, parent: int, name: bytes, ino: int) -> None:
        """Let an existing name point at another inode."""
        self._write("UPDATE dentries SET ino=? WHERE parent=? AND name=?", (ino, parent, name))

    def add_links(self, ino: int, change: int, now: int) -> None:
        self._write("UPDATE inodes SET nlink=nlink+?, ctime_ns=? WHERE ino=?", (change, now, ino))

    def set_links(self, ino: int, nlink: int, now: int) -> None:
        self._write("UPDATE inodes SET nlink=?, ctime_ns=? WHERE ino=?", (nlink, now, ino))

    def touch_directory(self, ino: int, now: int, links: int = 0) -> None:
        self._write("UPDATE inodes SET mtime_ns=?, ctime_ns=?, nlink=nlink+? WHERE ino=?", (now, now, links, ino))

    def set_attributes(self, new: Attributes) -> None:
        """Write mode, owner, size and times of ``new`` (links and version have their own methods)."""
        self._write(
            "UPDATE inodes SET mode=?, uid=?, gid=?, size=?, atime_ns=?, mtime_ns=?, ctime_ns=?, blocks=? WHERE ino=?",
            (
                new.mode,
                new.uid,
                new.gid,
                new.size,
                new.atime_ns,
                new.mtime_ns,
                new.ctime_ns,
                new.blocks,
                new.ino,
            ),
        )

    def close_content(self, ino: int, size: int, blocks: int, mtime_ns: int) -> bool:
        """A version of the file is complete: its size in bytes, 512-byte blocks and mtime. False when the file has no
        name any more."""
        sql = "UPDATE inodes SET size=?, blocks=?, mtime_ns=?, ctime_ns=MAX(ctime_ns, ?) WHERE ino=? AND nlink>0"
        return self._write(sql, (size, blocks, mtime_ns, mtime_ns, ino)).rowcount > 0

    def orphans(self) -> list[int]:
        """Inodes without a name that the kernel may still know."""
        sql = (
            "SELECT ino FROM inodes WHERE nlink=0 AND NOT EXISTS"
            " (SELECT 1 FROM held WHERE held.ino=inodes.ino AND forgotten=1)"
        )
        return [row[0] for row in self._run(sql)]

    def drop_inodes(self, inos: list[int]) -> None:
        for ino in inos:
            self._write("DELETE FROM xattrs WHERE ino=?", (ino,))
            if self._run("SELECT 1 FROM chunks WHERE ino=?", (ino,)).fetchone():
                self._write("DELETE FROM chunks WHERE ino=?", (ino,))
            self.drop_deadline(ino)
            self.drop_versions(ino, every=True)
            self._write("DELETE FROM inodes WHERE ino=? AND nlink=0", (ino,))

    # xattrs

    def xattr(self, ino: int, name: bytes) -> bytes | None:
        row = self._run("SELECT value FROM xattrs WHERE ino=? AND name=?", (ino, name)).fetchone()
        return row[0] if row else None

    def xattrs(self, ino: int) -> list[tuple[bytes, bytes]]:
        return self._run("SELECT name, value FROM xattrs WHERE ino=?", (ino,)).fetchall()

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        self._write("INSERT OR REPLACE INTO xattrs VALUES (?, ?, ?)", (ino, name, value))

    def remove_xattr(self, ino: int, name: bytes) -> bool:
        return self._write("DELETE FROM xattrs WHERE ino=? AND name=?", (ino, name)).rowcount > 0

    # replicas

    def replicas(self, ino: int) -> list[Replica]:
        return [_replica(row) for row in self._run(f"SELECT {_REPLICA} FROM replicas WHERE ino=?", (ino,))]

    def replica(self, ino: int, version: int, tier: str) -> Replica | None:
        row = self._run(
            f"SELECT {_REPLICA} FROM replicas WHERE ino=? AND version=? AND tier=?", (ino, version, tier)
        ).fetchone()
        return _replica(row) if row else None

    def all_replicas(self) -> Iterator[Replica]:
        for row in self._run(f"SELECT {_REPLICA} FROM replicas"):
            yield _replica(row)

    def replicas_on(self, tier: str) -> list[Replica]:
        """The replicas of one tier."""
        return [_replica(row) for row in self._run(f"SELECT {_REPLICA} FROM replicas WHERE tier=?", (tier,))]

    def known_tiers(self, archive: str) -> set[str]:
        """Tiers that hold something according to the catalog; ``archive`` is the name of the one with the names."""
        tiers = {row[0] for row in self._run("SELECT DISTINCT tier FROM replicas")}
        return tiers | {archive for _ in self._run("SELECT 1 FROM published LIMIT 1")}

    def open_replicas(self) -> list[Replica]:
        """Reads all rows, which for a million takes a third of a second: an index would cost every create and close."""
        rows = self._run(f"SELECT {_REPLICA} FROM replicas WHERE state=?", (int(ReplicaState.OPEN),))
        return [_replica(row) for row in rows]

    def evictable(self, tier: str, below: list[str], limit: int) -> list[Replica]:
        """Closed replicas on ``tier`` whose version is durable on one of the tiers ``below``."""
        marks = ",".join("?" * len(below))
        rows = self._run(
            f"SELECT {_REPLICA} FROM replicas r WHERE tier=? AND state IN (?, ?) AND EXISTS (SELECT 1 FROM replicas d"
            f" WHERE d.ino=r.ino AND d.version=r.version AND d.state=? AND d.tier IN ({marks})) LIMIT ?",
            (tier, *_CLOSED, int(ReplicaState.DURABLE), *below, limit),
        )
        return [_replica(row) for row in rows]

    def put_replica(self, replica: Replica) -> None:
        self._write(
            "INSERT INTO replicas VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET state=excluded.state, key=excluded.key, size=excluded.size, digest=excluded.digest",
            (
                replica.ino,
                replica.version,
                replica.tier,
                int(replica.state),
                replica.key,
                replica.size,
                replica.digest,
            ),
        )

    def remove_replica(self, replica: Replica) -> None:
        self._write(
            "DELETE FROM replicas WHERE ino=? AND version=? AND tier=?", (replica.ino, replica.version, replica.tier)
        )

    def put_chunks(self, ino: int, version: int, digests: bytes) -> None:
        """The digests of the chunks of a version, instead of those of an older one."""
        self._write("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", (ino, version, digests))

    def chunks(self, ino: int, version: int) -> bytes | None:
        row = self._run("SELECT digests FROM chunks WHERE ino=? AND version=?", (ino, version)).fetchone()
        return row[0] if row else None

    def drop_tier(self, tier: str) -> None:
        """Everything on ``tier`` is about to go, and is durable elsewhere. A transaction of its own."""
        with self.transaction():
            self._write("DELETE FROM replicas WHERE tier=?", (tier,))

    def begin_version(self, ino: int, version: int, lasting: Sequence[str]) -> None:
        """``version`` becomes the current one; copies of older ones that were queued are moot. Of each queue the first
        close stays of which none of ``lasting``, the persistent tiers from the fastest on, has anything there or below:
        deletes wait for it until this version, or a later one, makes up for it."""
        self.keep_version(ino)
        self._write("UPDATE inodes SET version=? WHERE ino=?", (version, ino))
        queued = self._run("SELECT seq, version, tier FROM drains WHERE ino=? ORDER BY seq", (ino,)).fetchall()
        if not queued:
            return
        durable = [r for r in self.replicas(ino) if r.state is ReplicaState.DURABLE]
        waits: set[str] = set()
        for seq, former, tier in queued:
            enough = lasting[lasting.index(tier) :] if tier in lasting else ()
            if tier in waits or any(r.version >= former and r.tier in enough for r in durable):
                self._write("DELETE FROM drains WHERE seq=?", (seq,))
            else:
                waits.add(tier)

    def end_content(self, ino: int) -> None:
        """The file is gone: no version is current, and no copy wanted."""
        self._write("UPDATE inodes SET version=0 WHERE ino=?", (ino,))
        self._write("DELETE FROM drains WHERE ino=?", (ino,))

    def tier_sums(self, tier: str) -> dict[int, int]:
        """Bytes on a tier by replica state."""
        return dict(self._run("SELECT state, bytes FROM sums WHERE tier=?", (tier,)).fetchall())

    def tier_bytes(self, tier: str) -> int:
        """Bytes of a tier's replicas, as of their last close."""
        return int(self._run("SELECT COALESCE(SUM(bytes), 0) FROM sums WHERE tier=?", (tier,)).fetchone()[0])

    def clean_bytes(self, tier: str, persistent: list[str]) -> int:
        """Bytes of ``tier``'s closed replicas whose version one of the ``persistent`` tiers holds durably."""
        durable = self.tier_sums(tier).get(ReplicaState.DURABLE, 0) if tier in persistent else 0
        states = (int(ReplicaState.WRITTEN),) if tier in persistent else _CLOSED
        marks, tiers = ",".join("?" * len(states)), ",".join("?" * len(persistent))
        row = self._run(
            f"SELECT COALESCE(SUM(size), 0) FROM replicas r WHERE tier=? AND state IN ({marks}) AND EXISTS (SELECT 1"
            f" FROM replicas d WHERE d.ino=r.ino AND d.version=r.version AND d.state=? AND d.tier IN ({tiers}))",
            (tier, *states, int(ReplicaState.DURABLE), *persistent),
        ).fetchone()
        return durable + int(row[0])

    def unsynced_bytes(self, tiers: list[str]) -> int:
        """Bytes of closed current versions that are on one of ``tiers`` and durable nowhere: of memory tiers what a
        reboot takes, also of files that the policy keeps there; of disks what is not synced yet."""
        marks = ",".join("?" * len(tiers))
        row = self._run(
            "SELECT COALESCE(SUM(i.size), 0) FROM replicas r JOIN inodes i ON i.ino=r.ino AND i.version=r.version"
            f" WHERE r.tier IN ({marks}) AND r.state=? AND i.nlink>0 AND NOT EXISTS (SELECT 1 FROM replicas d"
            " WHERE d.ino=r.ino AND d.version=r.version AND d.state=?)",
            (*tiers, int(ReplicaState.WRITTEN), int(ReplicaState.DURABLE)),
        ).fetchone()
        return int(row[0])

    # queues

    def queue_drain(self, ino: int, version: int, tier: str) -> None:
        self._write("INSERT INTO drains VALUES (?, ?, ?, ?)", (self.new_seq(), ino, version, tier))

    def wanted_drains(self, limit: int) -> list[tuple[int, int, str, int, int]]:
        """(ino, version, tier, size, ctime in ns) of queued copies still wanted, oldest close first."""
        return self._run(
            "SELECT d.ino, d.version, d.tier, i.size, i.ctime_ns FROM drains d"
            " JOIN inodes i ON i.ino=d.ino AND i.version=d.version AND i.nlink>0 ORDER BY d.seq LIMIT ?",
            (limit,),
        ).fetchall()

    def wanted_drains_of(self, ino: int) -> list[tuple[int, int, str, int, int]]:
        """As `wanted_drains`, of one file."""
        return self._run(
            "SELECT d.ino, d.version, d.tier, i.size, i.ctime_ns FROM drains d"
            " JOIN inodes i ON i.ino=d.ino AND i.version=d.version AND i.nlink>0 WHERE d.ino=? ORDER BY d.seq",
            (ino,),
        ).fetchall()

    def wanted_contents(self, limit: int) -> list[tuple[int, int, int, int, int]]:
        """(ino, version, size, closed in ns, place in the oplog) that the archive still wants, oldest close first."""
        return self._run(
            "SELECT o.ino, o.arg, i.size, o.at_ns, o.seq FROM oplog o"
            " JOIN inodes i ON i.ino=o.ino AND i.version=o.arg AND i.nlink>0 WHERE o.kind=5 ORDER BY o.seq LIMIT ?",
            (limit,),
        ).fetchall()

    def queued(self, ino: int, version: int, archive: str) -> set[str]:
        """Tiers to which a copy of this version is queued; ``archive`` names the one whose queue is the oplog."""
        tiers = {row[0] for row in self._run("SELECT tier FROM drains WHERE ino=? AND version=?", (ino, version))}
        if self._run("SELECT 1 FROM oplog WHERE kind=5 AND ino=? AND arg=?", (ino, version)).fetchone():
            tiers.add(archive)
        return tiers

    def unqueue_drain(self, ino: int, version: int, tier: str) -> None:
        """``tier`` has this version: whoever waits for it or for an older one waits no more."""
        self._write("DELETE FROM drains WHERE ino=? AND version<=? AND tier=?", (ino, version, tier))

    def drop_overtaken(self, ino: int, keep: Sequence[str] = ()) -> None:
        """Nothing makes up any more for closes of older versions that are queued to other tiers than ``keep``."""
        self._write(
            f"DELETE FROM drains WHERE ino=? AND tier NOT IN ({','.join('?' * len(keep))})"
            " AND version < (SELECT version FROM inodes WHERE ino=drains.ino)",
            (ino, *keep),
        )

    def log(
        self, kind: OpKind, ino: int, now: int, *, parent: int = 0, name: bytes = b"", arg: int = 0, name2: bytes = b""
    ) -> int:
        """Append to the oplog, which the archive follows in this order: the place in it."""
        seq = self.new_seq()
        self._write(
            "INSERT INTO oplog VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (seq, int(kind), ino, parent, name, arg, name2, now)
        )
        return seq

    def operations(self, limit: int) -> list[Operation]:
        rows = self._run(
            "SELECT seq, kind, ino, parent, name, arg, name2, at_ns FROM oplog ORDER BY seq LIMIT ?", (limit,)
        )
        return [
            Operation(row[0], OpKind(row[1]), Ino(row[2]), Ino(row[3]), row[4], row[5], row[6] or b"", row[7])
            for row in rows
        ]

    def operations_after(self, seq: int) -> list[Operation]:
        rows = self._run(
            "SELECT seq, kind, ino, parent, name, arg, name2, at_ns FROM oplog WHERE seq>? ORDER BY seq", (seq,)
        )
        return [
            Operation(row[0], OpKind(row[1]), Ino(row[2]), Ino(row[3]), row[4], row[5], row[6] or b"", row[7])
            for row in rows
        ]

    def first_operation(self) -> int:
        """Sequence number of the oldest operation, 0 when the oplog is empty."""
        row = self._run("SELECT MIN(seq) FROM oplog").fetchone()
        return row[0] or 0

    def drop_operations(self, through: int, single: Sequence[int] = ()) -> None:
        """The archive has followed up to ``through`` (0: no further than before), and each of ``single``."""
        for seq in single:
            self._write("DELETE FROM oplog WHERE seq=?", (seq,))
        if not through:
            return
        self._write("DELETE FROM oplog WHERE seq<=?", (through,))
        self._write("INSERT OR REPLACE INTO meta VALUES ('archived', ?)", (through,))

    @property
    def archived(self) -> int:
        """The last operation that the archive has followed; 0: none."""
        return self._meta("archived") or 0

    def last_operation(self) -> int:
        """Sequence number of the newest operation, 0 when the oplog is empty."""
        row = self._run("SELECT MAX(seq) FROM oplog").fetchone()
        return row[0] or 0

    def put_intent(self, steps: str) -> None:
        """A batch of the archive is about to be carried out, for certain: nothing else happens there before it is."""
        self._write("INSERT OR REPLACE INTO intents VALUES (1, ?)", (steps,))

    def intent(self) -> str | None:
        """The batch of the archive that was begun and is not recorded as done."""
        row = self._run("SELECT steps FROM intents").fetchone()
        return row[0] if row else None

    def drop_intent(self) -> None:
        self._write("DELETE FROM intents")

    # the archive's namespace

    def published(self, parent: int, name: bytes) -> PublishedName | None:
        row = self._run(
            "SELECT parent, name, ino, occupant FROM published WHERE parent=? AND name=?", (parent, name)
        ).fetchone()
        return PublishedName(*row) if row else None

    def published_names(self, ino: int) -> list[PublishedName]:
        rows = self._run("SELECT parent, name, ino, occupant FROM published WHERE ino=?", (ino,))
        return [PublishedName(*row) for row in rows]

    def odd_published(self) -> list[PublishedName]:
        """Names at which something else stands than the content of their file."""
        rows = self._run(
            "SELECT parent, name, ino, occupant FROM published WHERE occupant<>ino AND occupant<>0 AND parent<>?",
            (KEPT,),
        )
        return [PublishedName(*row) for row in rows]

    def put_published(self, parent: int, name: bytes, ino: int, occupant: int) -> None:
        self._write("INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?)", (parent, name, ino, occupant))

    def remove_published(self, parent: int, name: bytes) -> None:
        self._write("DELETE FROM published WHERE parent=? AND name=?", (parent, name))

    def published_path(self, parent: int, name: bytes) -> tuple[bytes, ...] | None:
        """Names from the archive's root; None when a directory above is not published."""
        names = [name]
        while parent != ROOT_INO:
            if parent == KEPT:
                return b".tierfs", b"kept", name
            row = self._run("SELECT parent, name FROM published WHERE ino=? LIMIT 1", (parent,)).fetchone()
            if row is None:
                return None
            parent, above = row
            names.append(above)
            if len(names) > DEEPEST:
                return None
        return tuple(reversed(names))
