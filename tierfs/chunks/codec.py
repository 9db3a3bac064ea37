"""Codecs: a chunk's bytes to what is stored of them, and back. Lossless for all input; docs/CODECS.md has the formats.

Every call stays in the calling thread, releases the GIL for all that takes time, shares no state with other calls and
takes less than twice the memory of the chunk on top of what it is given. Whether a payload decodes to the right bytes
is for the caller to check by their digest: not all damage is noticed here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import imagecodecs
import numpy as np

from tierfs.chunks import blosc, planes
from tierfs.chunks.manifest import CHUNK_LIMIT
from tierfs.chunks.planes import Octets, pays, sample
from tierfs.errors import ChunkDamaged

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

WIDEST = 16
"""Bytes of the longest item; wider ones are no numbers, and gain nothing from being shuffled."""

_SHORTEST = 128
"""Below, headers cost what a codec gains."""

_DELTA_PAYS = 0.95
"""A delta must be this much smaller than the same bytes without a base: it ties the chunk to another one."""


class Codec(enum.IntEnum):
    """How a chunk's bytes are stored. In manifests: never renumber."""

    NONE = 0
    LZ4 = 1
    BITSHUFFLE_LZ4 = 2
    SHUFFLE_ZSTD = 3
    DELTA = 4

    @property
    def label(self) -> str:
        """Its name in the policy file."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def labelled(cls, label: str) -> Codec:
        """The codec of that name; ValueError when there is none."""
        for codec in cls:
            if codec.label == label:
                return codec
        raise ValueError(f"no codec {label!r}; there are {', '.join(codec.label for codec in cls)}")


class Encoded(NamedTuple):
    """What to store of a chunk."""

    codec: Codec
    """The codec that was used: the one asked for, or `NONE` or `SHUFFLE_ZSTD` where that does not pay."""
    payload: memoryview
    """With `NONE` the caller's own bytes, not copied."""


def encode(codec: Codec, data: ReadableBuffer, item: int, base: ReadableBuffer | None = None) -> Encoded:
    """``data`` as ``codec`` stores it, or less elaborately where that does not pay, which samples tell beforehand.

    ``item`` is the size in bytes of what the data consists of (2 for bf16); the length need not be a multiple.
    ``base``, for `DELTA`, is what the delta is made against; one of another length is not used. Raises ValueError for a
    buffer that is not one piece of memory, an item of no size or wider than `WIDEST`, more than `CHUNK_LIMIT` bytes.
    """
    octets = _octets(data, "a chunk")
    if not 1 <= item <= WIDEST:
        raise ValueError(f"an item of {item} bytes; 1 to {WIDEST} are possible")
    if len(octets) > CHUNK_LIMIT:
        raise ValueError(f"a chunk of {len(octets)} bytes; {CHUNK_LIMIT} are possible")
    if codec is not Codec.NONE and len(octets) >= _SHORTEST:
        against = _octets(base, "the base of a delta") if base is not None and codec is Codec.DELTA else None
        used, packed = _pack(codec, octets, item, against)
        if packed is not None:
            return Encoded(used, _trimmed(packed))
    return Encoded(Codec.NONE, octets.data)


def decode(
    codec: Codec, payload: ReadableBuffer, length: int, item: int, base: ReadableBuffer | None = None
) -> memoryview:
    """The ``length`` bytes of which ``payload`` was made; with `NONE` the payload itself, not copied.

    Raises `ChunkDamaged` when the payload cannot be what `encode` made of that many bytes, and allocates no more than
    those; ValueError when a `DELTA` comes without its base, or when the arguments are impossible as for `encode`.
    """
    if codec is Codec.NONE:
        octets = _octets(payload, "a payload")
        _fits(octets, length)
        return octets.data
    if not 0 <= length <= CHUNK_LIMIT:
        raise ValueError(f"a chunk of {length} bytes; {CHUNK_LIMIT} are possible")
    out = np.empty(length, np.uint8)
    decode_into(codec, payload, out.data, item, base)
    return out.data


