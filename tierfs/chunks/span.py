"""Values that the modules of the layout `chunks` share: what a file's parts are, and what it is cut into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST = 16 << 20
"""Bytes of the longest chunk that a file is cut into."""


class Item(NamedTuple):
    """One element of what a range of bytes holds, for codecs that look at elements."""

    size: int = 1
    """Bytes: 1, 2, 4 or 8; 1 where nothing is known."""
    floating: bool = False
    """A floating-point number, or one half of a complex one."""


UNKNOWN = Item()
SIZES = (1, 2, 4, 8)


class Extent(NamedTuple):
    """A range of a file, in bytes; never empty."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Region(NamedTuple):
    """What a format knows of a range of a file: the data of one tensor, or (``item`` None) a record of something else.
    What lies between regions (headers, padding, directories) belongs to the file's skeleton."""

    offset: int
    length: int
    item: Item | None
    name: str = ""
    """The tensor's name in the checkpoint, the same in the next one; "" when the format has none."""
    mark: int = 0
    """Any number that depends on the content of a tensor without a name."""

    @property
    def end(self) -> int:
        return self.offset + self.length


class Span(NamedTuple):
    """One chunk to be: the bytes of its extents, in this order. A chunk gathers from several places what is small."""

    extents: tuple[Extent, ...]
    """Ascending, and no two of them adjacent."""
    item: Item
    key: bytes
    """8 bytes that name what this is (which tensors, which part, how many bytes of which type) whatever its values
    are: the chunk with the same key in the checkpoint before is the one to compare with. `NO_KEY`: nobody knows."""

    @property
    def offset(self) -> int:
        """Where it begins in the file."""
        return self.extents[0].offset

    @property
    def length(self) -> int:
        """Bytes."""
        return sum(extent.length for extent in self.extents)

    def views(self, source: memoryview) -> list[memoryview]:
        """Its bytes in the file, none of them copied."""
        return [source[extent.offset : extent.end] for extent in self.extents]

    def gather(self, source: memoryview) -> memoryview:
        """Its bytes in one piece; copied only when they lie in several."""
        views = self.views(source)
        return views[0] if len(views) == 1 else memoryview(b"".join(views))


NO_KEY = bytes(8)


def uncovered(regions: Sequence[Region], size: int) -> list[Extent] | None:
    """What of a file of ``size`` bytes no region has; None when they are not ascending, overlap or leave the file."""
    found, position = [], 0
    for region in regions:
        if region.length <= 0 or region.offset < position or region.end > size:
            return None
        if region.offset > position:
            found.append(Extent(position, region.offset - position))
        position = region.end
    if position < size:
        found.append(Extent(position, size - position))
    return found
