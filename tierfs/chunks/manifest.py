"""The manifest of one version of a file in the layout `chunks`: all that restores the file from its chunks.

docs/FORMAT.md describes the bytes; this module and that document change together, and the number in the first line with
them. Manifests are read back from storage that anybody may have damaged or forged: `decode` takes nothing for granted,
and what it returns covers the file without gaps or overlaps, with chunks of plausible sizes.
"""

from __future__ import annotations

import itertools
import json
import re
import stat
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from tierfs.chunks.span import NO_KEY, SIZES, Extent, Item, Span
from tierfs.errors import ManifestDamaged

VERSION = 1
ID_SIZE = 32
LIMIT = 32 << 20
"""Bytes of a manifest: a file of 4 TB in chunks of 8 MiB needs as many. (Decoded it takes ten times the memory.)"""
CHUNK_LIMIT = 64 << 20
"""Bytes of a chunk, and of what a codec makes of it."""
BASES_LIMIT = 255
"""Chunks that one chunk needs to be decoded."""
STORED_LIMIT = CHUNK_LIMIT + (1 << 10)
"""Bytes of a chunk as it is stored, with its header."""

_MOST = (1 << 63) - 1
_FIRST_LINE = re.compile(rb"tierfs-manifest ([1-9][0-9]{0,5}) ([0-9a-f]{32}) (0|[1-9][0-9]{0,9})\n")
_FIRST_LINE_LIMIT = 128
_CHUNK = struct.Struct("<32s8sIIBBBB")
_BASE = struct.Struct("<32sBI")
_RUN = struct.Struct("<II")
_FIELDS = {"size", "digest", "mode", "uid", "gid", "mtime_ns", "xattrs", "link", "notes", "chunks", "bases", "runs"}


class Base(NamedTuple):
    """A chunk that another one needs to be decoded. It has as many bytes of the same kind as that one."""

    id: bytes
    codec: int
    stored: int
    """Bytes, as stored."""


class Chunk(NamedTuple):
    """Some bytes of the file, and how they are stored."""

    id: bytes
    """BLAKE3 of the original bytes (`identity.chunk_id`)."""
    length: int
    """Bytes, originally."""
    item: Item
    key: bytes
    """As in `span.Span`: finds the chunk of the checkpoint before that this one compares with."""
    codec: int
    """Number of the codec that it was stored with, 0 for none."""
    stored: int
    """Bytes, as stored, with the header before them."""
    bases: tuple[Base, ...] = ()
    """The chunk that this one is stored as the difference to, then the one that that one is, and so on to one that
    stands alone. All of them are listed, so that the manifest alone says what may not be removed."""

    @property
    def fetched(self) -> int:
        """Bytes to fetch for decoding it."""
        return self.stored + sum(base.stored for base in self.bases)


class Run(NamedTuple):
    """The next bytes of a chunk: the file is its runs, one after the other."""

    chunk: int
    """Number of the chunk in the manifest."""
    length: int


class Part(NamedTuple):
    """A range of the file within one chunk."""

    chunk: int
    inside: int
    """Where it begins in the chunk's bytes."""
    offset: int
    """Where it begins in the file."""
    length: int


@dataclass(frozen=True)
class Manifest:
    size: int
    """Bytes of the file."""
    digest: bytes
    """Tree digest of the file (docs/DURABILITY.md)."""
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    chunks: tuple[Chunk, ...]
    """By where they begin in the file. The same content may occur more than once."""
    runs: tuple[Run, ...]
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)
    link: bytes = b""
    """The same in the manifests of all names of a file with several hard links, and in no other; empty for one name."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """More that whoever wrote it wants to know later; no part of restoring the file."""

    @cached_property
    def _starts(self) -> list[int]:
        """Where each run begins in the file, and the file's end."""
        return list(itertools.accumulate((run.length for run in self.runs), initial=0))

    @cached_property
    def _inside(self) -> list[int]:
        """Where each run begins in its chunk."""
        found, position = [], [0] * len(self.chunks)
        for chunk, length in self.runs:
            found.append(position[chunk])
            position[chunk] += length
        return found

    def parts(self, offset: int, length: int) -> list[Part]:
        """What to read for ``length`` bytes of the file (fewer at its end) from ``offset`` on, in order."""
        end = min(offset + length, self.size)
        if offset < 0 or offset >= end:
            return []
        found = []
        for number in range(bisect_right(self._starts, offset) - 1, len(self.runs)):
            start = self._starts[number]
            if start >= end:
                break
            first, last = max(start, offset), min(self._starts[number + 1], end)
            found.append(Part(self.runs[number].chunk, self._inside[number] + first - start, first, last - first))
        return found

    def extents(self) -> list[list[Extent]]:
        """Where the bytes of each chunk belong in the file, in order."""
        found: list[list[Extent]] = [[] for _ in self.chunks]
        for start, (chunk, length) in zip(self._starts, self.runs, strict=False):
            found[chunk].append(Extent(start, length))
        return found

    def references(self) -> set[bytes]:
        """The ids of all chunks that must stay in the archive for this file."""
        return {chunk.id for chunk in self.chunks} | {base.id for chunk in self.chunks for base in chunk.bases}


