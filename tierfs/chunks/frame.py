"""A stored chunk: a header that says how to decode it, then what its codec made of it.

Whoever has a chunk can decode it without asking a manifest, which matters where two writers stored the same content in
different ways. docs/FORMAT.md describes the bytes. Whether the payload is right shows when it is decoded: by the id.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tierfs.chunks.manifest import CHUNK_LIMIT, ID_SIZE
from tierfs.chunks.span import SIZES
from tierfs.errors import ChunkDamaged

_MAGIC = b"tfc1"
_HEADER = struct.Struct("<4sBBBBI")
LONGEST_HEADER = _HEADER.size + ID_SIZE


class Frame(NamedTuple):
    """What there is to know of a stored chunk."""

    codec: int
    """Its number; 0: the payload is the chunk."""
    item: int
    """Bytes of one element, as told to the codec."""
    length: int
    """Bytes of the chunk, decoded."""
    base: bytes | None
    """Id of the chunk that this one is the difference to."""
    payload: memoryview


def header(codec: int, item: int, length: int, base: bytes | None = None) -> bytes:
    """What to store before the payload. Raises ValueError when `parse` would not take it."""
    if not 0 <= codec <= 255 or item not in SIZES or not 0 < length <= CHUNK_LIMIT:
        raise ValueError(f"no chunk: codec {codec}, elements of {item} bytes, {length} bytes")
    if base is not None and len(base) != ID_SIZE:
        raise ValueError(f"{len(base)} bytes are no id")
    return _HEADER.pack(_MAGIC, codec, item, base is not None, 0, length) + (base or b"")


def peek(raw: bytes | memoryview, stored: int) -> Frame:
    """What the first bytes (`LONGEST_HEADER` are enough) of a stored chunk of ``stored`` bytes say, without its
    payload. Raises `ChunkDamaged`."""
    if len(raw) < _HEADER.size:
        raise ChunkDamaged(f"chunk: {len(raw)} bytes are too few for a header")
    magic, codec, item, based, reserved, length = _HEADER.unpack_from(raw)
    if magic != _MAGIC or reserved != 0 or based > 1:
        raise ChunkDamaged("chunk: does not begin with the header of a chunk, or has a later format")
    start = _HEADER.size + based * ID_SIZE
    if item not in SIZES or not 0 < length <= CHUNK_LIMIT or not start < stored <= start + CHUNK_LIMIT:
        raise ChunkDamaged("chunk: its header says what cannot be")
    if codec == 0 and (based or stored - start != length):
        raise ChunkDamaged(f"chunk: {stored - start} bytes, stored as they are, instead of {length}")
    return Frame(codec, item, length, bytes(raw[_HEADER.size : start]) if based else None, memoryview(b""))


def parse(raw: memoryview) -> Frame:
    """The parts of a stored chunk, nothing copied. Raises `ChunkDamaged`."""
    found = peek(raw, len(raw))
    return found._replace(payload=raw[_HEADER.size + (ID_SIZE if found.base is not None else 0) :])
