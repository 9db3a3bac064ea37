"""The chunks of an archive with layout `chunks`: one file each in ``.tierfs/chunks/<two hex digits>/<hex id>``.

A chunk is written to a temporary name, synced and renamed, so what has its name is whole; `ChunkPool.sync` makes the
names durable, before the manifest that needs them is. A chunk that is there is not written again, except one that a
reader found to be wrong: that left ``<hex id>.suspect`` beside it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple

from tierfs.chunks import frame
from tierfs.chunks.codec import Codec, decode
from tierfs.chunks.identity import chunk_id
from tierfs.durable import create_temporary, fsync_directory
from tierfs.errors import ChunkDamaged, DigestMismatch
from tierfs.points import At, reach
from tierfs.tiers.base import DIRECTORY, open_directory

CHUNKS = b"chunks"
SUSPECT = b".suspect"
_FOLDERS = frozenset(b"%02x" % number for number in range(256))
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_ONCE = 64 << 20
"""Bytes of one read."""


class Stored(NamedTuple):
    """A chunk that is there."""

    codec: int
    stored: int
    """Bytes, with its header."""


class ChunkPool:
    """The directory of chunks in one private directory of an archive. Thread-safe. Methods raise OSError where they do
    not say more."""

    def __init__(self, own: int, tmp: int | None = None, prefix: str = "") -> None:
        """``own``: descriptor of the private directory, borrowed for this call. ``tmp``: of the one for temporary
        files, borrowed for as long as chunks are written; None: nothing is, and an archive without chunks is right."""
        self._tmp, self._prefix = tmp, prefix
        self._touched: set[bytes] = set()
        self._lock = threading.Lock()
        try:
            self._fd = open_directory(CHUNKS, own, create=tmp is not None)
        except FileNotFoundError:
            self._fd = os.open(b".", DIRECTORY, dir_fd=own)  # no chunk has such a name there

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> ChunkPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # writing

    def find(self, ident: bytes, length: int) -> Stored | None:
        """The chunk, if it is there, looks like one of so many bytes, and nobody found it to be wrong."""
        path = _path(ident)
        try:
            fd = os.open(path, _READ, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(fd).st_size
            found = frame.peek(os.pread(fd, frame.LONGEST_HEADER, 0), size)
        except ChunkDamaged:
            return None
        finally:
            os.close(fd)
        if found.length != length or self._is_suspect(path):
            return None
        with self._lock:
            self._touched.add(path[:2])  # whoever wrote it may not have made its name durable yet
        return Stored(found.codec, size)

    def put(self, ident: bytes, header: bytes, payload: memoryview) -> None:
        """Store a chunk, over one of the same name. `sync` makes it durable."""
        assert self._tmp is not None
        path = _path(ident)
        temp = create_temporary(self._tmp, self._prefix + "chunk")
        try:
            _write(temp.fd, header, payload)
            os.fsync(temp.fd)
            reach(At.CHUNK_WRITTEN)
            try:
                os.rename(temp.name, path, src_dir_fd=self._tmp, dst_dir_fd=self._fd)
            except FileNotFoundError:
                os.close(open_directory(path[:2], self._fd))
                os.rename(temp.name, path, src_dir_fd=self._tmp, dst_dir_fd=self._fd)
            temp.committed = True
            reach(At.CHUNK_NAMED)
        finally:
            temp.discard()
        with self._lock:
            self._touched.add(path[:2])
        if self._is_suspect(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + SUSPECT, dir_fd=self._fd)

    def sync(self) -> None:
        """Make the names of all chunks that were found or stored durable."""
        with self._lock:
            touched, self._touched = self._touched, set()
        for folder in sorted(touched):
            fd = os.open(folder, DIRECTORY | os.O_NOFOLLOW, dir_fd=self._fd)
            try:
                fsync_directory(fd)
            finally:
                os.close(fd)

    def _is_suspect(self, path: bytes) -> bool:
        try:
            os.stat(path + SUSPECT, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    # reading

    def fetch(self, ident: bytes, length: int, *, fresh: bool = False) -> memoryview:
        """The chunk's bytes, checked; ``fresh``: as the storage has them. Raises FileNotFoundError; DigestMismatch when
        it is not what was written."""
        path = _path(ident)
        fd = os.open(path, _READ, dir_fd=self._fd)
        try:
            if fresh:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            raw = _read_all(fd)
        finally:
            os.close(fd)
        try:
            found = frame.parse(raw)
            data = decode(Codec(found.codec), found.payload, found.length, found.item)
            if found.length == length and chunk_id([data]) == ident:
                return data
            what = "does not have the bytes written to it"
        except (ChunkDamaged, ValueError) as error:
            what = f"is damaged: {error}"
        with contextlib.suppress(OSError):
            os.close(os.open(path + SUSPECT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._fd))
        raise DigestMismatch(f"chunk {ident.hex()} {what}")

    def size(self, ident: bytes) -> int | None:
        """Bytes of the stored chunk; None: there is none."""
        try:
            return os.stat(_path(ident), dir_fd=self._fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    # collecting

    def all(self) -> Iterator[tuple[bytes, int]]:
        """Name of each file with a chunk or a note about one, and its bytes as they occupy the disk; what else may
        stand there is passed over."""
        for folder in sorted(_FOLDERS.intersection(map(os.fsencode, os.listdir(self._fd)))):
            fd = os.open(folder, DIRECTORY | os.O_NOFOLLOW, dir_fd=self._fd)
            try:
                for name in map(os.fsencode, os.listdir(fd)):
                    if ident_of(name) is not None:
                        yield name, 512 * os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks
            finally:
                os.close(fd)

    def remove(self, name: bytes) -> None:
        """Remove one of `all`; none is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name[:2] + b"/" + name, dir_fd=self._fd)


def ident_of(name: bytes) -> bytes | None:
    """Of which chunk a file of this name is, or is a note."""
    text = name.removesuffix(SUSPECT)
    try:
        ident = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return None
    return ident if ident.hex().encode() == text and len(ident) == 32 else None


def _path(ident: bytes) -> bytes:
    name = ident.hex().encode()
    return name[:2] + b"/" + name


def _write(fd: int, header: bytes, payload: memoryview) -> None:
    """All of both."""
    done, total = 0, len(header) + len(payload)
    while done < total:
        if done < len(header):
            done += os.writev(fd, [header[done:], payload])
        else:
            done += os.write(fd, payload[done - len(header) :])


def _read_all(fd: int) -> memoryview:
    size = os.fstat(fd).st_size
    if size > _ONCE + 4096:
        raise DigestMismatch("a chunk is larger than any that was written")
    view = memoryview(bytearray(size))
    done = 0
    while done < size and (count := os.preadv(fd, [view[done:]], done)):
        done += count
    return view[:done]