def runs(spans: Sequence[Span]) -> tuple[Run, ...]:
    """How the file is made of these spans, which are its chunks in this order."""
    pieces = sorted((extent, number) for number, span in enumerate(spans) for extent in span.extents)
    return tuple(Run(number, extent.length) for extent, number in pieces)


def encode(manifest: Manifest) -> bytes:
    """Raises `ManifestDamaged` when the manifest says what `decode` would not believe."""
    _check(manifest)
    bases = [base for chunk in manifest.chunks for base in chunk.bases]
    attributes = {
        "size": manifest.size,
        "digest": manifest.digest.hex(),
        "mode": manifest.mode,
        "uid": manifest.uid,
        "gid": manifest.gid,
        "mtime_ns": manifest.mtime_ns,
        "xattrs": {name.decode("latin-1"): value.decode("latin-1") for name, value in manifest.xattrs.items()},
        "link": manifest.link.hex(),
        "notes": dict(manifest.notes),
        "chunks": len(manifest.chunks),
        "bases": len(bases),
        "runs": len(manifest.runs),
    }
    body = b"".join(
        (
            json.dumps(attributes, separators=(",", ":")).encode("ascii"),
            b"\n",
            *(_CHUNK.pack(c.id, c.key, c.length, c.stored, c.codec, *c.item, len(c.bases)) for c in manifest.chunks),
            *(_BASE.pack(*base) for base in bases),
            *(_RUN.pack(*run) for run in manifest.runs),
        )
    )
    raw = b"tierfs-manifest %d %s %d\n" % (VERSION, xxhash.xxh3_128_hexdigest(body).encode(), len(body)) + body
    if len(raw) > LIMIT:
        raise ManifestDamaged(f"manifest: {len(raw)} bytes are more than {LIMIT}")
    return raw


def decode(raw: bytes) -> Manifest:
    """Raises `ManifestDamaged`: no manifest, of another format, damaged, or says what cannot be."""
    first = _FIRST_LINE.match(raw[:_FIRST_LINE_LIMIT])
    if first is None:
        raise ManifestDamaged("manifest: does not begin with the line of a manifest")
    if int(first[1]) != VERSION:
        raise ManifestDamaged(f"manifest: has format {int(first[1])}, this tierfs reads format {VERSION}")
    body = memoryview(raw)[first.end() :]
    if len(raw) > LIMIT or len(body) != int(first[3]):
        raise ManifestDamaged(f"manifest: has {len(body)} bytes after the first line instead of {int(first[3])}")
    if xxhash.xxh3_128_hexdigest(body).encode() != first[2]:
        raise ManifestDamaged("manifest: its bytes are not those that were written")
    try:
        manifest = _parse(body)
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise ManifestDamaged(f"manifest: {error}") from error
    _check(manifest)
    return manifest


