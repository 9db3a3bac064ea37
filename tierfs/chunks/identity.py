"""The id of a chunk: BLAKE3 of its original bytes, whatever codec they are stored with. The only user of `blake3`.

An id names content for all who write to an archive, and equal ids are taken for equal bytes, so it takes a hash that
nobody can make collide. (Digests of files only find damage: xxh3, at several times the speed.)"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

SIZE = 32
"""Bytes of an id."""


def chunk_id(views: Iterable[memoryview | bytes]) -> bytes:
    """The id of these bytes, one after the other. Releases the GIL; one thread, as others hash other chunks."""
    digest = blake3(max_threads=1)
    for view in views:
        digest.update(view)
    return digest.digest()
