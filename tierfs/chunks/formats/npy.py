"""`numpy.save`: a magic string, a header as Python literal, then the array's elements to the end."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from tierfs.chunks.span import SIZES, UNKNOWN, Item, Region

_MAGIC = b"\x93NUMPY"
_HEADER = 1 << 16
"""Bytes of the longest header that is looked at; a simple type's has about a hundred."""
_SIMPLE = re.compile(rb"""['"]descr['"]\s*:\s*['"][<>=|]([a-zA-Z])(\d{1,3})['"]""")


class Elements(NamedTuple):
    """Where the elements begin, counted from the start of the magic string, and what they are."""

    offset: int
    item: Item


def elements(raw: memoryview) -> Elements | None:
    """What the header at the beginning of ``raw`` says; None when there is none."""
    if bytes(raw[:6]) != _MAGIC or len(raw) < 12:
        return None
    if raw[6] == 1:
        (length,), start = struct.unpack_from("<H", raw, 8), 10
    elif raw[6] in (2, 3):
        (length,), start = struct.unpack_from("<I", raw, 8), 12
    else:
        return None
    if start + length > len(raw):
        return None
    simple = _SIMPLE.search(raw[start : start + min(length, _HEADER)])
    return Elements(start + length, _item(simple[1], int(simple[2])) if simple else UNKNOWN)


def _item(kind: bytes, size: int) -> Item:
    if kind == b"c":  # two floats
        size //= 2
    elif kind == b"U":  # four bytes for each character
        size = 4
    return Item(size, kind in b"fc") if size in SIZES else UNKNOWN


def regions(source: memoryview) -> list[Region] | None:
    """The array of a `.npy` file. A file has one, so it needs no name but "array"."""
    found = elements(source)
    if found is None or found.offset >= len(source):
        return None
    return [Region(found.offset, len(source) - found.offset, found.item, "array")]
