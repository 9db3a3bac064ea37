"""Where a file is cut into chunks."""

from __future__ import annotations

from tierfs.chunks import gather
from tierfs.chunks.formats import archived, npy, safetensors
from tierfs.chunks.span import Span, uncovered

_FORMATS = (safetensors, npy, archived)
"""Told apart by the content alone; a name says little on a mount where files are written under temporary ones."""


def split(source: memoryview) -> list[Span]:
    """All of the file in spans, ascending by where they begin; every byte in exactly one of them.

    ``source`` is all of the file's bytes (of a mapping, too: only headers and what is of no known format are touched).
    It must not change or shrink meanwhile. No content whatever makes this fail: what lies about its structure is cut
    by content. The same bytes always give the same spans. Takes milliseconds of Python for the headers of a large
    checkpoint; long scans release the GIL.
    """
    if len(source) < gather.SMALL:
        return gather.whole(source)
    for known in _FORMATS:
        regions = known.regions(source)
        if regions is None:
            continue
        gaps = uncovered(regions, len(source))
        if gaps is not None:
            return gather.arrange(source, regions, gaps)
    return gather.whole(source)
