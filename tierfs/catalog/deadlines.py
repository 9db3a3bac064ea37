"""Files that should be on the last tier by a certain time, the queries of table `deadlines`; and all that are not yet.

A row counts only while its version is the file's current one, which has a name and a replica: what was superseded,
deleted or lost has no deadline any more, without a statement that says so.
"""

from __future__ import annotations

from tierfs.catalog.database import Database

_VALID = (
    "deadlines l JOIN inodes i ON i.ino=l.ino AND i.version=l.version AND i.nlink>0"
    " AND EXISTS (SELECT 1 FROM replicas r WHERE r.ino=l.ino AND r.version=l.version)"
)


class Deadlines(Database):
    def set_deadline(self, ino: int, version: int, seq: int, due_ns: int) -> None:
        """The archive should have this version, whose CONTENT is ``seq`` in the oplog, by ``due_ns``."""
        self._write("INSERT OR REPLACE INTO deadlines VALUES (?, ?, ?, ?)", (ino, version, seq, due_ns))

    def deadline(self, ino: int, version: int) -> int | None:
        """Until when the archive should have this version; None: it has it, or there is no hurry."""
        row = self._run("SELECT due_ns FROM deadlines WHERE ino=? AND version=?", (ino, version)).fetchone()
        return int(row[0]) if row else None

    def drop_deadline(self, ino: int) -> None:
        if self._run("SELECT 1 FROM deadlines WHERE ino=?", (ino,)).fetchone():
            self._write("DELETE FROM deadlines WHERE ino=?", (ino,))

    def content_of(self, ino: int, version: int) -> int | None:
        """Place of a version's CONTENT in the oplog; None when the archive does not wait for it."""
        row = self._run("SELECT seq FROM oplog WHERE kind=5 AND ino=? AND arg=?", (ino, version)).fetchone()
        return int(row[0]) if row else None

    def content_deadlines(self, limit: int) -> list[tuple[int, int]]:
        """(place in the oplog, deadline in ns) of contents that the archive should have, earliest deadline first."""
        return self._run(f"SELECT l.seq, l.due_ns FROM {_VALID} ORDER BY l.due_ns LIMIT ?", (limit,)).fetchall()

    def urgent_drains(self, limit: int) -> list[tuple[int, int, str, int, int]]:
        """As `wanted_drains`, of files that have a deadline, the earliest first."""
        return self._run(
            f"SELECT d.ino, d.version, d.tier, i.size, i.ctime_ns FROM {_VALID}"
            " JOIN drains d ON d.ino=l.ino AND d.version=l.version ORDER BY l.due_ns, d.seq LIMIT ?",
            (limit,),
        ).fetchall()

    def late(self, now: int) -> tuple[int, int]:
        """(files, bytes) that the archive should have by now and has not."""
        row = self._run(
            f"SELECT COUNT(*), COALESCE(SUM(i.size), 0) FROM {_VALID} WHERE l.due_ns<?", (now,)
        ).fetchone()
        return row[0], row[1]

    def late_files(self, now: int, limit: int) -> list[int]:
        """The inodes of those, earliest deadline first."""
        sql = f"SELECT l.ino FROM {_VALID} WHERE l.due_ns<? ORDER BY l.due_ns LIMIT ?"
        return [row[0] for row in self._run(sql, (now, limit))]

    def backlog(self) -> tuple[int, int, int]:
        """(files, bytes, oldest close in ns) whose current version is not on the archive yet; oldest 0 if none."""
        row = self._run(
            "SELECT COUNT(*), COALESCE(SUM(i.size), 0), COALESCE(MIN(o.at_ns), 0) FROM oplog o"
            " JOIN inodes i ON i.ino=o.ino AND i.version=o.arg AND i.nlink>0 WHERE o.kind=5"
        ).fetchone()
        return row[0], row[1], row[2]
