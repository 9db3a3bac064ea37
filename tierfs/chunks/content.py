"""Boundaries that the content itself sets (FastCDC): bytes put in or taken out move no boundary but those beside them.
The only user of `pyfastcdc`, which scans at some GB/s per core with the GIL released.

Boundaries depend on nothing but the bytes and the scale. Another algorithm, or other numbers here, costs no more than
that the next version of every such file is stored anew: a manifest says where its file was cut.
"""

from __future__ import annotations

from typing import NamedTuple

from pyfastcdc import FastCDC

from tierfs.chunks.span import Extent


class Scale(NamedTuple):
    """Bytes of the chunks that come out: never below ``least`` (but the last one) or above ``most``, about
    ``least + mean`` on average."""

    least: int
    mean: int
    most: int


FINE = Scale(16 << 10, 64 << 10, 256 << 10)
MIDDLE = Scale(256 << 10, 1 << 20, 4 << 20)
COARSE = Scale(1 << 20, 4 << 20, 16 << 20)


def scale_of(length: int) -> Scale:
    """The scale for a range of this many bytes. An edit costs a chunk or two, and a chunk costs a request: so what is
    short is cut fine and what is very long into fewer parts. A range that grows past a limit is stored anew once."""
    if length <= 4 << 20:
        return FINE
    return MIDDLE if length <= 1 << 30 else COARSE


def cut(source: memoryview, extent: Extent, scale: Scale | None = None) -> list[Extent]:
    """The extent in parts, in order and without gaps."""
    scale = scale or scale_of(extent.length)
    if extent.length <= scale.least:
        return [extent]
    found, offset = [], extent.offset
    for chunk in FastCDC(scale.mean, min_size=scale.least, max_size=scale.most).cut_buf(source[offset : extent.end]):
        found.append(Extent(offset, chunk.length))
        offset += chunk.length
    return found
