"""Chains of deltas: which chunk may be stored as a delta, so that reading one never needs many others."""

from __future__ import annotations

from typing import NamedTuple

from tierfs.chunks.codec import Codec


class Link(NamedTuple):
    """How one version of a chunk is stored, as far as the next version needs to know."""

    length: int
    """Bytes of the chunk itself."""
    item: int
    depth: int
    """Other chunks that must be read before this one can be: 0 for all codecs but `delta`."""
    fetched: int
    """Stored bytes of the chunk and of those."""


class Bounds(NamedTuple):
    """How long chains get."""

    every: int = 5
    """Of so many versions in a row at least one is stored whole; with 1 all are."""
    most: float = 2.0
    """A chunk takes a delta only while what a reader fetches of its base is less than this many times its length."""


def may_follow(previous: Link | None, length: int, item: int, bounds: Bounds) -> bool:
    """Whether a chunk may be stored as a delta against ``previous``, the same chunk of the checkpoint before. Whether
    that pays is for `encode` to find out."""
    if previous is None or (previous.length, previous.item) != (length, item):
        return False
    return previous.depth + 1 < bounds.every and previous.fetched < bounds.most * length


def extend(previous: Link | None, used: Codec, length: int, item: int, stored: int) -> Link:
    """The link of a chunk stored in ``stored`` bytes with the codec ``used``, with `delta` against ``previous``."""
    if used is not Codec.DELTA:
        return Link(length, item, 0, stored)
    if previous is None:
        raise ValueError("a delta without its base")
    return Link(length, item, previous.depth + 1, previous.fetched + stored)
