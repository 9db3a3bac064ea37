"""From what a format knows of a file to chunks.

- A large tensor is cut at fixed offsets from its own beginning: whatever comes before it in the file shifts nothing.
- Small tensors are gathered, each group of one element type, from wherever they lie. Which tensor ends a group depends
  on that tensor alone (its name and size, or its content when it has no name), so one that is inserted, removed or
  renamed changes its own group and hardly another; and groups are the same in the next checkpoint, whose values differ.
- What lies between the tensors is gathered likewise, apart from them: headers with the archive's name and checksums,
  the central directory, pickles. It is what differs between two files of the same tensors.
- What is long and of no known type is cut by content.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from tierfs.chunks import content
from tierfs.chunks.span import MOST, NO_KEY, UNKNOWN, Extent, Item, Region, Span

PIECE = 8 << 20
"""Bytes of the pieces of a tensor that is longer than a chunk may be; the last one has up to twice as many."""
SMALL = 128 << 10
"""Tensors, records and gaps below this many bytes are gathered."""
TINY = 64
"""Tensors up to this many bytes go with what lies between the tensors: the headers around them are hardly shorter, and
contain their checksums."""
GROUP_LEAST, GROUP_MORE, GROUP_MOST = 32 << 10, 32 << 10, 128 << 10
"""Bytes gathered in one chunk: as many at least, as many more on average, and the end when as many are reached. One
tensor that changed sends its whole group, so groups are small."""


def arrange(source: memoryview, regions: Sequence[Region], gaps: Sequence[Extent]) -> list[Span]:
    """The file in spans, by where they begin. ``regions`` and ``gaps`` are ascending and cover it, each byte once."""
    spans: list[Span] = []
    groups: dict[Item | None, _Group] = {}
    for part in _parts(regions, gaps):
        if part.extent.length >= SMALL:
            spans += _opaque(source, part.extent) if part.item is None else _pieces(part, part.item)
            continue
        kind = part.item if part.extent.length > TINY else None
        group = groups.setdefault(kind, _Group())
        group.add(part)
        if group.is_complete(part):
            spans.append(group.span(kind))
            del groups[kind]
    spans += [group.span(kind) for kind, group in groups.items()]
    return sorted(spans)


def whole(source: memoryview) -> list[Span]:
    """The file in spans, when nothing is known of it."""
    size = len(source)
    if size < SMALL:
        return [Span((Extent(0, size),), UNKNOWN, NO_KEY)] if size else []
    return list(_opaque(source, Extent(0, size)))


class _Part(NamedTuple):
    extent: Extent
    item: Item | None
    """None: no tensor."""
    label: bytes
    """What this is in this checkpoint and the next."""
    mark: int
    """64 bits that decide whether a group ends with it."""


def _parts(regions: Sequence[Region], gaps: Sequence[Extent]) -> Iterator[_Part]:
    """All of the file in order. What is no tensor goes by the name of the tensor that follows."""
    tensors = iter(_tensors(regions))
    following = next(tensors, _END)
    others = [Extent(region.offset, region.length) for region in regions if region.item is None]
    for extent in sorted([*gaps, *others]):
        while _END is not following and following.extent.offset < extent.offset:
            yield following
            following = next(tensors, _END)
        yield _Part(extent, None, following.label, following.mark)
    if following is not _END:
        yield following
    yield from tensors


_END = _Part(Extent(-1, 0), None, b"", 0)
"""Follows the last tensor."""


def _tensors(regions: Sequence[Region]) -> Iterator[_Part]:
    """Those without a name go by how many of the same type and length came before."""
    before: Counter[tuple[Item, int]] = Counter()
    for offset, length, item, name, mark in regions:
        if item is None:
            continue
        kind = _KIND.pack(*item, length)
        if name:
            label = name.encode(errors="replace")
            number = _number(kind + label)
        else:
            label = b"%d" % before[item, length]
            before[item, length] += 1
            number = _number(kind + struct.pack("<Q", mark))
        yield _Part(Extent(offset, length), item, kind + label, number)


_KIND = struct.Struct("<B?Q")


def _number(raw: bytes) -> int:
    return xxhash.xxh3_64_intdigest(raw)


def _pieces(part: _Part, item: Item) -> Iterator[Span]:
    """A tensor in chunks of `PIECE`, the last one of up to `MOST`."""
    offset, end = part.extent.offset, part.extent.end
    while offset < end:
        length = end - offset if end - offset <= MOST else PIECE
        key = xxhash.xxh3_64_digest(part.label + struct.pack("<2Q", offset - part.extent.offset, length))
        yield Span((Extent(offset, length),), item, key)
        offset += length


def _opaque(source: memoryview, extent: Extent) -> Iterator[Span]:
    return (Span((found,), UNKNOWN, NO_KEY) for found in content.cut(source, extent))


class _Group:
    """Small parts on their way into one chunk."""

    def __init__(self) -> None:
        self._extents: list[Extent] = []
        self._length = 0
        self._label = xxhash.xxh3_64()

    def add(self, part: _Part) -> None:
        extent = part.extent
        if self._extents and self._extents[-1].end == extent.offset:
            last = self._extents.pop()
            extent = Extent(last.offset, last.length + extent.length)
        self._extents.append(extent)
        self._length += part.extent.length
        self._label.update(struct.pack("<2Q", len(part.label), part.extent.length) + part.label)

    def is_complete(self, last: _Part) -> bool:
        """Whether the group ends with the part that was added last: the likelier, the longer that part is, so that
        the mean holds for parts of every length."""
        if self._length >= GROUP_MOST:
            return True
        return self._length >= GROUP_LEAST and last.mark * GROUP_MORE < last.extent.length << 64

    def span(self, item: Item | None) -> Span:
        key = _number(self._label.digest() + (b"tensors" if item else b"skeleton"))
        return Span(tuple(self._extents), item or UNKNOWN, struct.pack("<Q", key))
