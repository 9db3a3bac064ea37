"""Copying and hashing the bytes of a file, in chunks, with as few copies in memory as the source allows.

The digest of a file is a tree: xxh3-128 over the concatenated xxh3-128 digests of its chunks. Every function lets
OSError through.

Three ways to get a chunk:
- mapped: a stable tmpfs file without holes is mapped, and O_DIRECT writes go straight from its pages. Anything
  else could end in SIGBUS: a truncation, a read error of a disk, a hole that a full tmpfs cannot fill.
- read into a page-aligned buffer of the thread, then written with O_DIRECT from there.
- small files: one read, one write.

Holes are neither read nor written nor preallocated: a sparse file is as sparse in its copies, and its digest is that of
the zeros that a reader sees. Where the source's filesystem does not tell holes but the file occupies less than its size
(NFS before 4.2), chunks of zeros are taken for holes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar, cast

import xxhash

from tierfs.durable import TemporaryFile
from tierfs.errors import SourceChanged

CHUNK = 4 << 20
"""Bytes of one chunk; part of the digest's definition, so never change it."""

SMALL = 1 << 20
PREALLOCATE_ABOVE = 16 << 20
DIGEST_SIZE = 16
_BLOCK = 4096
_TMPFS_MAGIC = 0x01021994
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

Throttle = Callable[[int], None]
"""Called before each chunk with its bytes; sleeps as it sees fit."""

T = TypeVar("T")
_END = object()

_ZEROS = mmap.mmap(-1, CHUNK, prot=mmap.PROT_READ)

_libc = ctypes.CDLL(None, use_errno=True)
_local = threading.local()


def chunk_digest(data: bytes | memoryview) -> bytes:
    """xxh3-128 of one chunk. Releases the GIL."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def tree_digest(chunks: Sequence[bytes]) -> bytes:
    """Digest of a file, given those of its chunks."""
    return chunk_digest(b"".join(chunks))


def _buffer() -> memoryview:
    """This thread's page-aligned buffer of one chunk."""
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = memoryview(mmap.mmap(-1, CHUNK))
        _local.buffer = buffer
    return buffer


def _read(fd: int, offset: int, length: int) -> memoryview:
    """Up to ``length`` bytes (fewer at the end of the file) in this thread's buffer."""
    view = _buffer()[:length]
    done = 0
    while done < length:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return view[:done]


def _zeros() -> memoryview:
    """One chunk of zeros, shared by all threads. Never written to."""
    return memoryview(_ZEROS)


@functools.lru_cache(maxsize=64)
def zero_digest(length: int) -> bytes:
    """Digest of a chunk that is one hole."""
    return chunk_digest(_zeros()[:length])


def is_sparse(fd: int, size: int) -> bool:
    """Whether there are holes in the first ``size`` bytes, as far as the filesystem tells. Raises OSError."""
    return size > 0 and os.lseek(fd, 0, os.SEEK_HOLE) < size


