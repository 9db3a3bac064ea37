"""What the catalog keeps although nothing on the mount shows it: files without a name whose delete may have to be
undone, and versions that were replaced. The schema says what the tables hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tierfs.catalog.database import Database
from tierfs.types import ReplicaState

_DURABLE = int(ReplicaState.DURABLE)
_HELD = "seq, ino, version, since, parent, name, forgotten"
_VERSION = "ino, version, size, blocks, mtime_ns, mode, uid, gid"


class Held(NamedTuple):
    """One row of ``held``."""

    seq: int
    ino: int
    version: int
    since: int
    parent: int
    name: bytes
    forgotten: int


class KeptVersion(NamedTuple):
    """What a file was like when this version of it was replaced."""

    ino: int
    version: int
    size: int
    blocks: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


class HeldQueries(Database):
    """Part of `Catalog`."""

    # held

    def hold_name(self, seq: int, ino: int, since: int, parent: int, name: bytes) -> None:
        """The operation ``seq`` took this name from ``ino``; ``since``: see the schema."""
        self._write("INSERT INTO held VALUES (?, ?, 0, ?, ?, ?, 0)", (seq, ino, since, parent, name))

    def hold_version(self, seq: int, ino: int, version: int) -> None:
        """The close ``seq`` replaced this version, whose bytes stay."""
        self._write("INSERT OR REPLACE INTO held VALUES (?, ?, ?, 0, 0, x'', 0)", (seq, ino, version))

    def forget_held(self, ino: int) -> bool:
        """The kernel does not know this inode without a name any more: whether a delete of it is held, so that it
        stays nevertheless."""
        return self._write("UPDATE held SET forgotten=1 WHERE ino=? AND version=0", (ino,)).rowcount > 0

    def holds(self, ino: int) -> bool:
        """Whether a name that the inode lost may have to come back."""
        return self._run("SELECT 1 FROM held WHERE ino=? AND version=0", (ino,)).fetchone() is not None

    def held(self, after: int, before: int, limit: int) -> list[Held]:
        """Rows with ``after`` < seq < ``before``, in order."""
        rows = self._run(
            f"SELECT {_HELD} FROM held WHERE seq>? AND seq<? ORDER BY seq LIMIT ?",
            (after, before, limit),
        )
        return [Held(*row) for row in rows]

    def held_versions(self, ino: int) -> list[Held]:
        """Replaced versions of a file that are held."""
        rows = self._run(f"SELECT {_HELD} FROM held WHERE ino=? AND version>0", (ino,))
        return [Held(*row) for row in rows]

    def drop_held(self, seq: int) -> None:
        self._write("DELETE FROM held WHERE seq=?", (seq,))

    def holds_anything(self) -> bool:
        found = "SELECT 1 WHERE EXISTS (SELECT 1 FROM held) OR EXISTS (SELECT 1 FROM vouched)"
        return self._run(found).fetchone() is not None

    def last_held(self) -> int:
        """The newest delete that is held; 0 when none is."""
        return self._run("SELECT MAX(seq) FROM held").fetchone()[0] or 0

    def held_sums(self, tiers: Sequence[str]) -> tuple[int, int]:
        """(files, bytes) on ``tiers`` that are there only because a delete or a replacement is held."""
        row = self._run(
            "SELECT COUNT(DISTINCT ino || '-' || version), COALESCE(SUM(size), 0) FROM"
            " (SELECT DISTINCT r.ino, r.version, r.tier, r.size FROM held h"
            " JOIN replicas r ON r.ino=h.ino LEFT JOIN inodes i ON i.ino=h.ino"
            f" WHERE r.state=? AND r.tier IN ({_marks(tiers)})"
            " AND ((h.version=0 AND i.nlink=0) OR r.version=h.version))",
            (_DURABLE, *tiers),
        ).fetchone()
        return int(row[0]), int(row[1])

    # closes that are not durable yet

    def queued_since(self, ino: int, version: int) -> int:
        """The first close that this version makes up for, or its own, while a copy is queued to a local tier; of
        versions after the last that is durable anywhere. 0 when there is none."""
        row = self._run(
            "SELECT MIN(seq) FROM drains WHERE ino=?1 AND version<=?2 AND version>"
            " COALESCE((SELECT MAX(version) FROM replicas WHERE ino=?1 AND state=?3), 0)",
            (ino, version, _DURABLE),
        ).fetchone()
        return row[0] or 0

    def queued_at(self, ino: int, version: int, tier: str) -> int:
        """The place in the queue of the copy of this version to a local tier; 0 when it is not queued."""
        row = self._run("SELECT seq FROM drains WHERE ino=? AND version=? AND tier=?", (ino, version, tier)).fetchone()
        return row[0] if row else 0

    def first_waiting(self, after: int, queues: Sequence[str], durable: Sequence[str]) -> int | None:
        """The first close at or after ``after``, of a file with a name, that is queued to one of ``queues`` and that
        none of ``durable`` holds durably, nor a later version."""
        row = self._run(
            f"SELECT d.seq FROM drains d JOIN inodes i ON i.ino=d.ino AND i.version>=d.version AND i.nlink>0"
            f" WHERE d.seq>=? AND d.tier IN ({_marks(queues)}) AND NOT EXISTS"
            f" (SELECT 1 FROM replicas r"
            f" WHERE r.ino=d.ino AND r.version>=d.version AND r.state=?"
            f" AND r.tier IN ({_marks(durable)})) ORDER BY d.seq LIMIT 1",
            (after, *queues, _DURABLE, *durable),
        ).fetchone()
        return row[0] if row else None

    def waiting(self, before: int, limit: int) -> list[tuple[int, int]]:
        """(ino, version) of what has to become durable for closes before ``before`` that are queued to a local tier."""
        return self._run(
            "SELECT DISTINCT d.ino, i.version FROM drains d JOIN inodes i ON i.ino=d.ino AND i.version>=d.version"
            " AND i.nlink>0 WHERE d.seq<? ORDER BY d.seq LIMIT ?",
            (before, limit),
        ).fetchall()

    def deleted_before_durable(self, after: int) -> list[tuple[int, int]]:
        """(close, delete) of files that were not durable when they went, of deletes after ``after``."""
        return self._run("SELECT since, seq FROM held WHERE seq>? AND since>0", (after,)).fetchall()

    def holds_between(self, after: int, before: int, tier: str) -> bool:
        """Whether an operation between these two took a name from something that is on ``tier``."""
        sql = (
            "SELECT 1 FROM held h JOIN replicas r ON r.ino=h.ino AND r.tier=?"
            " WHERE h.seq>? AND h.seq<? AND h.version=0 LIMIT 1"
        )
        return self._run(sql, (tier, after, before)).fetchone() is not None

    def wanted_content_seqs(self) -> Iterable[tuple[int, int, int]]:
        """(seq, ino, version) of contents that the archive still wants, oldest close first."""
        return self._run(
            "SELECT o.seq, o.ino, o.arg FROM oplog o JOIN inodes i ON i.ino=o.ino AND i.version=o.arg AND i.nlink>0"
            " WHERE o.kind=5 ORDER BY o.seq"
        )

    def deleted_before_durable_on(self, tiers: Sequence[str]) -> list[tuple[int, int]]:
        """(close, delete) of files that went before one of ``tiers`` had them, as far as the oplog tells."""
        return self._run(
            "SELECT o.seq, MAX(h.seq) FROM oplog o JOIN held h ON h.ino=o.ino AND h.version=0"
            " LEFT JOIN inodes i ON i.ino=o.ino WHERE o.kind=5 AND COALESCE(i.nlink, 0)=0 AND NOT EXISTS"
            " (SELECT 1 FROM replicas r WHERE r.ino=o.ino AND r.version>=o.arg AND r.state=?"
            f" AND r.tier IN ({_marks(tiers)})) GROUP BY o.seq HAVING MAX(h.seq)>o.seq",
            (_DURABLE, *tiers),
        ).fetchall()

    def overtaken_contents(self) -> list[tuple[int, int, int, int]]:
        """(ino, version, its close, close of the current version) of files that the archive wants, and wanted with an
        older version."""
        return self._run(
            "SELECT o.ino, o.arg, o.seq, n.seq FROM oplog o"
            " JOIN inodes i ON i.ino=o.ino AND i.version>o.arg AND i.nlink>0"
            " JOIN oplog n ON n.kind=5 AND n.ino=o.ino AND n.arg=i.version WHERE o.kind=5 AND n.seq>o.seq"
        ).fetchall()

    def waiting_closes(self, durable: Sequence[str]) -> Iterable[tuple[int, int, int]]:
        """(seq, ino, version) of closes of files with a name, queued to a local tier, that none of ``durable`` holds,
        nor a later version, oldest first."""
        return self._run(
            "SELECT d.seq, d.ino, d.version FROM drains d JOIN inodes i ON i.ino=d.ino AND i.version>=d.version"
            " AND i.nlink>0 WHERE NOT EXISTS (SELECT 1 FROM replicas r WHERE r.ino=d.ino AND r.version>=d.version"
            f" AND r.state=? AND r.tier IN ({_marks(durable)})) ORDER BY d.seq",
            (_DURABLE, *durable),
        )

    def overtakes(self, ino: int, first: int, version: int) -> bool:
        """Whether a close of a version from ``first`` on and before ``version`` of the file is queued."""
        sql = (
            "SELECT 1 FROM drains WHERE ino=?1 AND version>=?2 AND version<?3"
            " UNION ALL SELECT 1 FROM oplog WHERE kind=5 AND ino=?1 AND arg>=?2 AND arg<?3 LIMIT 1"
        )
        return self._run(sql, (ino, first, version)).fetchone() is not None

    def closes(self) -> list[tuple[int, int, int]]:
        """(seq, ino, version) of everything in the queues of all tiers."""
        return self._run(
            "SELECT seq, ino, version FROM drains UNION ALL SELECT seq, ino, arg FROM oplog WHERE kind=5"
        ).fetchall()

    def unqueued(self, archive: str) -> list[int]:
        """Closed files with a name that a local tier has and ``archive`` has not, nor waits for."""
        rows = self._run(
            "SELECT i.ino FROM inodes i WHERE (i.mode & 61440)=32768 AND i.nlink>0"
            " AND EXISTS (SELECT 1 FROM replicas r WHERE r.ino=i.ino AND r.version=i.version AND r.state<>?)"
            " AND NOT EXISTS (SELECT 1 FROM replicas r WHERE r.ino=i.ino AND r.version=i.version AND"
            " (r.tier=? OR r.state=?))"
            " AND NOT EXISTS (SELECT 1 FROM oplog o WHERE o.kind=5 AND o.ino=i.ino AND o.arg=i.version)",
            (int(ReplicaState.OPEN), archive, int(ReplicaState.OPEN)),
        )
        return [row[0] for row in rows]

    # versions that were replaced

    def keep_version(self, ino: int) -> None:
        """The current version is about to be replaced: while it is durable somewhere the file may fall back to it."""
        durable = (
            "SELECT 1 FROM replicas r JOIN inodes i ON i.ino=r.ino AND i.version=r.version WHERE r.ino=? AND r.state=?"
        )
        if not self._run(durable, (ino, _DURABLE)).fetchone():
            return
        self._write(f"INSERT OR REPLACE INTO versions SELECT {_VERSION} FROM inodes WHERE ino=?", (ino,))
        self._write(
            "INSERT OR REPLACE INTO version_xattrs SELECT x.ino, i.version, x.name, x.value FROM xattrs x"
            " JOIN inodes i ON i.ino=x.ino WHERE x.ino=?",
            (ino,),
        )

    def kept_version(self, ino: int, version: int) -> KeptVersion | None:
        row = self._run(f"SELECT {_VERSION} FROM versions WHERE ino=? AND version=?", (ino, version)).fetchone()
        return KeptVersion(*row) if row else None

    def drop_versions(self, ino: int, *, every: bool = False) -> None:
        """Forget what versions were like of which no durable replica is left, or all of them."""
        if not self._run("SELECT 1 FROM versions WHERE ino=?", (ino,)).fetchone():
            return
        if every:
            self._write("DELETE FROM versions WHERE ino=?", (ino,))
            self._write("DELETE FROM version_xattrs WHERE ino=?", (ino,))
            return
        gone = (
            "DELETE FROM {} AS v WHERE v.ino=? AND NOT EXISTS"
            " (SELECT 1 FROM replicas r WHERE r.ino=v.ino AND r.version=v.version AND r.state=?)"
        )
        self._write(gone.format("versions"), (ino, _DURABLE))
        self._write(gone.format("version_xattrs"), (ino, _DURABLE))

    def roll_back(self, ino: int, version: int, size: int) -> None:
        """An older version is the current one again, with what the file was like then, as far as it was kept."""
        kept = self.kept_version(ino, version)
        self._write("UPDATE inodes SET version=?, size=? WHERE ino=?", (version, size, ino))
        if kept is not None:
            self._write(
                "UPDATE inodes SET blocks=?, mtime_ns=?, mode=?, uid=?, gid=? WHERE ino=?",
                (kept.blocks, kept.mtime_ns, kept.mode, kept.uid, kept.gid, ino),
            )
            self._write("DELETE FROM xattrs WHERE ino=?", (ino,))
            self._write(
                "INSERT INTO xattrs SELECT ino, name, value FROM version_xattrs WHERE ino=? AND version=?",
                (ino, version),
            )
        for table in ("versions", "version_xattrs"):
            self._write(f"DELETE FROM {table} WHERE ino=? AND version>=?", (ino, version))
        self._write("DELETE FROM held WHERE ino=? AND version>=? AND version>0", (ino, version))

    # what somebody was told to be durable

    def vouch(self, ino: int, version: int) -> None:
        """Somebody was told that this version is durable: nothing older may come back in its place."""
        self._write("INSERT OR REPLACE INTO vouched VALUES (?, ?, ?)", (ino, version, self.new_seq()))

    def vouched(self) -> dict[int, int]:
        """Inode → version."""
        return dict(self._run("SELECT ino, version FROM vouched").fetchall())

    def drop_vouched(self, before: int) -> None:
        if self._run("SELECT 1 FROM vouched WHERE seq<? LIMIT 1", (before,)).fetchone():
            self._write("DELETE FROM vouched WHERE seq<?", (before,))

    def last_place(self) -> int:
        """The newest place in the oplog or a queue; 0 when all are empty."""
        sql = "SELECT MAX(COALESCE((SELECT MAX(seq) FROM oplog), 0), COALESCE((SELECT MAX(seq) FROM drains), 0))"
        return int(self._run(sql).fetchone()[0])

    # after a loss

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Every (parent, name) of an inode."""
        return self._run("SELECT parent, name FROM dentries WHERE ino=?", (ino,)).fetchall()

    def drop_operations_from(self, seq: int) -> None:
        self._write("DELETE FROM oplog WHERE seq>=?", (seq,))

    def drop_place(self, seq: int) -> None:
        """Take an operation out of the order, or a copy out of its queue."""
        self._write("DELETE FROM oplog WHERE seq=?", (seq,))
        self._write("DELETE FROM drains WHERE seq=?", (seq,))

    def recount_links(self, ino: int) -> None:
        """Set the link count to what the names say."""
        self._write(
            "UPDATE inodes SET nlink=CASE WHEN (mode & 61440) <> 16384"
            " THEN (SELECT COUNT(*) FROM dentries d WHERE d.ino=?1)"
            " WHEN ino=1 OR EXISTS (SELECT 1 FROM dentries d WHERE d.ino=?1) THEN 2 + (SELECT COUNT(*) FROM dentries d"
            " JOIN inodes c ON c.ino=d.ino WHERE d.parent=?1 AND (c.mode & 61440) = 16384) ELSE 0 END WHERE ino=?1",
            (ino,),
        )
