"""Copying one file's bytes without passing them through Python, with the digest computed on the way.

The source is mapped, and slices of the mapping go to ``pwrite`` on an O_DIRECT descriptor of the destination: the
kernel moves the pages to the device with no copy. Hashing releases the GIL (0.07 s per GiB). Where the source may be cut
off meanwhile (``stable=False``), touching its mapping could raise SIGBUS, so it is read into a buffer instead.

Digest: the **tree digest**, xxh3-128 over the concatenated xxh3-128 digests of the 4 MiB chunks.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable

import xxhash

from tierfs.durable import TemporaryFile
from tierfs.errors import SourceChanged

CHUNK = 4 << 20
ALIGN = 4096
SMALL = 1 << 20
PREALLOCATE_FROM = 16 << 20

Throttle = Callable[[int], None]
Cancelled = Callable[[], bool]


def chunk_digest(data: bytes | memoryview | mmap.mmap) -> bytes:
    return xxhash.xxh3_128_digest(data)


def tree_digest(digests: list[bytes]) -> bytes:
    """The file's digest from its chunks' digests in order."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def digest_file(fd: int, size: int) -> bytes:
    """Tree digest of the first ``size`` bytes by reading them. Raises SourceChanged when there are fewer."""
    digests = []
    buffer = memoryview(mmap.mmap(-1, CHUNK))
    for offset in range(0, size, CHUNK):
        length = min(CHUNK, size - offset)
        _read_full(fd, buffer[:length], offset)
        digests.append(chunk_digest(buffer[:length]))
    return tree_digest(digests)


def _read_full(fd: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise SourceChanged("the file became shorter while it was read")
        done += count


def _write_full(fd: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def copy_file(
    source_fd: int,
    temp: TemporaryFile,
    size: int,
    *,
    streams: int,
    throttle: Throttle | None,
    cancelled: Cancelled | None,
    stable: bool,
) -> bytes:
    """Copy ``size`` bytes into ``temp``; the tree digest. Not synced yet.

    ``streams`` threads keep as many chunks in flight. ``throttle`` is called with each chunk's bytes before it moves.
    Raises OSError from either side, SourceChanged when ``cancelled`` says so or the source is shorter.
    """
    if size <= SMALL:
        return _copy_small(source_fd, temp, size, throttle)
    if size >= PREALLOCATE_FROM:
        _preallocate(temp.fd, size)
    direct_fd = _open_direct(temp.path)
    try:
        job = _Job(source_fd, temp.fd, direct_fd, size, throttle, cancelled, stable)
        return job.run(min(streams, (size + CHUNK - 1) // CHUNK))
    finally:
        if direct_fd is not None:
            os.close(direct_fd)


def _copy_small(source_fd: int, temp: TemporaryFile, size: int, throttle: Throttle | None) -> bytes:
    if throttle is not None:
        throttle(size)
    data = os.pread(source_fd, size, 0) if size else b""
    if len(data) != size:
        raise SourceChanged("the file became shorter while it was read")
    _write_full(temp.fd, data, 0)
    return tree_digest([chunk_digest(data)] if size else [])


def _preallocate(fd: int, size: int) -> None:
    """Find out early whether the space is there. ENOSPC is raised; no support is not an error."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _open_direct(path: str) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


class _Job:
    """One copy by several threads; the first error stops them all."""

    def __init__(
        self,
        source_fd: int,
        plain_fd: int,
        direct_fd: int | None,
        size: int,
        throttle: Throttle | None,
        cancelled: Cancelled | None,
        stable: bool,
    ) -> None:
        self._source_fd = source_fd
        self._plain_fd = plain_fd
        self._direct_fd = direct_fd
        self._size = size
        self._throttle = throttle
        self._cancelled = cancelled
        self._stable = stable
        self._offsets = iter(range(0, size, CHUNK))
        self._lock = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._error: BaseException | None = None

    def run(self, streams: int) -> bytes:
        mapping = mmap.mmap(self._source_fd, self._size, prot=mmap.PROT_READ) if self._stable else None
        view = memoryview(mapping) if mapping is not None else None
        threads = [threading.Thread(target=self._work, args=(view,), daemon=True) for _ in range(streams - 1)]
        try:
            for thread in threads:
                thread.start()
            self._work(view)
        finally:
            for thread in threads:
                thread.join()
            if view is not None and mapping is not None:
                view.release()
                mapping.close()
        if self._error is not None:
            raise self._error
        return tree_digest([self._digests[offset] for offset in range(0, self._size, CHUNK)])

    def _work(self, view: memoryview | None) -> None:
        buffer = None if view is not None else memoryview(mmap.mmap(-1, CHUNK))
        try:
            while self._error is None:
                with self._lock:
                    offset = next(self._offsets, None)
                if offset is None:
                    return
                self._chunk(view, buffer, offset)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error

    def _chunk(self, view: memoryview | None, buffer: memoryview | None, offset: int) -> None:
        length = min(CHUNK, self._size - offset)
        if self._cancelled is not None and self._cancelled():
            raise SourceChanged("the copy was cancelled")
        if self._throttle is not None:
            self._throttle(length)
        if view is not None:
            data = view[offset : offset + length]
        else:
            assert buffer is not None
            data = buffer[:length]
            _read_full(self._source_fd, data, offset)
        with data:
            self._digests[offset] = chunk_digest(data)
            aligned = length & ~(ALIGN - 1) if self._direct_fd is not None else 0
            if aligned and self._direct_fd is not None:
                try:
                    _write_full(self._direct_fd, data[:aligned], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    aligned = 0
            if aligned < length:
                _write_full(self._plain_fd, data[aligned:], offset + aligned)

