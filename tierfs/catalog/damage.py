"""Replicas known to be bad, how far the scrub of each tier is, and how far the archive must be to be the archive: the
queries of tables `damage` and `scrubs`, and of one entry of `meta`.

A row of `damage` counts only while its replica is in the catalog under the same key and its version is the file's
current one: what was replaced, rewritten or deleted is not damaged any more, without a statement that says so.
"""

from __future__ import annotations

from typing import NamedTuple

from tierfs.catalog.database import Database
from tierfs.types import Ino, Replica, ReplicaState

_VALID = (
    "damage d JOIN replicas r ON r.ino=d.ino AND r.version=d.version AND r.tier=d.tier AND r.key=d.key"
    " JOIN inodes i ON i.ino=d.ino AND i.version=d.version AND i.nlink>0"
)
_ELSEWHERE = (
    "EXISTS (SELECT 1 FROM replicas o WHERE o.ino=d.ino AND o.version=d.version AND o.tier<>d.tier AND o.state<>?"
    " AND NOT EXISTS (SELECT 1 FROM damage b WHERE b.ino=o.ino AND b.version=o.version AND b.tier=o.tier"
    " AND b.key=o.key))"
)


class Damage(NamedTuple):
    """A replica that does not have the bytes that were written to it."""

    ino: Ino
    version: int
    tier: str
    what: str
    since_ns: int
    elsewhere: bool
    """Another tier has this version and is not known to be bad: this replica was open when it was found."""

    @property
    def remedy(self) -> str:
        """What to do about it, while it is mounted."""
        if self.elsewhere:
            return "another tier has a copy: `tierfs scrub` replaces the bad one once nobody has the file open"
        return (
            "reading it gives EIO: write it anew or delete it, or put the right bytes back on the tier and run "
            "`tierfs scrub`"
        )


class Scrub(NamedTuple):
    """How far the reading of a tier's replicas is."""

    tier: str
    ino: int
    version: int
    began_ns: int
    finished_ns: int


class Damaged(Database):
    def put_damage(self, replica: Replica, what: str, now: int) -> None:
        self._write(
            "INSERT OR REPLACE INTO damage VALUES (?, ?, ?, ?, ?, ?)",
            (replica.ino, replica.version, replica.tier, replica.key, what, now),
        )

    def drop_damage(self, ino: int, version: int, tier: str) -> None:
        self._write("DELETE FROM damage WHERE ino=? AND version=? AND tier=?", (ino, version, tier))

    def is_damaged(self, replica: Replica) -> bool:
        sql = "SELECT 1 FROM damage WHERE ino=? AND version=? AND tier=? AND key=?"
        key = (replica.ino, replica.version, replica.tier, replica.key)
        return self._run(sql, key).fetchone() is not None

    def damaged(self, limit: int = -1) -> list[Damage]:
        """The longest known first; all of them without a limit."""
        return self._damages("ORDER BY d.since_ns, d.ino LIMIT ?", limit)

    def damage_of(self, ino: int) -> list[Damage]:
        """Of the current version."""
        return self._damages("WHERE d.ino=? ORDER BY d.since_ns", ino)

    def _damages(self, rest: str, argument: int) -> list[Damage]:
        columns = f"d.ino, d.version, d.tier, d.what, d.since_ns, {_ELSEWHERE}"
        rows = self._run(f"SELECT {columns} FROM {_VALID} {rest}", (int(ReplicaState.OPEN), argument))
        return [Damage(Ino(row[0]), row[1], row[2], row[3], row[4], bool(row[5])) for row in rows]

    def count_damaged(self) -> int:
        return int(self._run(f"SELECT COUNT(*) FROM {_VALID}").fetchone()[0])

    def forget_stale_damage(self) -> None:
        """Rows that do not count any more."""
        if self._run("SELECT 1 FROM damage LIMIT 1").fetchone():
            valid = f"SELECT d.ino, d.version, d.tier FROM {_VALID}"
            self._write(f"DELETE FROM damage WHERE (ino, version, tier) NOT IN ({valid})")

    def durable_after(self, tier: str, ino: int, version: int, limit: int) -> list[Replica]:
        """Up to ``limit`` durable replicas on a tier, of inodes and versions above these, in order."""
        rows = self._run(
            "SELECT ino, version, tier, state, key, size, digest FROM replicas"
            " WHERE tier=? AND state=? AND (ino, version) > (?, ?) ORDER BY ino, version LIMIT ?",
            (tier, int(ReplicaState.DURABLE), ino, version, limit),
        )
        return [Replica(Ino(r[0]), r[1], r[2], ReplicaState(r[3]), r[4], r[5], r[6]) for r in rows]

    def durable_total(self, tier: str, ino: int, version: int) -> tuple[int, int]:
        """(replicas, bytes) of all that `durable_after` gives."""
        row = self._run(
            "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM replicas"
            " WHERE tier=? AND state=? AND (ino, version) > (?, ?)",
            (tier, int(ReplicaState.DURABLE), ino, version),
        ).fetchone()
        return row[0], row[1]

    def scrub_of(self, tier: str) -> Scrub | None:
        """None: nobody has begun one."""
        row = self._run("SELECT tier, ino, version, began_ns, finished_ns FROM scrubs WHERE tier=?", (tier,)).fetchone()
        return Scrub(*row) if row else None

    def put_scrub(self, scrub: Scrub) -> None:
        self._write("INSERT OR REPLACE INTO scrubs VALUES (?, ?, ?, ?, ?)", tuple(scrub))

    @property
    def logged(self) -> tuple[int, int]:
        """(number of a log, bytes in it): so far the archive's log of batches is at least; (0, 0): nothing is known."""
        number, _, size = str(self._meta("logged") or "0 0").partition(" ")
        return (int(number), int(size)) if number.isdecimal() and size.isdecimal() else (0, 0)

    def put_logged(self, logged: tuple[int, int]) -> None:
        """Only what is there, synced, may be said to be."""
        if logged != self.logged:
            self._write("INSERT OR REPLACE INTO meta VALUES ('logged', ?)", (f"{logged[0]} {logged[1]}",))