def _parse(body: memoryview) -> Manifest:
    line = bytes(body).find(b"\n")
    fields: Any = json.loads(bytes(body[: max(line, 0)]))
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise ValueError("not the attributes of a manifest")
    chunks, bases, run_count = (_number(fields[name]) for name in ("chunks", "bases", "runs"))
    tables = body[line + 1 :]
    chunks_end = chunks * _CHUNK.size
    bases_end = chunks_end + bases * _BASE.size
    if len(tables) != bases_end + run_count * _RUN.size:
        raise ValueError("tables of other lengths than the attributes say")
    rest = map(Base._make, _BASE.iter_unpack(tables[chunks_end:bases_end]))
    found = []
    for ident, key, length, stored, codec, item_size, floating, count in _CHUNK.iter_unpack(tables[:chunks_end]):
        if floating > 1:
            raise ValueError("an element that is neither a float nor none")
        needed = tuple(itertools.islice(rest, count))
        if len(needed) != count:
            raise ValueError("fewer bases than the chunks say")
        found.append(Chunk(ident, length, Item(item_size, bool(floating)), key, codec, stored, needed))
    if next(rest, None) is not None:
        raise ValueError("more bases than the chunks say")
    return Manifest(
        size=_number(fields["size"]),
        digest=bytes.fromhex(_text(fields["digest"])),
        mode=_number(fields["mode"]),
        uid=_number(fields["uid"]),
        gid=_number(fields["gid"]),
        mtime_ns=_integer(fields["mtime_ns"]),
        chunks=tuple(found),
        runs=tuple(map(Run._make, _RUN.iter_unpack(tables[bases_end:]))),
        xattrs={name.encode("latin-1"): value.encode("latin-1") for name, value in _texts(fields["xattrs"]).items()},
        link=bytes.fromhex(_text(fields["link"])),
        notes=_texts(fields["notes"]),
    )


def _integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is no integer")
    return value


def _number(value: object) -> int:
    found = _integer(value)
    if found < 0:
        raise ValueError(f"{found} is negative")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is no object")
    return {name: _text(text) for name, text in value.items()}


def _check(manifest: Manifest) -> None:
    """Everything that holds of a manifest whatever its bytes look like."""
    _require(0 <= manifest.size <= _MOST, "size out of range")
    _require(0 <= manifest.mode <= 0o177777 and stat.S_ISREG(manifest.mode), "no regular file")
    _require(0 <= manifest.uid <= 0xFFFFFFFF and 0 <= manifest.gid <= 0xFFFFFFFF, "owner out of range")
    _require(abs(manifest.mtime_ns) <= _MOST, "mtime out of range")
    _require(len(manifest.digest) == 16, "digest of another length")
    _require(len(manifest.link) <= 64, "identity of hard links too long")
    _require(all(is_xattr(name) for name in manifest.xattrs), "no xattr of a user")
    for chunk in manifest.chunks:
        _check_chunk(chunk)
    _check_content((chunk.id, chunk.length) for chunk in manifest.chunks)
    _check_runs(manifest)


def _check_chunk(chunk: Chunk) -> None:
    _require(len(chunk.id) == ID_SIZE and len(chunk.key) == len(NO_KEY), "id or key of another length")
    _require(0 < chunk.length <= CHUNK_LIMIT and 0 < chunk.stored <= STORED_LIMIT, "length of a chunk out of range")
    _require(chunk.item.size in SIZES and 0 <= chunk.codec <= 255, "element or codec of a chunk out of range")
    _require(chunk.codec != 0 or (chunk.stored >= chunk.length and not chunk.bases), "chunk without a codec is changed")
    if chunk.bases:
        _require(len(chunk.bases) <= BASES_LIMIT, "too many bases")
        _require(len({chunk.id, *(base.id for base in chunk.bases)}) == len(chunk.bases) + 1, "a chunk based on itself")
        for base in chunk.bases:
            _require(len(base.id) == ID_SIZE and 0 < base.stored <= STORED_LIMIT, "base of a chunk is none")
            _require(0 <= base.codec <= 255, "codec of a base out of range")


def _check_content(chunks: Iterable[tuple[bytes, int]]) -> None:
    lengths: dict[bytes, int] = {}
    for ident, length in chunks:
        _require(lengths.setdefault(ident, length) == length, "one id with two lengths")


def _check_runs(manifest: Manifest) -> None:
    """Runs make the whole file, each chunk whole, and chunks are in the order of their first bytes."""
    missing = [chunk.length for chunk in manifest.chunks]
    begun, total = 0, 0
    for chunk, length in manifest.runs:
        _require(chunk <= begun and chunk < len(missing) and length > 0, "run of a chunk that is not there")
        begun += chunk == begun
        missing[chunk] -= length
        _require(missing[chunk] >= 0, "runs of a chunk longer than it is")
        total += length
    _require(not any(missing) and total == manifest.size, "chunks or file not covered")


def is_xattr(name: bytes) -> bool:
    """Whether a manifest has attributes of this name."""
    return name.startswith(b"user.") and not name.startswith(b"user.tierfs.") and len(name) <= 255 and b"\0" not in name


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ManifestDamaged(f"manifest: {problem}")
