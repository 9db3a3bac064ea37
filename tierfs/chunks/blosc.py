"""Blosc2 chunks: what the codec `bitshuffle-lz4` stores (docs/CODECS.md has the format).

Reached through imagecodecs because that calls Blosc2's context functions: one thread per call, no state shared between
calls, the GIL released, results written into the caller's buffer. The package `blosc2` keeps the number of threads and
whether it releases the GIL in globals, brings numexpr with its threads, and believes the lengths in a chunk's header.
"""

from __future__ import annotations

import struct
from typing import Any

import imagecodecs
import numpy as np

from tierfs.chunks.planes import Octets
from tierfs.errors import ChunkDamaged

BLOCK = 128 << 10
"""Bytes that are shuffled and compressed at a time."""

_MOST_BLOCK = 1 << 20
_LEVEL = 5

_HEADER = struct.Struct("<4B3i6s2B6s2B")
_FORMAT = 5
_EXTENDED_LZ4 = 0x25
_UNSPLIT = 0x10
_FILTERS = bytes((0, 0, 0, 0, 0, 2))
_LZ4 = 1
_ZEROS = 0x10
"""A chunk that is nothing but its header and stands for zeros."""

_ITEMS: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
"""Types by size, for imagecodecs: it takes the size of an item from the buffer that it is given, and unsigned bytes for
items of 8."""


def shuffled_item(item: int) -> int:
    """The size of items that can be shuffled for a chunk of items of ``item`` bytes."""
    return item if item in _ITEMS else max(size for size in _ITEMS if item % size == 0)


def pack(data: Octets, item: int) -> Octets:
    """``data`` as one Blosc2 chunk, and after it the bytes that make no whole item."""
    item = shuffled_item(item)
    whole = len(data) // item * item
    packed = np.empty(_HEADER.size + len(data), np.uint8)
    chunk = imagecodecs.blosc2_encode(
        data[:whole].view(_ITEMS[item]),
        _LEVEL,
        compressor=imagecodecs.BLOSC2.COMPRESSOR.LZ4,
        shuffle=imagecodecs.BLOSC2.FILTER.BITSHUFFLE,
        splitmode=imagecodecs.BLOSC2.SPLIT.NEVER,
        typesize=item,
        blocksize=BLOCK,
        numthreads=1,
        out=packed.data,
    )
    end = len(chunk)
    packed[end : end + len(data) - whole] = data[whole:]
    return packed[: end + len(data) - whole]


def unpack(packed: Octets, out: Octets, item: int) -> None:
    """The inverse of `pack`: fills ``out``, or raises `ChunkDamaged`."""
    item = shuffled_item(item)
    whole = len(out) // item * item
    chunk = packed[: len(packed) - (len(out) - whole)]
    _check(chunk, whole, item)
    try:
        done = imagecodecs.blosc2_decode(chunk.data, numthreads=1, out=out[:whole].data)
    except (imagecodecs.Blosc2Error, ValueError) as error:
        raise ChunkDamaged(f"a Blosc2 chunk cannot be decompressed: {error}") from error
    if len(done) != whole:
        raise ChunkDamaged(f"a Blosc2 chunk of {whole} bytes has {len(done)}")
    out[whole:] = packed[len(chunk) :]


def _check(chunk: Octets, length: int, item: int) -> None:
    """Refuse what `pack` never writes. A chunk can ask for plug-ins, for bytes from a file, for memory left as it was,
    for blocks of any size; none of that gets as far as the library."""
    if len(chunk) < _HEADER.size:
        raise ChunkDamaged(f"a Blosc2 chunk ends after {len(chunk)} bytes, within its header")
    head = _HEADER.unpack_from(chunk.data)
    version, _, flags, size, nbytes, block, cbytes, filters, *codec, metas, reserved, more = head
    if (nbytes, cbytes, size) != (length, len(chunk), item):
        raise ChunkDamaged(
            f"a Blosc2 chunk of {length} bytes in {len(chunk)}, {item} per item, "
            f"says that it is of {nbytes} in {cbytes}, {size} per item"
        )
    known = version == _FORMAT and flags & ~_UNSPLIT == _EXTENDED_LZ4 and filters == _FILTERS and codec == [_LZ4, 0]
    plain = not any(metas) and not reserved and (not more or (more == _ZEROS and cbytes == _HEADER.size))
    if not known or not plain or not 0 < block <= _MOST_BLOCK:
        raise ChunkDamaged("a Blosc2 chunk is not of the kind that bitshuffle-lz4 writes")
