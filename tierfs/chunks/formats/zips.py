"""The central directories of zip archives, from the end of a file backwards.

Several archives may lie in one file, one behind the other, each with offsets from its own beginning: what
`torch.distributed.checkpoint` writes. Only an archive's end says how long it is, so the last one is found first, and
where it begins the one before it ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL = 0xFFFFFFFF
_COMMENT = 0xFFFF

STORED = 0
"""The method of an entry that is not compressed."""
ENTRIES = 1 << 17
"""Entries that are looked at in one file, over all its archives."""


class Entry(NamedTuple):
    """One file in an archive."""

    name: bytes
    method: int
    crc: int
    """CRC-32 of what it holds, or whatever else was written there."""
    offset: int
    """Where its bytes begin, in the file that holds the archive."""
    length: int
    """Bytes that it takes there."""


class Archive(NamedTuple):
    start: int
    end: int
    entries: list[Entry]
    """In the order of their bytes; they do not overlap, and lie before the directory."""


class _Broken(Exception):
    """No archive, or one with a directory that cannot be true."""


def archives(source: memoryview) -> Iterator[Archive]:
    """The archives at the end of the file, from the last one to the first. Ends where no archive ends."""
    end, entries = len(source), 0
    while end > 0 and entries <= ENTRIES:
        try:
            found = _archive(source, end, _COMMENT if end == len(source) else 0, ENTRIES - entries)
        except (_Broken, struct.error):
            return
        entries += 1 + len(found.entries)
        yield found
        end = found.start


def _archive(source: memoryview, end: int, comment: int, most: int) -> Archive:
    at = _find_end(source, end, comment)
    _, _, _, _, count, size, offset, _ = _END.unpack_from(source, at)
    directory_end = at
    at64 = at - _LOCATOR.size - _END64.size
    if at64 >= 0 and _LOCATOR.unpack_from(source, at - _LOCATOR.size)[0] == b"PK\6\7":
        magic, _, _, _, _, _, _, count, size, offset = _END64.unpack_from(source, at64)
        if magic != b"PK\6\6":
            raise _Broken
        directory_end = at64
    directory = directory_end - size
    start = directory - offset
    if not 0 <= start <= directory or count > min(most, size // _ENTRY.size):
        raise _Broken
    entries = sorted(_entries(source, start, directory, directory_end, count), key=lambda entry: entry.offset)
    position = start
    for entry in entries:
        if entry.offset < position:
            raise _Broken
        position = entry.offset + entry.length
    if position > directory:
        raise _Broken
    return Archive(start, end, entries)


def _find_end(source: memoryview, end: int, comment: int) -> int:
    """Where the record starts that ends an archive which ends at ``end``."""
    first = max(0, end - _END.size - comment)
    tail = bytes(source[first:end])
    at = tail.rfind(b"PK\5\6")
    while at >= 0:
        if len(tail) - at >= _END.size and _END.unpack_from(tail, at)[7] == len(tail) - at - _END.size:
            return first + at
        at = tail.rfind(b"PK\5\6", 0, at)
    raise _Broken


def _entries(source: memoryview, start: int, directory: int, end: int, count: int) -> Iterator[Entry]:
    at = directory
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise _Broken
        fields = _ENTRY.unpack_from(source, at)
        magic, method, crc, length, full = fields[0], fields[4], fields[7], fields[8], fields[9]
        name_length, extra_length, comment_length, offset = fields[10], fields[11], fields[12], fields[16]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        if magic != b"PK\1\2" or at > end:
            raise _Broken
        if _FULL in (length, full, offset):
            extra = bytes(source[extra_at : extra_at + extra_length])
            length, offset = _wide(extra, full, length, offset)
        header = start + offset
        if header + _LOCAL.size > directory:
            raise _Broken
        local = _LOCAL.unpack_from(source, header)
        data = header + _LOCAL.size + local[9] + local[10]
        if local[0] != b"PK\3\4" or data + length > directory:
            raise _Broken
        yield Entry(bytes(source[name_at:extra_at]), method, crc, data, length)


def _wide(extra: bytes, full: int, length: int, offset: int) -> tuple[int, int]:
    """Length and offset of an entry that has them as 64-bit numbers in its extra fields."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            try:
                if full == _FULL:
                    next(numbers)
                if length == _FULL:
                    length = next(numbers)
                if offset == _FULL:
                    offset = next(numbers)
            except StopIteration:
                raise _Broken from None
            return length, offset
        at += 4 + size
    return length, offset
