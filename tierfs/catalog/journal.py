"""The catalog's journal: what was committed since SQLite's last commit, in two files of fixed size.

A namespace operation is committed by appending its statements here, one `pwrite` into the page cache, and the
statements stay in SQLite's open transaction; many operations then share one SQLite commit and its pages. A daemon that
is killed leaves them here, and the next one executes them again.

Generation g of the journal holds what comes after SQLite's commit number g. Odd and even generations have a
file each, so that the one before the current stays readable: it may hold the last request that was answered.
A file is never truncated: each record's checksum is seeded with the generation, which ends the valid ones.

File: 16 bytes ``magic, generation``, then records ``u32 length, u32 crc32(payload, generation), payload``, where
the payload is `marshal` (format 4) of ``(request or None, inode, [new sql, ...], [(number of sql, parameters), ...])``.
A generation numbers the SQL texts in the order in which its records bring them.
"""

from __future__ import annotations

import errno
import marshal
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"tierfs-j"
SIZE = 4 << 20
"""Bytes of each file, allocated at once: a full disk shows when the catalog is opened, not at a create."""

_HEADER = struct.Struct("<8sQ")
_RECORD = struct.Struct("<II")
_MARSHAL = 4

_STARTS = b")\x04", b"\xa9\x04"
"""How `marshal` begins a tuple of four: every payload begins so."""

Statement = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Record:
    """One committed operation: the kernel's request that asked for it, the inode it made (0: none), its statements."""

    request: int | None
    ino: int
    statements: list[Statement]


def paths(path: Path) -> tuple[Path, Path]:
    """The two files of the journal ``path``."""
    return Path(f"{path}.0"), Path(f"{path}.1")


class Journal:
    def __init__(self, path: Path) -> None:
        """Open or create ``path``.0 and ``path``.1. Raises OSError, ENOSPC among them."""
        self._fds: list[int] = []
        self.generation = 0
        self._offset = _HEADER.size
        self._numbers: dict[str, int] = {}
        """SQL text → its number in this generation"""
        try:
            for file in paths(path):
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._fds.append(fd)
                if os.fstat(fd).st_blocks * 512 < SIZE:  # a full xfs refuses also what the file has already
                    os.posix_fallocate(fd, 0, SIZE)
        except BaseException:
            self.close()
            raise

    def begin(self, generation: int) -> None:
        """Append to ``generation`` from now on; what its file held is void. Raises OSError."""
        os.pwrite(self._fds[generation & 1], _HEADER.pack(MAGIC, generation), 0)
        self.generation = generation
        self._offset = _HEADER.size
        self._numbers = {}

    def begun(self) -> list[int]:
        """The generation that each file holds; -1 when it holds none."""
        headers = [os.pread(fd, _HEADER.size, 0) for fd in self._fds]
        return [_HEADER.unpack(header)[1] if header.startswith(MAGIC) else -1 for header in headers]

    def damage(self, generation: int) -> int | None:
        """Offset of the record of ``generation`` that is damaged although valid ones follow it; None: there is none.

        A process that dies leaves no such hole; only a power cut may, and the records behind it are void then."""
        data = self._read(generation)
        offset = max((end for _, end in self._scan(generation)), default=_HEADER.size)
        for begin in _STARTS:
            at = data.find(begin, offset + _RECORD.size)
            while at >= 0:
                length, checksum = _RECORD.unpack_from(data, at - _RECORD.size)
                payload = data[at : at + length]
                if 0 < length == len(payload) and zlib.crc32(payload, generation) == checksum:
                    return offset
                at = data.find(begin, at + 1)
        return None

    def resume(self, generation: int) -> None:
        """Append after the valid records of ``generation``, beginning it if its file holds another."""
        found = list(self._scan(generation))
        if not found:
            self.begin(generation)
            return
        self.generation = generation
        self._offset = found[-1][1]
        self._numbers = {}
        for record, _ in found:
            for sql, _ in record.statements:
                self._numbers.setdefault(sql, len(self._numbers))

    def append(self, request: int | None, ino: int, statements: list[Statement]) -> None:
        """Commit one operation: it survives this process, not a power cut. Raises OSError; ENOSPC when the file is
        full."""
        numbers = self._numbers
        known = len(numbers)
        numbered = [(numbers.setdefault(sql, len(numbers)), parameters) for sql, parameters in statements]
        new = list(numbers)[known:] if len(numbers) > known else []
        try:
            self._append(marshal.dumps((request, ino, new, numbered), _MARSHAL))
        except BaseException:
            for sql in new:
                del numbers[sql]
            raise

    def _append(self, payload: bytes) -> None:
        record = _RECORD.pack(len(payload), zlib.crc32(payload, self.generation)) + payload
        if self._offset + len(record) > SIZE:
            raise OSError(errno.ENOSPC, "the catalog's journal is full")
        written = os.pwrite(self._fds[self.generation & 1], record, self._offset)
        if written != len(record):
            raise OSError(errno.ENOSPC, "the catalog's journal was cut short")
        self._offset += written

    @property
    def used(self) -> int:
        """Bytes of the current generation."""
        return self._offset

    def records(self, generation: int) -> Iterator[Record]:
        """The valid records of ``generation`` in order; none when its file holds another generation."""
        for record, _ in self._scan(generation):
            yield record

    def _read(self, generation: int) -> bytes:
        """The file of ``generation``; empty when it holds another one."""
        data = os.pread(self._fds[generation & 1], SIZE, 0)
        return data if len(data) >= _HEADER.size and _HEADER.unpack_from(data) == (MAGIC, generation) else b""

    def _scan(self, generation: int) -> Iterator[tuple[Record, int]]:
        """Each valid record with the offset after it."""
        data = self._read(generation)
        offset = _HEADER.size
        texts: list[str] = []
        while offset + _RECORD.size <= len(data):
            length, checksum = _RECORD.unpack_from(data, offset)
            payload = data[offset + _RECORD.size : offset + _RECORD.size + length]
            if not length or len(payload) < length or zlib.crc32(payload, generation) != checksum:
                return
            offset += _RECORD.size + length
            request, ino, new, numbered = marshal.loads(payload)
            texts += new
            yield Record(request, ino, [(texts[number], parameters) for number, parameters in numbered]), offset

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
