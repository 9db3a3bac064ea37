"""What is logged on the archive of each batch before it begins (tiers.copies), so that a copy of the catalog and the
log behind it say together what the archive's names mean: the batch itself and what the catalog said of its inodes.

Format 1: JSON, bytes as latin-1 text. `prev` is the last operation before the batch: a log in which it is not that of
the record before has a gap (or a batch that was given up, which the next one with the same `prev` replaces).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tierfs.catalog import KEPT, Catalog
from tierfs.migrator.steps import Batch
from tierfs.tiers.beside import is_name

FORMAT = 1
_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class InodeState:
    """An inode as the catalog had it."""

    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    version: int
    target: bytes | None
    xattrs: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Progress:
    prev: int
    batch: Batch
    inodes: list[InodeState]


def states(catalog: Catalog, inos: Iterable[int]) -> list[InodeState]:
    """Of those that are still there."""
    found = []
    for ino in inos:
        a = catalog.attributes(ino)
        if a is not None:
            target = catalog.target(ino) if stat.S_ISLNK(a.mode) else None
            times = a.atime_ns, a.mtime_ns, a.ctime_ns
            xattrs = dict(catalog.xattrs(ino))
            found.append(InodeState(ino, a.mode, a.uid, a.gid, a.rdev, a.size, *times, a.version, target, xattrs))
    return found


def encode(prev: int, batch: str, inodes: Iterable[InodeState]) -> bytes:
    """``batch`` as `Batch.encode` gives it."""
    rows = [
        [
            *(s.ino, s.mode, s.uid, s.gid, s.rdev, s.size, s.atime_ns, s.mtime_ns, s.ctime_ns, s.version),
            None if s.target is None else s.target.decode("latin-1"),
            {name.decode("latin-1"): value.decode("latin-1") for name, value in s.xattrs.items()},
        ]
        for s in inodes
    ]
    return json.dumps([FORMAT, prev, batch, rows], separators=(",", ":")).encode()


def decode(raw: bytes) -> Progress | None:
    """None when it is of another format, or says what cannot be."""
    try:
        form, prev, text, rows = json.loads(raw)
        if form != FORMAT:
            return None
        batch = Batch.decode(text)
        _check(batch)
        return Progress(_number(prev), batch, [_state(row) for row in rows])
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
        return None


def _check(batch: Batch) -> None:
    _number(batch.last)
    for (parent, name), row in batch.names.items():
        _number(parent, KEPT)
        if not is_name(name) or (parent == 1 and name == b".tierfs"):
            raise ValueError("no name")
        if row is not None:
            _number(row.ino)
            _number(row.occupant, -_MOST)
    for replica in batch.stored.values():
        _number(replica.ino)
        _number(replica.version)
        _number(replica.size)
        if not isinstance(replica.tier, str):
            raise TypeError("no tier")
    for step in batch.steps:
        if not all(is_name(name) for path in step.touches for name in path):
            raise ValueError("no path")


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError("no number")
    return value


def _state(row: Any) -> InodeState:
    ino, mode, uid, gid, rdev, size, atime, mtime, ctime, version, target, xattrs = row
    if _number(ino) < 1 or _number(mode) > 0o177777 or max(_number(uid), _number(gid)) > 0xFFFFFFFF:
        raise ValueError("no inode")
    return InodeState(
        ino,
        mode,
        uid,
        gid,
        _number(rdev),
        _number(size),
        _number(atime, -_MOST),
        _number(mtime, -_MOST),
        _number(ctime, -_MOST),
        _number(version),
        None if target is None else target.encode("latin-1"),
        {name.encode("latin-1"): value.encode("latin-1") for name, value in xattrs.items()},
    )
