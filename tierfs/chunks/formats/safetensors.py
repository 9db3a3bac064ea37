"""safetensors: the length of a JSON header (8 bytes), the header, then the tensors one after the other."""

from __future__ import annotations

import json

from tierfs.chunks.span import UNKNOWN, Item, Region

_HEADER = 8 << 20
"""Bytes of the longest header that is looked at, enough for 80,000 tensors. The parser keeps the GIL meanwhile."""
_TYPES = {
    "F64": Item(8, True),
    "F32": Item(4, True),
    "F16": Item(2, True),
    "BF16": Item(2, True),
    "F8_E4M3": Item(1, True),
    "F8_E5M2": Item(1, True),
    "F8_E4M3FNUZ": Item(1, True),
    "F8_E5M2FNUZ": Item(1, True),
    "F8_E8M0": Item(1, True),
    "C64": Item(4, True),
    "I64": Item(8),
    "U64": Item(8),
    "I32": Item(4),
    "U32": Item(4),
    "I16": Item(2),
    "U16": Item(2),
}


def regions(source: memoryview) -> list[Region] | None:
    """The tensors in the order of their data; None when this is no such file."""
    if len(source) < 10 or source[8] != ord("{"):
        return None
    length = int.from_bytes(source[:8], "little")
    start = 8 + length
    if length > min(_HEADER, len(source) - 8):
        return None
    try:
        header = json.loads(bytes(source[8:start]))
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    found = []
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, (begin, end) = tensor["dtype"], tensor["data_offsets"]
        except (TypeError, KeyError, ValueError):
            return None
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(source) - start:
            return None
        if begin < end:
            found.append(Region(start + begin, end - begin, _TYPES.get(str(kind), UNKNOWN), name))
    return sorted(found)
