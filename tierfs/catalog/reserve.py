"""Room kept for the catalog on its disk, for the time when that is full.

Bytes of files go only after the catalog has said so durably, and saying so takes room: without any, a full disk could
not even be emptied. So a file beside the catalog holds `SIZE` bytes that nobody else can take. Once the catalog meets
the end of its disk, `give` moves them into SQLite's WAL, or frees them; `take` gets them back when there is room.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

SIZE = 8 << 20
"""Bytes: a dozen commits of `database.GROUP` operations."""

STEP = 64 << 10
"""With less room than `SIZE`, as many of these as there are."""

SPARE = 2 * SIZE
"""Bytes free on a disk that is used at which what was given up is taken again."""

NAME = "reserve"
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: blocks beyond a file's end are its own, its size stays."""


class Reserve:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = False

    def take(self, spare: int = 0) -> None:
        """Allocate what is missing, or what there is of it, if ``spare`` bytes are free. No room is no error: what the
        reserve is for may never happen."""
        if self._whole:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                held = os.fstat(fd).st_size
                free = self._free()
                room = min(SIZE - held, free // STEP * STEP) if free >= spare else 0
                while room > 0 and not _allocate(fd, held, room):
                    room = room * 7 // 8 // STEP * STEP  # some of what is free is for the filesystem itself
                self._whole = held + room >= SIZE
            finally:
                os.close(fd)

    def give(self, to: Path | None) -> bool:
        """Give the room to the file ``to``, behind its end, or (None) to whoever comes first. False: there was none."""
        self._whole = False
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            held = os.fstat(fd).st_size
            os.ftruncate(fd, 0)
            if to is not None:
                _append_room(to, held)
        except OSError:
            return False
        finally:
            os.close(fd)
        return held > 0

    def release(self, taker: Path) -> None:
        """All of it goes to whoever comes first, also what the file ``taker`` has behind its end."""
        self.give(None)
        with contextlib.suppress(OSError):
            fd = os.open(taker, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)

    def scarce(self) -> bool:
        """Whether less is free than is kept here."""
        try:
            return self._free() < SIZE
        except OSError:
            return False

    def _free(self) -> int:
        status = os.statvfs(self._path.parent)
        return status.f_frsize * (status.f_bavail if os.geteuid() else status.f_bfree)


def _allocate(fd: int, held: int, more: int) -> bool:
    try:
        os.posix_fallocate(fd, held, more)
    except OSError:
        os.ftruncate(fd, held)
        return False
    return True


def _append_room(file: Path, size: int) -> None:
    """Blocks behind the end of a file, as many as there are: at once, so that nobody else has them first."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        end = os.fstat(fd).st_size
        fallocate = ctypes.CDLL(None).fallocate
        while size >= STEP:
            if fallocate(fd, _KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size)) == 0:
                end += size
            size //= 2
    finally:
        os.close(fd)