def data_extents(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """(offset, length) of what is not a hole within this range, in order. Raises OSError."""
    found = []
    position, end = offset, offset + length
    while position < end:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            stop = min(end, os.lseek(fd, start, os.SEEK_HOLE)) if start < end else end
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        if start < stop:
            found.append((start, stop - start))
        position = max(stop, position + 1)
    return found


def is_tmpfs(fd: int) -> bool:
    """Whether an open file is in memory. Raises nothing."""
    result = (ctypes.c_long * 32)()
    return _libc.fstatfs(fd, ctypes.byref(result)) == 0 and result[0] == _TMPFS_MAGIC


def _map(fd: int, size: int) -> mmap.mmap | None:
    """The source mapped, when touching every page of it cannot fault."""
    if size == 0 or not is_tmpfs(fd) or os.fstat(fd).st_size < size or is_sparse(fd, size):
        return None
    return mmap.mmap(fd, size, prot=mmap.PROT_READ)


class Reading:
    """Who looks at a mapped source. A thread that hangs in a write to the destination does not: the kernel copies for
    it, and answers EFAULT for pages that are gone. So whoever is about to cut the source off needs not wait for such a
    thread, only be sure that none is at the mapping and that none returns to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._over = False

    def __enter__(self) -> None:
        with self._lock:
            if self._over:
                raise SourceChanged("the source is about to change")
            self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._inside -= 1

    def end(self) -> bool:
        """Let nobody in any more: whether nobody is in."""
        with self._lock:
            self._over = True
            return self._inside == 0


@dataclass(frozen=True, slots=True)
class Mapped:
    """A whole source, mapped. Its bytes are only to be looked at while ``reading`` is entered."""

    view: memoryview
    reading: Reading


@contextlib.contextmanager
def mapping(fd: int, size: int, reading: Reading | None) -> Iterator[Mapped | None]:
    """`_map` for the time of a block."""
    mapping = _map(fd, size)
    if mapping is None:
        yield None
        return
    view = memoryview(mapping)
    try:
        yield Mapped(view, reading or Reading())
    finally:
        view.release()
        with contextlib.suppress(BufferError):  # an error's frames may still look at it
            mapping.close()


def data_end(fd: int, start: int) -> int:
    """Offset up to which the file has data without a hole from ``start`` on, in bytes; ``start`` if it ends before.
    A size set ahead by ftruncate is no data. Raises OSError."""
    try:
        return os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return start


class Destination:
    """A file being filled, through O_DIRECT where its filesystem has that. Threads may write different ranges."""

    def __init__(self, fd: int) -> None:
        """``fd`` is borrowed and open for writing."""
        self._fd = fd
        self._direct: int | None = None

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def prefer_direct(self) -> None:
        """Use O_DIRECT from now on, where it is supported. Raises OSError."""
        if self._direct is None:
            try:
                self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise

    def preallocate(self, size: int) -> None:
        """Reserve ``size`` bytes where the filesystem can. Raises OSError: ENOSPC before anything is copied."""
        while _libc.fallocate(self._fd, 0, ctypes.c_long(0), ctypes.c_long(size)):
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of ``data``; ``offset`` in bytes. Raises OSError."""
        view = memoryview(data)
        aligned = len(view) & -_BLOCK if offset % _BLOCK == 0 else 0
        done = 0
        while done < len(view):
            direct = self._direct if done < aligned and done % _BLOCK == 0 else None
            try:
                if direct is None:
                    count = os.pwrite(self._fd, view[done:], offset + done)
                else:
                    count = os.pwrite(direct, view[done:aligned], offset + done)
            except OSError as error:
                if direct is None or error.errno != errno.EINVAL:
                    raise
                aligned = 0
                continue
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            done += count

    def truncate(self, size: int) -> None:
        """Give the file its exact size in bytes. Raises OSError."""
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        if self._direct is not None:
            direct, self._direct = self._direct, None
            os.close(direct)


def copy_range(src_fd: int, dst: Destination, offset: int, length: int, mapped: Mapped | None = None) -> bytes:
    """Copy one chunk (``length`` <= CHUNK) to the same offset: its digest.

    ``mapped`` is the whole source, when it is stable. Raises OSError; SourceChanged when the source ends before
    ``offset + length``, or nobody may look at it any more.
    """
    data, digest = _chunk(src_fd, offset, length, mapped)
    dst.write(data, offset)
    return digest


def _chunk(fd: int, offset: int, length: int, mapped: Mapped | None) -> tuple[memoryview, bytes]:
    """A chunk of the source and its digest. Of a mapped one only the kernel may look at the chunk afterwards."""
    if mapped is None:
        data = _read(fd, offset, length)
        if len(data) == length:
            return data, chunk_digest(data)
    else:
        with mapped.reading:
            if os.fstat(fd).st_size >= offset + length:
                data = mapped.view[offset : offset + length]
                return data, chunk_digest(data)
    raise _too_short(offset + length)


def _copy_data(fd: int, dst: Destination, offset: int, length: int, throttle: Throttle | None) -> bytes:
    """Copy what is data in one chunk of a sparse file; ``dst`` has a hole there. The digest of what it has then."""
    extents = data_extents(fd, offset, length)
    if os.fstat(fd).st_size < offset + length:
        raise _too_short(offset + length)
    if not extents:
        return zero_digest(length)
    view = _buffer()[:length]
    done = 0
    for start, count in [*extents, (offset + length, 0)]:
        gap = start - offset - done
        view[done : done + gap] = _zeros()[:gap]
        done += gap
        if throttle is not None and count:
            throttle(count)
        while count:
            read = os.preadv(fd, [view[done : done + count]], offset + done)
            if read == 0:
                raise _too_short(offset + length)
            done += read
            count -= read
    for start, count in extents:
        dst.write(view[start - offset : start - offset + count], start)
    return chunk_digest(view)


def _too_short(wanted: int) -> SourceChanged:
    return SourceChanged(f"the file became shorter than {wanted} bytes while it was copied")


def read_chunk(fd: int, offset: int, length: int) -> memoryview:
    """``length`` <= CHUNK bytes in this thread's buffer, good until its next chunk. Raises OSError; SourceChanged when
    the file ends before."""
    data = _read(fd, offset, length)
    if len(data) < length:
        raise _too_short(offset + length)
    return data


def _length(offset: int, size: int) -> int:
    return min(CHUNK, size - offset)


def each_chunk(
    offsets: Sequence[int],
    size: int,
    work: Callable[[int, int], None],
    streams: int,
    throttle: Throttle | None,
    cancelled: Callable[[], bool] | None,
) -> None:
    """Call ``work(offset, length)`` for every chunk, from up to ``streams`` threads. The first error ends all."""

    def one(offset: int) -> None:
        length = _length(offset, size)
        if throttle is not None:
            throttle(length)
        work(offset, length)

    each(offsets, one, streams, cancelled)


def each(
    items: Sequence[T],
    work: Callable[[T], None],
    streams: int,
    cancelled: Callable[[], bool] | None,
    *,
    nice: int = 0,
) -> None:
    """Call ``work`` with every item, from up to ``streams`` threads. The first error ends all; SourceChanged when
    ``cancelled`` says so. With ``nice`` threads of this level do it, and this one waits."""
    lock = threading.Lock()
    todo = iter(items)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if nice:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            for item in iter(take, _END):
                if cancelled is not None and cancelled():
                    raise SourceChanged("the copy was cancelled")
                work(cast(T, item))
        except BaseException as error:
            with lock:
                errors.append(error)

    def take() -> object:
        with lock:
            return _END if errors else next(todo, _END)

    threads = [
        threading.Thread(target=run, name="tierfs-copy", daemon=True)
        for _ in range(min(streams, len(items)) - (not nice))
    ]
    for thread in threads:
        thread.start()
    if not nice:
        run()
    for thread in threads:
        thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its frames know this list: what they hold, the source's bytes among it, would stay


def copy_file(
    src_fd: int,
    temp: TemporaryFile,
    size: int,
    *,
    streams: int = 3,
    throttle: Throttle | None = None,
    cancelled: Callable[[], bool] | None = None,
    stable: bool = False,
    reading: Reading | None = None,
    digests: list[bytes] | None = None,
) -> bytes:
    """Copy the first ``size`` bytes of ``src_fd`` into the empty ``temp`` (not synced): the tree digest of what was
    written.

    ``stable`` promises that nobody truncates the source before ``reading`` is ended; only then may it be mapped.
    ``digests`` receives those of the chunks. Raises OSError; SourceChanged when ``cancelled`` says so or the source is
    shorter than ``size``.
    """
    with Destination(temp.fd) as dst:
        if size <= SMALL:
            if cancelled is not None and cancelled():
                raise SourceChanged("the copy was cancelled")
            if throttle is not None:
                throttle(size)
            found = [copy_range(src_fd, dst, 0, size)] if size else []
        else:
            sparse = is_sparse(src_fd, size)
            doubtful = not sparse and os.fstat(src_fd).st_blocks * 512 < size
            if size > PREALLOCATE_ABOVE and not sparse and not doubtful:
                dst.preallocate(size)
            dst.prefer_direct()
            offsets = range(0, size, CHUNK)
            found = [b""] * len(offsets)
            with mapping(src_fd, size if stable else 0, reading) as mapped:

                def work(offset: int, length: int) -> None:
                    if sparse:
                        digest = _copy_data(src_fd, dst, offset, length, throttle)
                    elif doubtful:
                        data, digest = _chunk(src_fd, offset, length, mapped)
                        if digest != zero_digest(length):
                            dst.write(data, offset)
                    else:
                        digest = copy_range(src_fd, dst, offset, length, mapped)
                    found[offset // CHUNK] = digest

                each_chunk(offsets, size, work, streams, None if sparse else throttle, cancelled)
        dst.truncate(size)
    if digests is not None:
        digests[:] = found
    return tree_digest(found)


def digest_file(
    fd: int,
    size: int,
    *,
    streams: int = 2,
    cancelled: Callable[[], bool] | None = None,
    throttle: Throttle | None = None,
) -> bytes:
    """Tree digest of the first ``size`` bytes, by reading them. Raises OSError; SourceChanged when there are fewer."""
    offsets = range(0, size, CHUNK)
    digests = [b""] * len(offsets)
    sparse = is_sparse(fd, size)

    def work(offset: int, length: int) -> None:
        if sparse and not data_extents(fd, offset, length):
            if os.fstat(fd).st_size < offset + length:
                raise _too_short(offset + length)
            digests[offset // CHUNK] = zero_digest(length)
        else:
            _, digests[offset // CHUNK] = _chunk(fd, offset, length, None)

    each_chunk(offsets, size, work, streams, throttle, cancelled)
    return tree_digest(digests)


class PipelinedCopy:
    """A copy that starts while the source is still being written. Call it from one thread at a time; each call may come
    with another descriptor of the same source.

    Whoever writes to the source may do so at any moment, also while a chunk is copied. So a chunk's digest is that of
    the bytes sent to the destination, taken from a buffer that nobody else knows, and the chunk counts only if the
    source still has that digest once it is closed. Writing from a mapping would cost less, but then the digest and
    the write are two looks at the source, and a byte that changed between them and changed back passes unnoticed.
    """

    def __init__(self, temp: TemporaryFile, *, streams: int = 2) -> None:
        self._dst = Destination(temp.fd)
        self._streams = streams
        self._digests: dict[int, bytes] = {}
        self._front = 0
        self.recopied = 0
        """Bytes that ``finish`` had to copy again because they had changed."""

    @property
    def front(self) -> int:
        """Everything below this offset, in bytes, is copied."""
        while self._front in self._digests:
            self._front += CHUNK
        return self._front

    def advance(
        self,
        src_fd: int,
        size: int,
        *,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """Copy all whole chunks below ``size`` bytes not copied yet: the bytes copied now. A chunk with a hole in it is
        not written yet, or stays a hole: it waits for ``finish``. A source that turns out shorter is no error.
        Raises OSError; SourceChanged when cancelled, after which this can go on."""
        offsets = [o for o in range(self.front, size - CHUNK + 1, CHUNK) if o not in self._digests]
        if not offsets:
            return 0
        self._dst.prefer_direct()
        before = len(self._digests)

        def work(offset: int, length: int) -> None:
            if data_extents(src_fd, offset, length) != [(offset, length)]:
                return
            data = _read(src_fd, offset, length)
            if len(data) == length:
                digest = chunk_digest(data)
                self._dst.write(data, offset)
                self._digests[offset] = digest

        each_chunk(offsets, size, work, self._streams, throttle, cancelled)
        return (len(self._digests) - before) * CHUNK

    def finish(
        self,
        src_fd: int,
        size: int,
        *,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] | None = None,
        stable: bool = False,
        reading: Reading | None = None,
        digests: list[bytes] | None = None,
    ) -> bytes:
        """Complete the copy of the closed source of ``size`` bytes: the tree digest of what was written (not synced).

        Every chunk copied earlier is hashed again in the source and copied again if it changed; ``throttle`` counts
        only what is written. ``stable``, ``reading`` and ``digests`` as in `copy_file`. Raises OSError; SourceChanged
        when cancelled or the source is shorter than ``size``.
        """
        early = self._digests
        offsets = range(0, size, CHUNK)
        found = [b""] * len(offsets)
        recopied: list[int] = []
        sparse = is_sparse(src_fd, size)
        if size > PREALLOCATE_ABOVE and not sparse:
            self._dst.preallocate(size)
        if size > SMALL:
            self._dst.prefer_direct()

        with mapping(src_fd, size if stable else 0, reading) as mapped:

            def work(offset: int, length: int) -> None:
                if sparse and offset not in early:
                    found[offset // CHUNK] = _copy_data(src_fd, self._dst, offset, length, throttle)
                    return
                data, digest = _chunk(src_fd, offset, length, mapped)
                if early.get(offset) != digest:
                    if throttle is not None:
                        throttle(length)
                    self._dst.write(data, offset)
                    if offset in early:
                        recopied.append(length)
                found[offset // CHUNK] = digest

            each_chunk(offsets, size, work, self._streams, None, cancelled)
        self._dst.truncate(size)
        self._dst.close()
        self.recopied = sum(recopied)
        if digests is not None:
            digests[:] = found
        return tree_digest(found)

    def close(self) -> None:
        """Stop using the destination; it stays as it is. Harmless after ``finish``."""
        self._dst.close()
