"""Byte planes: what the codecs `shuffle-zstd` and `delta` store (docs/CODECS.md has the format).

The first bytes of all items, then all second bytes and so on: of a float the byte with sign and exponent has few values
and shrinks to a third, the lower bytes of the mantissa are noise. Each plane is a zstd frame or stored as it is,
whichever suits it, so noise costs a copy to write and to read, not a pass of zstd.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from tierfs.errors import ChunkDamaged

Octets: TypeAlias = npt.NDArray[np.uint8]

SAMPLE = 64 << 10
"""Bytes of a plane that tell how to store all of it."""

_PARTS = 4
_STEP = 256 << 10
"""Bytes that are compared with the base and split at a time: they stay in the second-level cache."""

_LITERALS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=20, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0
)
"""Hardly looks for repetitions, so nearly all is entropy coding: on exponents 2.5 times as fast as level 1 and a tenth
smaller, because the short repetitions that level 1 finds there are chance, and cost more than they save."""

_MATCHES = zstandard.ZstdCompressionParameters.from_level(1)
"""For planes that do repeat: counters, tables, text."""


def sample(data: Octets, item: int, size: int = SAMPLE) -> Octets:
    """About ``size`` bytes of whole items from all over ``data``; all of it when it is hardly longer."""
    whole = len(data) // item * item
    if whole <= 2 * size:
        return data[:whole]
    part = max(1, size // _PARTS // item) * item
    gap = (whole - part) // (_PARTS - 1) // item * item
    return np.concatenate([data[start : start + part] for start in range(0, _PARTS * gap, gap)])


def pack(data: Octets, item: int, base: Octets | None = None) -> Octets:
    """``data``, or its XOR with a ``base`` of the same length, as byte planes. Takes the memory of the data and of one
    plane; the result is at most `overhead` longer than the data, and the memory behind it is that of the data."""
    count, head = len(data) // item, overhead(item)
    packed = np.empty(head + len(data), np.uint8)
    rest = packed[head + count * item :]
    planes = packed[head : head + count * item].reshape(item, count)
    if item == 1 and base is None:
        planes = data.reshape(1, count)
    else:
        _split(data, base, planes, rest)
    # The planes lie where the packed ones go: those are never longer, so each is read before its place is taken.
    end, sizes = head, []
    for plane in planes:
        frame = _shrink(plane)
        stored: Octets = plane if frame is None else np.frombuffer(frame, np.uint8)
        packed[end : end + len(stored)] = stored
        end += len(stored)
        sizes.append(len(stored))
        del frame, stored  # not kept while the next plane is compressed
    packed[end : end + len(rest)] = rest
    packed[:head] = np.frombuffer(struct.pack(f"<{item}I", *sizes), np.uint8)
    return packed[: end + len(rest)]


def unpack(packed: Octets, out: Octets, item: int, base: Octets | None = None) -> None:
    """The inverse of `pack`: fills ``out``. Whatever ``packed`` holds, nothing larger than a plane of ``out`` is
    allocated; raises `ChunkDamaged` when it is not what `pack` writes for that many bytes."""
    count, head = len(out) // item, overhead(item)
    if len(packed) < head:
        raise ChunkDamaged(f"a chunk of byte planes ends after {len(packed)} bytes, within its header")
    sizes = struct.unpack_from(f"<{item}I", packed.data)
    tail = len(out) - count * item
    if head + sum(sizes) + tail != len(packed) or max(sizes) > count:
        raise ChunkDamaged(f"a chunk of byte planes of {len(packed)} bytes has planes of {sum(sizes)} bytes")
    items = out[: count * item].reshape(count, item)
    for number, stored in enumerate(_bodies(packed[head:], sizes)):
        items[:, number] = stored if len(stored) == count else _grow(stored, count)
    out[count * item :] = packed[len(packed) - tail :]
    if base is not None:
        np.bitwise_xor(out, base, out=out)


def overhead(item: int) -> int:
    """Bytes of the header: a length per plane."""
    return 4 * item


def _bodies(planes: Octets, sizes: Sequence[int]) -> Iterator[Octets]:
    start = 0
    for size in sizes:
        yield planes[start : start + size]
        start += size


def _split(data: Octets, base: Octets | None, planes: Octets, rest: Octets) -> None:
    item, count = planes.shape
    step = max(1, _STEP // item)
    scratch = np.empty(step * item, np.uint8)
    for first in range(0, count, step):
        last = min(first + step, count)
        piece = data[first * item : last * item]
        if base is not None:
            piece = np.bitwise_xor(piece, base[first * item : last * item], out=scratch[: len(piece)])
        planes[:, first:last] = piece.reshape(-1, item).T
    rest[:] = data[count * item :]
    if base is not None:
        np.bitwise_xor(rest, base[count * item :], out=rest)


def _shrink(plane: Octets) -> bytes | None:
    """The zstd frame of a plane; None when the plane is better stored as it is."""
    probe = sample(plane, 1)
    literals, matches = (len(_frame(probe, settings)) for settings in (_LITERALS, _MATCHES))
    if not pays(min(literals, matches), len(probe)):
        return None
    frame = _frame(plane, _MATCHES if matches < 0.9 * literals else _LITERALS)
    return frame if pays(len(frame), len(plane)) else None


def pays(size: int, original: int) -> bool:
    """Whether ``size`` bytes instead of ``original`` are worth the time to decode them."""
    return size < original - (original >> 6)


def _frame(plane: Octets, settings: zstandard.ZstdCompressionParameters) -> bytes:
    # One compressor per call: they are not safe to share between threads, and cost microseconds.
    return zstandard.ZstdCompressor(compression_params=settings).compress(plane.data)


def _grow(frame: Octets, count: int) -> Octets:
    try:
        header = zstandard.get_frame_parameters(frame.data)
        # The library allocates what the header asks for, so that is compared before.
        if header.content_size != count or header.dict_id or header.window_size > max(count, 1 << 20):
            raise ChunkDamaged(f"a byte plane of {count} bytes says that it has {header.content_size}")
        plane = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ChunkDamaged(f"a byte plane cannot be decompressed: {error}") from error
    if len(plane) != count:
        raise ChunkDamaged(f"a byte plane of {count} bytes has {len(plane)}")
    return np.frombuffer(plane, np.uint8)
