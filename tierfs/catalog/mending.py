"""Changes that no daemon makes: what fsck needs to mend a catalog, or to make another from what the tiers have."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Mapping

from tierfs.catalog.catalog import KEPT, Catalog
from tierfs.catalog.database import INO_BLOCK, SEQ_BLOCK
from tierfs.errors import FsError
from tierfs.types import ROOT_INO, Attributes, Ino, OpKind

RECOVERED = b"tierfs-recovered"
"""Directory at the root for what has bytes and no name."""


class MendableCatalog(Catalog):
    """The calls that change something belong into a `transaction`."""

    # looking

    def dangling_entries(self) -> list[tuple[int, bytes, int]]:
        """(parent, name, inode) of names without an inode, or below what is no directory."""
        return self._run(
            "SELECT d.parent, d.name, d.ino FROM dentries d LEFT JOIN inodes p ON p.ino=d.parent"
            " LEFT JOIN inodes i ON i.ino=d.ino"
            " WHERE i.ino IS NULL OR p.ino IS NULL OR (p.mode & 61440) <> 16384 OR d.ino=1"
        ).fetchall()

    def unreachable(self) -> list[int]:
        """Inodes that should have a name and that no path from the root leads to; those without any name first."""
        rows = self._run(
            "WITH RECURSIVE below(ino) AS (VALUES(1) UNION SELECT d.ino FROM dentries d JOIN below b ON d.parent=b.ino)"
            " SELECT i.ino FROM inodes i WHERE i.nlink>0 AND i.ino NOT IN below"
            " ORDER BY EXISTS (SELECT 1 FROM dentries d WHERE d.ino=i.ino), i.ino"
        )
        return [row[0] for row in rows]

    def wrong_links(self) -> list[tuple[int, int, int]]:
        """(inode, links, links that it should have) of files and directories that have a name."""
        return self._run(
            "SELECT ino, nlink, right FROM (SELECT i.ino, i.nlink, CASE WHEN (i.mode & 61440) = 16384 THEN 2 +"
            " (SELECT COUNT(*) FROM dentries d JOIN inodes c ON c.ino=d.ino"
            "  WHERE d.parent=i.ino AND (c.mode & 61440) = 16384)"
            " ELSE (SELECT COUNT(*) FROM dentries d WHERE d.ino=i.ino) END AS right FROM inodes i"
            " WHERE i.ino=1 OR EXISTS (SELECT 1 FROM dentries d WHERE d.ino=i.ino)) WHERE nlink <> right"
        ).fetchall()

    def bereft(self) -> list[Attributes]:
        """Files with a name and no replica of their current version."""
        rows = self._run(
            "SELECT i.ino FROM inodes i WHERE (i.mode & 61440) = 32768 AND i.nlink > 0 AND NOT EXISTS"
            " (SELECT 1 FROM replicas r WHERE r.ino=i.ino AND r.version=i.version)"
        ).fetchall()
        return [found for row in rows if (found := self.attributes(row[0])) is not None]

    def forsaken(self) -> list[int]:
        """Inodes of replicas that are not there."""
        rows = self._run("SELECT DISTINCT ino FROM replicas WHERE ino NOT IN (SELECT ino FROM inodes)")
        return [row[0] for row in rows]

    def all_entries(self, ino: int) -> list[tuple[int, bytes]]:
        return self.names(ino, -1)

    def rows_of(self, tier: str) -> int:
        return int(self._run("SELECT COUNT(*) FROM replicas WHERE tier=?", (tier,)).fetchone()[0])

    def count_files(self) -> int:
        return int(self._run("SELECT COUNT(*) FROM inodes WHERE nlink>0").fetchone()[0])

    # mending

    def mend_links(self, ino: int, links: int) -> None:
        self._write("UPDATE inodes SET nlink=? WHERE ino=?", (links, ino))

    def mend_sums(self) -> None:
        """Bytes per tier and state, counted anew."""
        self._write("DELETE FROM sums")
        self._write(
            "INSERT INTO sums SELECT tier, state, SUM(size) FROM replicas GROUP BY tier, state HAVING SUM(size)>0"
        )

    def drop_loose_rows(self) -> None:
        """Attributes and digests of inodes that are not there."""
        for table in ("xattrs", "chunks", "versions", "version_xattrs", "vouched", "held"):
            self._write(f"DELETE FROM {table} WHERE ino NOT IN (SELECT ino FROM inodes)")
        contents = "SELECT seq FROM oplog WHERE kind=?"
        self._write(f"DELETE FROM deadlines WHERE seq NOT IN ({contents})", (int(OpKind.CONTENT),))

    def drop_nameless(self) -> None:
        """Inodes without a name go, with their replicas' rows, unless a delete is held: without a mount nobody has them
        open."""
        named = "SELECT ino FROM dentries UNION SELECT ino FROM held WHERE version=0"
        nameless = f"SELECT ino FROM inodes WHERE ino<>1 AND ino NOT IN ({named})"
        for table in ("replicas", "drains"):
            self._write(f"DELETE FROM {table} WHERE ino IN ({nameless})")
        self._write(f"DELETE FROM oplog WHERE kind=? AND ino IN ({nameless})", (int(OpKind.CONTENT),))
        self._write(f"DELETE FROM inodes WHERE ino<>1 AND ino NOT IN ({named})")

    def fall_back(self, ino: int, version: int, size: int) -> None:
        """An older version is the current one again; copies of later ones are moot."""
        self.roll_back(ino, version, size)
        self._write("DELETE FROM drains WHERE ino=? AND version>?", (ino, version))
        self._write("DELETE FROM oplog WHERE kind=? AND ino=? AND arg>?", (int(OpKind.CONTENT), ino, version))

    def set_version(self, ino: int, version: int, size: int, mtime_ns: int, blocks: int) -> None:
        """The current version, with what came with it; copies of others are moot."""
        self._write(
            "UPDATE inodes SET version=?, size=?, mtime_ns=?, blocks=? WHERE ino=?",
            (version, size, mtime_ns, blocks, ino),
        )
        self._write("DELETE FROM drains WHERE ino=?", (ino,))
        self._write("DELETE FROM oplog WHERE kind=? AND ino=?", (int(OpKind.CONTENT), ino))

    def put_inode(self, a: Attributes, target: bytes | None, xattrs: Mapping[bytes, bytes]) -> None:
        """The inode as given, whatever was known of this number before."""
        self._write(
            "INSERT OR REPLACE INTO inodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*a, target),
        )
        self._write("DELETE FROM xattrs WHERE ino=?", (a.ino,))
        for name, value in xattrs.items():
            self.set_xattr(a.ino, name, value)

    def put_entry(self, parent: int, name: bytes, ino: int, now: int) -> None:
        """A name, over the one that was there; the archive hears of it."""
        self.remove_entry(parent, name)
        self.add_entry(parent, name, ino)
        attributes = self.attributes(ino)
        assert attributes is not None
        published = self.published(parent, name)
        if published is None or published.ino != ino:
            self.log(OpKind.LINK, ino, now, parent=parent, name=name, arg=attributes.mode)

    def take_entry(self, parent: int, name: bytes, now: int) -> None:
        """A name goes; the archive hears of it."""
        found = self.lookup(parent, name)
        self.remove_entry(parent, name)
        row = self.published(parent, name)
        if row is not None:
            mode = found.mode if found else stat.S_IFREG
            self.log(OpKind.UNLINK, row.ino, now, parent=parent, name=name, arg=mode)

    def recovered_directory(self, now: int) -> int:
        """The directory for what has no name."""
        found = self.lookup(ROOT_INO, RECOVERED)
        number = 0
        name = RECOVERED
        while found is not None and not stat.S_ISDIR(found.mode):
            number += 1
            name = RECOVERED + b".%d" % number
            found = self.lookup(ROOT_INO, name)
        if found is None:
            found = self.add_inode(stat.S_IFDIR | 0o700, 0, 0, now, nlink=2)
            self.put_entry(ROOT_INO, name, found.ino, now)
        return found.ino

    def put_recovered(self, ino: int, hint: bytes, now: int) -> bytes:
        """Give an inode a name of its own in the directory for what has none: its path."""
        directory = self.recovered_directory(now)
        stem = hint[:200] or b"inode"
        for number in range(1 << 20):
            name = stem + (b".%d" % ino if not number else b".%d.%d" % (ino, number))
            if self.lookup(directory, name) is None:
                self.put_entry(directory, name, ino, now)
                return b"/".join(self.path_of(ino) or (name,))
        raise FsError(errno.EEXIST)

    def adopt_file(self, size: int, blocks: int, mtime_ns: int, hint: bytes) -> tuple[Ino, bytes]:
        """A new file in the directory for what has no name: (inode, path)."""
        now = time.time_ns()
        made = self.add_inode(stat.S_IFREG | 0o600, 0, 0, now)
        self.set_version(made.ino, 1, size, mtime_ns, blocks)
        return made.ino, self.put_recovered(made.ino, hint, now)

    # making another

    def begin_anew(self, uuid: str) -> None:
        """The identity of the catalog that was lost."""
        self._write("UPDATE meta SET value=? WHERE key='uuid'", (uuid,))
        self.uuid = uuid

    def skip_ids(self, ino: int, seq: int) -> None:
        """Give out no inode number up to ``ino`` and no sequence number up to ``seq``."""
        self._next_ino = max(self._next_ino, ino + 1)
        self._last_ino = max(self._last_ino, self._next_ino + INO_BLOCK)
        self._next_seq = max(self._next_seq, seq + 1)
        self._last_seq = max(self._last_seq, self._next_seq + SEQ_BLOCK)
        self._write("UPDATE meta SET value=? WHERE key='next_ino'", (self._last_ino,))
        self._write("UPDATE meta SET value=? WHERE key='next_seq'", (self._last_seq,))

    def names_from_archive(self) -> None:
        """The namespace becomes the archive's, which is newer."""
        self._write("DELETE FROM dentries")
        self._write("DELETE FROM oplog")
        self._write("DELETE FROM held")  # what the archive has followed waits for nothing
        first = self.seq
        count = int(self._run("SELECT COUNT(*) FROM published").fetchone()[0])
        self.skip_ids(1, first + count)
        self._write(
            "INSERT INTO dentries SELECT parent, name, ino, ? + ROW_NUMBER() OVER (ORDER BY parent, name)"
            " FROM published WHERE ino IN (SELECT ino FROM inodes) AND parent<>?",
            (first, KEPT),
        )
        self._write("UPDATE inodes SET nlink=0 WHERE ino<>1 AND ino NOT IN (SELECT ino FROM dentries)")
        for row in self._run("SELECT DISTINCT ino FROM published WHERE occupant=-ino").fetchall():
            self.log(OpKind.ATTRIBUTES, row[0], time.time_ns())  # what was set aside may be its content again
        self.forget_paths()
