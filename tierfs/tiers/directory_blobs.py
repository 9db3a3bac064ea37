"""Blobs in a plain directory: one file per key, its segments being directories. Written as everything that tierfs
writes there: a temporary file in ``.tierfs/tmp``, synced, renamed, its directory synced.

No key leads out of the root: keys are checked, and every directory is opened by descriptor without following symlinks.
Directories that the last blob leaves are removed, as an object store has none; whoever makes one just then tries again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tierfs.durable import TemporaryFile, fsync_directory
from tierfs.errors import NoSuchBlob, TierError
from tierfs.tiers.base import failing_as, write_and_remove
from tierfs.tiers.blobs import PART, Blob, Blobs, Children, Data, Upload, buffers, check_key, check_prefix
from tierfs.tiers.root import RESERVED
from tierfs.tiers.tree import TreeStore
from tierfs.types import Usage

_MARK = "blob-"
"""In the names of this module's temporary files."""
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_TRIES = 20
"""Of making a file in a directory that others remove because it is empty."""
_COPIED_AT_ONCE = 64 << 20
_READS = 0x7FFFF000
"""The most that one read or write moves."""


class DirectoryBlobs:
    """See `Blobs`. The directory may go away and come back while tierfs runs, as `ArchiveRoot` tells."""

    def __init__(self, tree: TreeStore) -> None:
        """``tree`` is prepared and stays the caller's to prepare again; `close` closes it."""
        self._tree = tree
        self._linkless = False

    @property
    def name(self) -> str:
        return self._tree.name

    @property
    def root(self) -> Path:
        return self._tree.root

    @property
    def atomic_create(self) -> bool:
        return not self._linkless

    # writing

    def put(self, key: str, data: Data | Sequence[Data]) -> str | None:
        temp = self._filled(key, data)
        try:
            return self._publish(temp, key)
        finally:
            temp.discard()

    def put_if_absent(self, key: str, data: Data | Sequence[Data]) -> bool:
        check_key(self.name, key)
        if self._settled(key):
            return False
        temp = self._filled(key, data)
        try:
            with failing_as(self.name, f"write {key}"):
                os.fsync(temp.fd)
                return self._link(temp, key)
        finally:
            temp.discard()

    def _settled(self, key: str) -> bool:
        """Whether there is such a blob; then it is durable, too, although its writer may still be at it: a file is
        synced before it has its name, so only the name is left."""
        with failing_as(self.name, f"write {key}"):
            try:
                with self._parent(key) as (directory, name):
                    if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                        return False
                    fsync_directory(directory)
                    return True
            except FileNotFoundError:
                return False

    def _link(self, temp: TemporaryFile, key: str) -> bool:
        with self._tree.use() as held:
            for left in reversed(range(_TRIES)):
                try:
                    with self._parent(key, create=True) as (directory, name):
                        if self._linkless:
                            if _status(directory, name) is not None:
                                fsync_directory(directory)
                                return False
                            temp.commit(directory, name)
                            return True
                        os.link(temp.name, name, src_dir_fd=held.tmp, dst_dir_fd=directory, follow_symlinks=False)
                        fsync_directory(directory)
                        return True
                except FileExistsError:
                    if self._settled(key):
                        return False
                    if not left:
                        raise
                except OSError as error:
                    if error.errno in _LINKLESS and not self._linkless:
                        self._linkless = True  # what follows is as good as this filesystem can do
                    elif error.errno != errno.ENOENT or not left:
                        raise
        raise AssertionError("not reached")

    def _filled(self, key: str, data: Data | Sequence[Data]) -> TemporaryFile:
        """A temporary file with this content, not yet synced."""
        check_key(self.name, key)
        temp = self._temporary()
        try:
            offset = 0
            with failing_as(self.name, f"write {key}"):
                for view in buffers(data):
                    _write(temp.fd, view, offset)
                    offset += len(view)
        except BaseException:
            temp.discard()
            raise
        return temp

    def _temporary(self) -> TemporaryFile:
        return self._tree.temporary(_MARK)

    def _publish(self, temp: TemporaryFile, key: str) -> str:
        with failing_as(self.name, f"write {key}"):
            for left in reversed(range(_TRIES)):
                try:
                    with self._parent(key, create=True) as (directory, name):
                        temp.commit(directory, name)
                    break
                except FileNotFoundError:
                    if not left:
                        raise
            return _etag(os.fstat(temp.fd))

    def copy(self, source: str, target: str) -> None:
        check_key(self.name, target)
        with self._opened(source) as fd:
            temp = self._temporary()
            try:
                with failing_as(self.name, f"copy {source}"):
                    size = os.fstat(fd).st_size
                    done = 0
                    while done < size:
                        count = _copy(fd, temp.fd, min(_COPIED_AT_ONCE, size - done), done)
                        if not count:
                            raise OSError(errno.EIO, "the file became shorter while it was copied")
                        done += count
                self._publish(temp, target)
            finally:
                temp.discard()

    def begin(self, key: str, part_size: int = PART) -> Upload:
        check_key(self.name, key)
        return _FileUpload(self, key, part_size, self._temporary())

    def delete(self, keys: Iterable[str]) -> None:
        touched: dict[str, str] = {}
        """A directory that lost a blob, and one of those."""
        for key in keys:
            check_key(self.name, key)
            with failing_as(self.name, f"remove {key}"):
                try:
                    with self._parent(key) as (directory, name):
                        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                            os.unlink(name, dir_fd=directory)
                            touched.setdefault(key.rpartition("/")[0], key)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
        for key in touched.values():
            with failing_as(self.name, f"remove {key}"):
                with contextlib.suppress(FileNotFoundError), self._parent(key) as (directory, _):
                    fsync_directory(directory)
                self._prune(key)

    def _prune(self, key: str) -> None:
        """Remove the directories of ``key`` that are empty, up to the root or the one that is kept apart."""
        path = _path(key)[:-1]
        while len(path) > (2 if path[:1] == (RESERVED,) else 0):
            try:
                with self._tree.directory(path[:-1]) as parent:
                    os.rmdir(path[-1], dir_fd=parent)
                    fsync_directory(parent)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    return
                if error.errno not in _GONE:
                    raise
            path = path[:-1]

    # reading

    def head(self, key: str) -> Blob | None:
        check_key(self.name, key)
        with failing_as(self.name, f"look at {key}"):
            try:
                with self._parent(key) as (directory, name):
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                if error.errno in _GONE:
                    self._tree.attach()
                    return None
                raise
            return _blob(key, status) if stat.S_ISREG(status.st_mode) else None

    def get(self, key: str) -> memoryview:
        with self._opened(key) as fd, failing_as(self.name, f"read {key}"):
            return self._read(fd, key, 0, os.fstat(fd).st_size)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        with self._opened(key) as fd, failing_as(self.name, f"read {key}"):
            return self._read(fd, key, start, length)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        with self._opened(key) as fd, failing_as(self.name, f"read {key}"):
            return [self._read(fd, key, start, length) for start, length in ranges]

    def _read(self, fd: int, key: str, start: int, length: int) -> memoryview:
        view = memoryview(bytearray(length))
        done = 0
        while done < length:
            count = os.preadv(fd, [view[done : done + _READS]], start + done)
            if count == 0:
                raise TierError(f"tier {self.name}: {key} ends after {start + done} bytes, not {start + length}")
            done += count
        return view.toreadonly()

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        check_key(self.name, key)
        with failing_as(self.name, f"open {key}"):
            try:
                with self._parent(key) as (directory, name):
                    fd = os.open(name, _OPEN, dir_fd=directory)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._tree.attach()  # a root that is away is another matter
                raise NoSuchBlob(self.name, key) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NoSuchBlob(self.name, key)
            yield fd
        finally:
            os.close(fd)

    def scan(self, prefix: str = "") -> Iterator[Blob]:
        check_prefix(self.name, prefix)
        self._tree.attach()
        return self._below(prefix)

    def _below(self, prefix: str) -> Iterator[Blob]:
        todo = [prefix]
        while todo:
            for key, status in self._names(todo.pop()):
                if status is None:
                    todo.append(key)
                else:
                    yield _blob(key, status)

    def children(self, prefix: str = "") -> Children:
        check_prefix(self.name, prefix)
        self._tree.attach()
        found = Children([], [])
        for key, status in self._names(prefix):
            if status is None:
                found.prefixes.append(key)
            else:
                found.blobs.append(_blob(key, status))
        return found

    def _names(self, prefix: str) -> list[tuple[str, os.stat_result | None]]:
        """(key, what it is) of files and (prefix, None) of directories directly below ``prefix``, in order of keys.
        Other things, and names that are no part of a key, are none of tierfs's."""
        found: list[tuple[str, os.stat_result | None]] = []
        with failing_as(self.name, f"list {prefix or 'the root'}"):
            try:
                with self._tree.directory(_path(prefix[:-1]) if prefix else ()) as directory:
                    for name in os.listdir(directory):
                        key = prefix + name
                        status = _status(directory, os.fsencode(name))
                        if status is None or not self._is_key(key):
                            continue
                        if stat.S_ISDIR(status.st_mode):
                            found.append((key + "/", None))
                        elif stat.S_ISREG(status.st_mode):
                            found.append((key, status))
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        return sorted(found, key=lambda entry: entry[0].encode())

    def _is_key(self, key: str) -> bool:
        try:
            check_key(self.name, key)
        except TierError:
            return False
        return True

    # the rest

    def abort_stale(self, older_than: float) -> int | None:
        self._tree.attach()
        own = self._tree.prefix()
        removed = 0
        with failing_as(self.name, "remove temporary files"), self._tree.use() as held:
            for name in map(os.fsencode, os.listdir(held.tmp)):
                if name.startswith(own) or b"." + _MARK.encode() not in name:
                    continue
                status = _status(held.tmp, name)
                if status is not None and time.time() - status.st_mtime > older_than:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=held.tmp)
                        removed += 1
        return removed

    def usage(self, own_used: int) -> Usage:
        with failing_as(self.name, "ask for the space"):
            return self._tree.usage(own_used)

    def probe(self) -> None:
        self._tree.attach()
        with failing_as(self.name, "try to write"), self._tree.use() as held:
            write_and_remove(held.tmp)
        self.children()

    def close(self) -> None:
        self._tree.close()

    @contextlib.contextmanager
    def _parent(self, key: str, *, create: bool = False) -> Iterator[tuple[int, bytes]]:
        """(descriptor of the directory, name in it). Raises OSError."""
        path = _path(key)
        with self._tree.directory(path[:-1], create=create) as directory:
            yield directory, path[-1]


