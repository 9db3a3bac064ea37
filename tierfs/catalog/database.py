"""The catalog's store: SQLite behind a journal, with transactions, ids and durability; the queries are in `catalog`.

`transaction` is atomic and survives the process as soon as its block ends: it is in the journal. SQLite's own
commit follows after `GROUP` of them or with `commit`; until then SQLite holds them in one open transaction, which
every read of this connection sees. `commit` and then `sync` put all of it on stable storage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tierfs.catalog.journal import SIZE, Journal, Record, Statement, paths
from tierfs.catalog.reserve import NAME, SPARE, Reserve
from tierfs.catalog.schema import ADDED, FORMAT, SCHEMA
from tierfs.errors import CatalogDamaged, CatalogError
from tierfs.points import At, reach

GROUP = 128
"""Operations per SQLite commit. One commit then takes a few ms, which a request may have to wait for."""

COMMIT_BYTES = SIZE * 3 // 4
"""Bytes of the journal at which SQLite commits before `GROUP` is reached."""

CHECKPOINT_BYTES = 16 << 20
_DAMAGE = (11, 26)
"""SQLITE_CORRUPT, SQLITE_NOTADB"""
_NO_ROOM = (13, 14)
"""SQLITE_FULL, SQLITE_CANTOPEN: the second when the WAL cannot be made"""
INO_BLOCK, SEQ_BLOCK = 4096, 1 << 16
"""Ids reserved at a time: a crash skips the rest of a block, so that none is ever given twice."""


def boot_id() -> str:
    """What the kernel calls its present run; empty where it has no name for it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def journals(catalog: Path) -> tuple[Path, Path]:
    """The files of the journal beside a catalog."""
    return paths(catalog.with_name(catalog.name + "-log"))


class Frozen(NamedTuple):
    """The files of a catalog as of a commit."""

    path: Path
    wal_bytes: int
    seq: int
    """Its next sequence number then."""


class Transaction:
    """All statements of the block are committed together, or none of them when it raises."""

    __slots__ = ("_database", "ino", "request")

    def __init__(self, database: Database) -> None:
        self._database = database
        self.request: int | None = None
        """The kernel's request that this transaction answers, if any."""
        self.ino = 0
        """The inode that the request made; 0: none."""

    def record(self, request: int | None, ino: int = 0) -> None:
        """Remember that this transaction is the effect of a request of the kernel, which made ``ino`` (0: no inode)."""
        self.request = request
        self.ino = ino

    def __enter__(self) -> Transaction:
        self._database._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._database._finish(self)
        else:
            self._database._undo()


