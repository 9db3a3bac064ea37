"""A copy of the catalog while it is in use.

SQLite's own online backup would have to go through the daemon's one connection (the lock is exclusive), and could end
in the middle of a transaction of the event loop. But between two folds of the WAL neither the database file nor the
part of the WAL before the last commit changes: `Database.freeze` keeps the folds away, and a thread copies the two
files and lets a connection of its own join them. The daemon waits for none of it.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from tierfs.catalog.database import Frozen
from tierfs.errors import CatalogDamaged, CatalogError

NAME = "catalog.copying"


def take_snapshot(frozen: Frozen, directory: Path) -> Path:
    """The frozen catalog as one closed file in ``directory``. Blocks. Raises CatalogError: CatalogDamaged when its
    pages do not check."""
    target = directory / NAME
    discard_snapshot(directory)
    try:
        shutil.copyfile(frozen.path, target)
        if frozen.wal_bytes:
            with open(f"{frozen.path}-wal", "rb") as source, open(f"{target}-wal", "wb") as wal:
                left = frozen.wal_bytes
                while left and (data := source.read(min(left, 1 << 20))):
                    wal.write(data)
                    left -= len(data)
        os.chmod(target, 0o600)
        with closing(sqlite3.connect(target, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode=DELETE").fetchone()
            found = database.execute("PRAGMA quick_check(1)").fetchone()
            if found is None or found[0] != "ok":
                raise CatalogDamaged(f"catalog {frozen.path} is damaged: {found[0] if found else 'no answer'}")
            database.execute("UPDATE meta SET value=1 WHERE key='clean'")
    except sqlite3.DatabaseError as error:
        discard_snapshot(directory)
        raise CatalogError(f"no copy of catalog {frozen.path}: {error}") from error
    except BaseException as error:
        discard_snapshot(directory)
        if isinstance(error, OSError):
            raise CatalogError(f"no copy of catalog {frozen.path}: {error.strerror}") from error
        raise
    return target


def discard_snapshot(directory: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        (directory / f"{NAME}{suffix}").unlink(missing_ok=True)