class _FileUpload:
    """See `Upload`: a temporary file, of which each part has its place."""

    def __init__(self, blobs: DirectoryBlobs, key: str, part_size: int, temp: TemporaryFile) -> None:
        self.key = key
        self.part_size = part_size
        self._blobs = blobs
        self._temp = temp

    def part(self, number: int, data: Data) -> None:
        (view,) = buffers(data) or [memoryview(b"")]
        if len(view) > self.part_size:
            raise TierError(f"tier {self._blobs.name}: a part of {len(view)} bytes is too large", temporary=False)
        with failing_as(self._blobs.name, f"write {self.key}"):
            _write(self._temp.fd, view, number * self.part_size)

    def complete(self) -> str | None:
        if self._temp.fd < 0:
            message = f"tier {self._blobs.name}: the upload of {self.key} was discarded"
            raise TierError(message, errno=errno.EINVAL, temporary=False)
        try:
            return self._blobs._publish(self._temp, self.key)
        finally:
            self._temp.discard()

    def abort(self) -> None:
        self._temp.discard()


def _path(key: str) -> tuple[bytes, ...]:
    return tuple(segment.encode() for segment in key.split("/"))


def _status(directory: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _blob(key: str, status: os.stat_result) -> Blob:
    return Blob(key, status.st_size, _etag(status), status.st_mtime_ns)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _READS], offset + done)


def _copy(source: int, target: int, length: int, offset: int) -> int:
    """Copy within the kernel where it can, which may share the blocks."""
    try:
        return os.copy_file_range(source, target, length, offset, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    data = os.pread(source, length, offset)
    _write(target, memoryview(data), offset)
    return len(data)


def _conforms(blobs: DirectoryBlobs) -> Blobs:
    return blobs