class Database:
    """One open catalog. Not thread-safe: used from the event loop only, except `sync`."""

    def __init__(self, path: Path, *, verify: bool = False) -> None:
        """Open or create the catalog at ``path``; CatalogError when it is foreign or cannot be written, CatalogDamaged
        when it is not what was written. ``verify`` looks at every page of one that was not closed."""
        self.path = path
        self._statements: list[Statement] = []
        self._inside = False
        self._uncommitted = 0
        self._commit_at = GROUP
        self._frozen = False
        self._reserve = Reserve(path.with_name(NAME))
        try:
            self._refuse_lost()
            try:
                self._open_files(verify)
            except (sqlite3.Error, OSError) as error:
                if not (self._is_full(error) and self._reserve.give(None)):
                    raise
                self._open_files(verify)
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error
        self._reserve.take()

    def _open_files(self, verify: bool) -> None:
        with contextlib.ExitStack() as undo:
            self._open_each(undo, verify)
            undo.pop_all()

    def _open_each(self, undo: contextlib.ExitStack, verify: bool) -> None:
        path = self.path
        self._db = sqlite3.connect(path, isolation_level=None, cached_statements=512, check_same_thread=False)
        undo.callback(self._db.close)
        self._run = self._db.execute
        for pragma in (
            "locking_mode=EXCLUSIVE",
            "journal_mode=WAL",
            "synchronous=OFF",
            "wal_autocheckpoint=0",
            "cache_size=-65536",
            "temp_store=MEMORY",
        ):
            self._run(f"PRAGMA {pragma}")
        if not self._run("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
            self._create()
            self._fold()  # from here on an empty file is no new catalog but one that was lost
        found = self._meta("format")
        if found != FORMAT:
            raise CatalogError(f"catalog {path} has format {found}, this tierfs reads format {FORMAT}")
        self._db.executescript(ADDED)
        self._journal = Journal(path.with_name(path.name + "-log"))
        undo.callback(self._journal.close)
        if verify and not self._meta("clean"):
            self._check_pages()
        self._recover()
        self._mark_unclean()

    @property
    def _wal(self) -> Path:
        return Path(f"{self.path}-wal")

    @staticmethod
    def _is_full(error: sqlite3.Error | OSError) -> bool:
        if isinstance(error, OSError):
            return error.errno == errno.ENOSPC
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM

    def _failure(self, error: sqlite3.Error | OSError) -> CatalogError:
        damaged = isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE
        return (CatalogDamaged if damaged else CatalogError)(f"catalog {self.path}: {error}")

    def _check_pages(self) -> None:
        found = self._run("PRAGMA quick_check(1)").fetchone()
        if found is None or found[0] != "ok":
            raise CatalogDamaged(f"catalog {self.path} is damaged: {found[0] if found else 'no answer'}")

    def _refuse_lost(self) -> None:
        """A journal is made after the first catalog is on stable storage: without one it belongs to a catalog that is
        gone, and an empty one in its place would have all files removed as orphans."""
        left = [journal for journal in journals(self.path) if journal.exists()]
        if left and not (self.path.exists() and self.path.stat().st_size):
            raise CatalogDamaged(
                f"catalog {self.path} is missing or empty, but its journal {left[0]} is there: put the catalog "
                "back, or remove the journal to begin anew"
            )

    def _create(self) -> None:
        now = time.time_ns()
        self._db.executescript(f"BEGIN; {SCHEMA}")
        meta = {"format": FORMAT, "uuid": str(uuid.uuid4()), "generation": 0, "next_ino": 2, "next_seq": 1, "clean": 1}
        self._db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        self._run("INSERT INTO inodes VALUES (1, ?, 0, 0, 2, 0, 0, ?, ?, ?, 0, 0, NULL)", (0o40755, now, now, now))
        self._run("COMMIT")

    def _meta(self, key: str) -> Any:
        row = self._run("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return row[0] if row else None

    def _number(self, key: str) -> int:
        value = self._meta(key)
        if not isinstance(value, int):
            raise CatalogDamaged(f"catalog {self.path} is damaged: {key} is {value!r}")
        return value

    def _refuse_older(self, generation: int) -> None:
        """SQLite drops the end of a damaged WAL, and all of a lost one, without a word. Only a power cut may do so to
        us; within one boot the journal then follows a later commit than the catalog's last."""
        if self._meta("boot") != boot_id():
            return
        begun = self._journal.begun()
        if (newest := max(begun)) > generation:
            raise CatalogDamaged(
                f"catalog {self.path} ends at commit {generation}, but its journal follows commit {newest}: "
                f"{self.path.name}-wal is damaged or was removed; put the catalog's files back as they were"
            )
        # The generation before the last in its place: the process died between a commit and the beginning of the next.
        if not self._meta("clean") and generation > 1 and begun[generation & 1] not in (generation, generation - 2):
            raise CatalogDamaged(
                f"catalog {self.path} was not closed, and {journals(self.path)[generation & 1]}, which has what came "
                "last, is damaged or was removed; put it back as it was"
            )
        if (offset := self._journal.damage(generation)) is not None:
            raise CatalogDamaged(
                f"{journals(self.path)[generation & 1]}, the journal of catalog {self.path}, is damaged at byte "
                f"{offset} and goes on behind it"
            )

    def _recover(self) -> None:
        """Execute again what was committed to the journal and not yet to SQLite."""
        generation = self._number("generation")
        self._refuse_older(generation)
        self.uuid = str(self._meta("uuid"))
        self._answered: dict[int, int] = {}
        for record in self._journal.records(generation - 1):
            self._note_answer(record)
        self._journal.resume(generation)
        self._replay()
        if not self._run("SELECT 1 FROM inodes WHERE ino=1").fetchone():
            raise CatalogDamaged(f"catalog {self.path} is damaged: it has no root directory")
        self._next_ino = self._last_ino = self._number("next_ino")
        self._next_seq = self._last_seq = self._number("next_seq")

    def _replay(self) -> None:
        for record in self._journal.records(self._journal.generation):
            self._open()
            for sql, parameters in record.statements:
                self._run(sql, parameters)
            self._note_answer(record)
            self._uncommitted += 1

    def _mark_unclean(self) -> None:
        self.was_clean = bool(self._meta("clean"))
        """Whether whoever had the catalog before closed it."""
        boot = boot_id()
        if self.was_clean or self._meta("boot") != boot:
            with self.transaction():
                self._write("UPDATE meta SET value=0 WHERE key='clean'")
                self._write("INSERT OR REPLACE INTO meta VALUES ('boot', ?)", (boot,))
            self.commit()
            if not self._fold_if_room():
                self.sync()

    def _note_answer(self, record: Record) -> None:
        if record.request is not None:
            self._answered[record.request] = record.ino

    # transactions

    def transaction(self) -> Transaction:
        return Transaction(self)

    def _open(self) -> None:
        if not self._db.in_transaction:
            self._run("BEGIN")

    def _begin(self) -> None:
        assert not self._inside, "transactions do not nest"
        self._open()
        self._inside = True
        self._statements = []

    def _write(self, sql: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Execute a statement that changes something, inside a transaction. Its effect must follow from ``sql``,
        ``parameters`` and the database alone, because it may be executed again."""
        assert self._inside, "changes need a transaction"
        self._statements.append((sql, parameters))
        return self._run(sql, parameters)

    def _finish(self, transaction: Transaction) -> None:
        if self._statements or transaction.request is not None:
            try:
                self._journal.append(transaction.request, transaction.ino, self._statements)
            except BaseException:
                self._undo()
                raise
            self._uncommitted += 1
        self._inside = False
        if self._uncommitted >= self._commit_at or (self._journal.used > COMMIT_BYTES and self._commit_at == GROUP):
            # A full disk must not fail this operation, which the journal has: the next `commit` by name reports it.
            with contextlib.suppress(CatalogError):
                self.commit()

    def _undo(self) -> None:
        """Take back the current transaction. SQLite forgets the whole group, so its others are executed again."""
        self._inside = False
        self._last_ino, self._last_seq = self._next_ino, self._next_seq
        if self._statements:
            self._roll_back()

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._run("ROLLBACK")
        self._uncommitted = 0
        self._replay()

    def commit(self) -> None:
        """Move what the journal holds into SQLite: still in the page cache only, see `sync`.
        Raises CatalogError when the disk is full; nothing is lost then, and the next call tries again."""
        assert not self._inside
        if not self._uncommitted:
            if self._db.in_transaction:  # blocks that changed nothing have begun it
                self._run("COMMIT")
            return
        following = self._journal.generation + 1
        try:
            try:
                self._commit_as(following)
            except sqlite3.Error as error:
                if not (self._is_full(error) and self._reserve.give(self._wal)):
                    raise
                self._commit_as(following)
        except sqlite3.Error as error:
            self._commit_at = 2 * self._uncommitted  # each try executes all of them again
            raise CatalogError(f"catalog {self.path}: {error}") from error
        reach(At.CATALOG_COMMITTED)
        self._uncommitted = 0
        self._commit_at = GROUP
        self._journal.begin(following)

    def _commit_as(self, generation: int) -> None:
        try:
            self._run("UPDATE meta SET value=? WHERE key='generation'", (generation,))
            self._run("COMMIT")
        except sqlite3.Error:
            self._roll_back()
            raise

    @contextlib.contextmanager
    def bulk(self) -> Iterator[None]:
        """A transaction of any size: SQLite's own, past the journal. Killed inside, the catalog is as before; when the
        block ends, it is committed as by `commit`. Raises CatalogError."""
        self.commit()
        if self._reserve.scarce():  # the block cannot be tried again
            self._reserve.give(self._wal)
        following = self._journal.generation + 1
        self._begin()
        try:
            yield
            self._write("UPDATE meta SET value=? WHERE key='generation'", (following,))
            self._run("COMMIT")
        except BaseException as error:
            self._inside = False
            self._last_ino, self._last_seq = self._next_ino, self._next_seq
            self._roll_back()
            if isinstance(error, sqlite3.Error):
                raise CatalogError(f"catalog {self.path}: {error}") from error
            raise
        self._inside = False
        self._journal.begin(following)

    # stable storage

    def sync(self) -> None:
        """Everything before the last `commit` is on stable storage when this returns.

        Blocks on the disk; the one method that may be called from another thread.
        """
        try:
            fd = os.open(self._wal, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def checkpoint(self) -> None:
        """Fold a WAL that grew large into the database; call it right after `sync`, from the event loop. CatalogError
        when the disk is full: it goes on in the WAL."""
        if not self._frozen and self.overgrown:
            self.commit()
            self._fold()
        self._reserve.take(SPARE)

    @property
    def overgrown(self) -> bool:
        """Whether the WAL is so large that it is worth folding. Whoever opens the catalog next reads all of it."""
        return self._wal.exists() and self._wal.stat().st_size > CHECKPOINT_BYTES

    def freeze(self) -> Frozen:
        """Leave what is committed now where it is, so that a thread can copy it (`snapshot`), until `thaw`.
        Raises CatalogError."""
        self.commit()
        try:
            wal = self._wal.stat().st_size
        except FileNotFoundError:
            wal = 0
        self._frozen = True
        return Frozen(self.path, wal, self._next_seq)

    def thaw(self) -> None:
        self._frozen = False

    def _fold(self) -> None:
        if not self._fold_if_room():
            raise CatalogError(f"catalog {self.path}: the disk is full, its WAL cannot be folded into it")

    def _fold_if_room(self) -> bool:
        """False when the disk is full: all is in the WAL as before."""
        self._run("PRAGMA synchronous=FULL")
        try:
            for again in (True, False):
                try:
                    self._run("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                except sqlite3.Error as error:
                    if not self._is_full(error):
                        raise self._failure(error) from error
                    if again:
                        self._reserve.release(self._wal)
                else:
                    return True
            return False
        finally:
            self._run("PRAGMA synchronous=OFF")

    def close(self, *, as_found: bool = False) -> None:
        """Fold journal and WAL into the database file, on stable storage, and close. ``as_found``: whoever opens it
        next is to know, too, if it was not closed before."""
        with self.transaction():
            self._write("UPDATE meta SET value=? WHERE key='next_ino'", (self._next_ino,))
            self._write("UPDATE meta SET value=? WHERE key='next_seq'", (self._next_seq,))
            if self.was_clean or not as_found:
                self._write("UPDATE meta SET value=1 WHERE key='clean'")
        self.commit()
        self.sync()
        self._fold()
        self._db.close()
        self._journal.close()
        self._reserve.take()

    # ids

    def new_ino(self) -> int:
        """An inode number never given before. Inside a transaction."""
        ino = self._next_ino
        if ino == self._last_ino:
            self._last_ino += INO_BLOCK
            self._write("UPDATE meta SET value=? WHERE key='next_ino'", (self._last_ino,))
        self._next_ino += 1
        return ino

    def new_seq(self) -> int:
        """A number above all that were given before. Inside a transaction."""
        seq = self._next_seq
        if seq == self._last_seq:
            self._last_seq += SEQ_BLOCK
            self._write("UPDATE meta SET value=? WHERE key='next_seq'", (self._last_seq,))
        self._next_seq += 1
        return seq

    @property
    def seq(self) -> int:
        """The number that `new_seq` gives next: all that was done so far has a lower one."""
        return self._next_seq

    # requests: exactly once for what the kernel sends again after a restart

    def answered(self, request: int) -> int | None:
        """The inode that a request of a former daemon's time made (0: none), None when it was not committed."""
        return self._answered.get(request)

    def forget_requests(self) -> None:
        """A new kernel connection numbers its requests from the start: no former one may be taken for a new one."""
        self._answered = {}
        self.commit()
        with self.transaction():
            self._write("UPDATE meta SET value=value WHERE key='generation'")
        self.commit()
        self._journal.begin(self._journal.generation)