def decode_into(
    codec: Codec, payload: ReadableBuffer, out: WriteableBuffer, item: int, base: ReadableBuffer | None = None
) -> None:
    """As `decode`, into memory of the caller's: ``out`` is exactly as long as the chunk. After an error its content is
    undefined."""
    octets, filled = _octets(payload, "a payload"), _octets(out, "the place to decode to")
    if not filled.flags.writeable:
        raise ValueError("the place to decode to is read-only")
    if not 1 <= item <= WIDEST:
        raise ValueError(f"an item of {item} bytes; 1 to {WIDEST} are possible")
    if codec is Codec.NONE:
        _fits(octets, len(filled))
        filled[:] = octets
    elif len(filled) < _SHORTEST:
        raise ChunkDamaged(f"a chunk of {len(filled)} bytes is never stored as {codec.label}")
    elif codec is Codec.LZ4:
        _lz4_unpack(octets, filled)
    elif codec is Codec.BITSHUFFLE_LZ4:
        blosc.unpack(octets, filled, item)
    elif codec is Codec.SHUFFLE_ZSTD:
        planes.unpack(octets, filled, item)
    else:
        if base is None:
            raise ValueError("a delta without its base")
        against = _octets(base, "the base of a delta")
        if len(against) != len(filled):
            raise ChunkDamaged(f"a delta of {len(filled)} bytes has a base of {len(against)}")
        planes.unpack(octets, filled, item, against)


def _pack(codec: Codec, data: Octets, item: int, base: Octets | None) -> tuple[Codec, Octets | None]:
    """The codec that was used and what it made of the data; None when nothing is gained."""
    if codec is Codec.DELTA:
        codec = Codec.DELTA if base is not None and _gains(data, base, item) else Codec.SHUFFLE_ZSTD
    packed: Octets | None = None
    if codec is Codec.DELTA:
        packed = planes.pack(data, item, base)  # its samples were looked at
    elif codec is Codec.SHUFFLE_ZSTD:
        packed = planes.pack(data, item)  # samples each plane itself
    else:
        pack = _lz4_pack if codec is Codec.LZ4 else blosc.pack
        probe = sample(data, item)
        if len(probe) == len(data) or pays(len(pack(probe, item)), len(probe)):
            packed = pack(data, item)
    return codec, packed if packed is not None and pays(len(packed), len(data)) else None


def _gains(data: Octets, base: Octets, item: int) -> bool:
    """Whether a delta is smaller than the data by itself, and than nothing at all, as far as samples tell."""
    if len(base) != len(data):
        return False
    size = planes.SAMPLE * item
    changed, against = sample(data, item, size), sample(base, item, size)
    delta, alone = len(planes.pack(changed, item, against)), len(planes.pack(changed, item))
    return pays(delta, len(changed)) and delta < _DELTA_PAYS * alone


def _lz4_pack(data: Octets, item: int) -> Octets:
    packed = np.empty(len(data) + len(data) // 255 + 16, np.uint8)
    return packed[: len(imagecodecs.lz4_encode(data.data, out=packed.data))]


def _lz4_unpack(payload: Octets, out: Octets) -> None:
    try:
        done = imagecodecs.lz4_decode(payload.data, out=out.data)
    except (imagecodecs.Lz4Error, ValueError) as error:
        raise ChunkDamaged(f"an LZ4 block cannot be decompressed: {error}") from error
    if len(done) != len(out):
        raise ChunkDamaged(f"an LZ4 block of {len(out)} bytes has {len(done)}")


def _octets(data: ReadableBuffer, what: str) -> Octets:
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"{what} is not one piece of memory (strides {view.strides}, shape {view.shape})")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _fits(payload: Octets, length: int) -> None:
    if len(payload) != length:
        raise ChunkDamaged(f"a chunk of {length} bytes, stored as it is, has {len(payload)}")


def _trimmed(packed: Octets) -> memoryview:
    """Without the memory behind it, where that is much: payloads wait for their upload."""
    whole = packed.base
    wasteful = isinstance(whole, np.ndarray) and len(packed) < 0.75 * whole.nbytes
    return (packed.copy() if wasteful else packed).data
