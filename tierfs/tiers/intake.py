"""A file's bytes into the chunks of an archive: cut, named, compared with what is there, encoded, written.

What is stable is mapped and cut by its own structure. Anything else, and what has holes, is read in parts of 4 MiB that
are chunks as they are: a chunk's id, what is stored and the digest must be of the same look at bytes that may change,
and a mapping would fill the holes of a tmpfs. All that takes time releases the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tierfs.chunks import frame, manifest
from tierfs.chunks.codec import Codec, encode
from tierfs.chunks.identity import chunk_id
from tierfs.chunks.manifest import Chunk, Manifest
from tierfs.chunks.span import NO_KEY, UNKNOWN, Extent, Item, Span
from tierfs.chunks.split import split
from tierfs.errors import SourceChanged
from tierfs.tiers.content import too_short
from tierfs.tiers.copy import (
    CHUNK,
    Reading,
    Throttle,
    chunk_digest,
    data_extents,
    each,
    is_sparse,
    is_tmpfs,
    read_chunk,
    tree_digest,
    zero_digest,
)
from tierfs.tiers.pool import ChunkPool

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14: what cannot be read is an error there, and not a SIGBUS later."""
_WINDOW = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Intake:
    """One file on its way into the pool."""

    def __init__(
        self,
        pool: ChunkPool,
        fd: int,
        size: int,
        codec: Codec,
        *,
        streams: int,
        nice: int,
        throttle: Throttle,
        cancelled: Callable[[], bool],
    ) -> None:
        """``fd``, open for reading, is borrowed. ``throttle`` is called with the bytes of each chunk. Up to ``streams``
        threads, of the level ``nice`` if that is not 0, do the work."""
        self._pool, self._fd, self._size, self._codec = pool, fd, size, codec
        self._streams, self._nice, self._throttle, self._cancelled = streams, nice, throttle, cancelled
        self._digests = [b""] * -(-size // CHUNK)

    def store(self, *, stable: bool, reading: Reading) -> tuple[Manifest, list[bytes]]:
        """Store what is not there yet: the manifest, with the attributes of nobody's file, and the digests of the parts
        of 4 MiB. ``stable`` promises that nobody changes the source before ``reading`` is ended. Raises OSError;
        SourceChanged when the source is shorter, or ``cancelled`` says so."""
        with self._mapped(reading if stable else None) as view:
            spans, chunks = self._parts() if view is None else self._spans(view, reading)
        made = Manifest(
            size=self._size,
            digest=tree_digest(self._digests),
            mode=stat.S_IFREG | 0o600,
            uid=0,
            gid=0,
            mtime_ns=0,
            chunks=tuple(chunks),
            runs=manifest.runs(spans),
        )
        return made, self._digests

    # what is mapped

    @contextlib.contextmanager
    def _mapped(self, reading: Reading | None) -> Iterator[memoryview | None]:
        """The source as a whole; None where looking at it could end in SIGBUS."""
        if reading is None or self._size == 0 or is_sparse(self._fd, self._size):
            yield None
            return
        if os.fstat(self._fd).st_size < self._size:
            raise too_short(self._size)
        mapping = mmap.mmap(self._fd, self._size, prot=mmap.PROT_READ)
        view = memoryview(mapping)
        try:
            yield view if is_tmpfs(self._fd) or self._populated(mapping) else None
        finally:
            view.release()
            with contextlib.suppress(BufferError):  # an error's frames may still look at it
                mapping.close()

    def _populated(self, mapping: mmap.mmap) -> bool:
        """Read all of it from its disk, and find out whether that can be done."""
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        for offset in range(0, self._size, _WINDOW):
            if self._cancelled():
                raise SourceChanged("the copy was cancelled")
            self._throttle(0)
            if _libc.madvise(address + offset, min(_WINDOW, self._size - offset), _POPULATE_READ):
                code = ctypes.get_errno()
                if code == errno.EINVAL:  # an older kernel
                    return False
                raise OSError(errno.EIO if code == errno.EFAULT else code, "the source cannot be read")
        return True

    def _spans(self, view: memoryview, reading: Reading) -> tuple[list[Span], list[Chunk]]:
        with reading:
            spans = split(view)
        found: list[Chunk | None] = [None] * len(spans)

        def look(offset: int) -> None:
            with reading:
                self._digests[offset // CHUNK] = chunk_digest(view[offset : min(offset + CHUNK, self._size)])

        def work(number: int) -> None:
            span = spans[number]
            self._throttle(span.length)
            with reading:
                data = span.gather(view)
                ident = chunk_id([data])
            found[number] = self._put(ident, data, span, reading)

        self._each(range(0, self._size, CHUNK), look)
        self._each(range(len(spans)), work)
        return spans, [chunk for chunk in found if chunk is not None]

    # what is read

    def _parts(self) -> tuple[list[Span], list[Chunk]]:
        size = self._size
        spans = [
            Span((Extent(offset, min(CHUNK, size - offset)),), UNKNOWN, NO_KEY) for offset in range(0, size, CHUNK)
        ]
        found: list[Chunk | None] = [None] * len(spans)
        sparse = size > 0 and is_sparse(self._fd, size)

        def work(offset: int) -> None:
            number, length = offset // CHUNK, min(CHUNK, size - offset)
            self._throttle(length)
            if sparse and not data_extents(self._fd, offset, length):
                if os.fstat(self._fd).st_size < offset + length:
                    raise too_short(offset + length)
                data, self._digests[number] = memoryview(bytes(length)), zero_digest(length)
            else:
                data = read_chunk(self._fd, offset, length)
                self._digests[number] = chunk_digest(data)
            found[number] = self._put(chunk_id([data]), data, spans[number], Reading())

        self._each(range(0, size, CHUNK), work)
        return spans, [chunk for chunk in found if chunk is not None]

    def _each(self, items: Sequence[int], work: Callable[[int], None]) -> None:
        each(items, work, self._streams, self._cancelled, nice=self._nice)

    def _put(self, ident: bytes, data: memoryview, span: Span, reading: Reading) -> Chunk:
        """The row of a chunk that is in the pool then."""
        there = self._pool.find(ident, span.length)
        if there is not None:
            return Chunk(ident, span.length, span.item, span.key, there.codec, there.stored)
        with reading:
            encoded = encode(fitting(self._codec, span.item), data, span.item.size)
        head = frame.header(encoded.codec, span.item.size, span.length)
        self._pool.put(ident, head, encoded.payload)  # the kernel copies from a mapping, and answers EFAULT if it must
        return Chunk(ident, span.length, span.item, span.key, int(encoded.codec), len(head) + len(encoded.payload))


def fitting(codec: Codec, item: Item) -> Codec:
    """The codec for a chunk of such elements: there are no bits to shuffle where no element is known."""
    return Codec.LZ4 if codec is Codec.BITSHUFFLE_LZ4 and item.size == 1 else codec
