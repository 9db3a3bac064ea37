"""The archive with layout tree: ordinary files under their own names, readable without tierfs.

Paths are tuples of names. Each component is opened with O_NOFOLLOW below the root's descriptor, so no symlink that
stands in the archive leads out of it. Operations accept that their result already holds: replays are harmless.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierfs.durable import TemporaryFile, create_temporary
from tierfs.errors import TierError
from tierfs.tiers.base import filesystem_usage, prepare_private, write_marker
from tierfs.types import Usage

PRIVATE = ".tierfs"
RENAME_EXCHANGE = 2

Names = tuple[bytes, ...]
Xattrs = Sequence[tuple[bytes, bytes]]


class TreeStore:
    """Synchronous; called from threads. Methods raise TierError unless they say otherwise."""

    def __init__(self, name: str, root: Path, size: int | None = None) -> None:
        self.name = name
        self.root = root
        self._size = size
        self._private = root / PRIVATE
        self._tmp = self._private / "tmp"

    def prepare(self) -> None:
        """Create the private area and drop temporary files of a former run."""
        prepare_private(self.name, self._private)
        try:
            self._tmp.mkdir(mode=0o700, exist_ok=True)
            for left in self._tmp.iterdir():
                left.unlink()
            write_marker(self._private, self.name)
        except OSError as error:
            raise TierError.of(self.name, "prepare", error) from error

    @contextlib.contextmanager
    def _parent(self, path: Names, action: str) -> Iterator[tuple[int, bytes]]:
        """(descriptor of the directory that holds ``path``, last name). OSErrors inside become TierErrors."""
        fd = -1
        try:
            fd = self._descend(path[:-1])
            yield fd, path[-1]
        except OSError as error:
            raise TierError.of(self.name, f"{action} {b'/'.join(path).decode(errors='replace')}", error) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _descend(self, path: Names) -> int:
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in path:
            if name in (b"", b".", b"..") or b"/" in name:
                os.close(fd)
                raise OSError(errno.EINVAL, "not a name")
            try:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return fd

    # namespace

    def mkdir(self, path: Names) -> None:
        with self._parent(path, "mkdir") as (fd, name), contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=fd)

    def symlink(self, target: bytes, path: Names) -> None:
        with self._parent(path, "symlink") as (fd, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            os.symlink(target, name, dir_fd=fd)

    def special(self, path: Names, mode: int, rdev: int) -> None:
        """A fifo, socket or device node."""
        with self._parent(path, "mknod") as (fd, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            os.mknod(name, mode, rdev, dir_fd=fd)

    def link(self, source: Names, path: Names) -> None:
        with self._parent(source, "link") as (from_fd, from_name), self._parent(path, "link") as (fd, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            os.link(from_name, name, src_dir_fd=from_fd, dst_dir_fd=fd, follow_symlinks=False)

    def rename(self, source: Names, path: Names) -> None:
        with self._parent(source, "rename") as (from_fd, from_name), self._parent(path, "rename") as (fd, name):
            try:
                os.rename(from_name, name, src_dir_fd=from_fd, dst_dir_fd=fd)
            except FileNotFoundError:
                os.stat(name, dir_fd=fd, follow_symlinks=False)

    def exchange(self, a: Names, b: Names) -> None:
        with self._parent(a, "exchange") as (fd_a, name_a), self._parent(b, "exchange") as (fd_b, name_b):
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.renameat2(fd_a, name_a, fd_b, name_b, RENAME_EXCHANGE):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

    def remove(self, path: Names) -> None:
        with self._parent(path, "remove") as (fd, name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)

    def rmdir(self, path: Names) -> None:
        with self._parent(path, "rmdir") as (fd, name), contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=fd)

    # content

    def temporary(self, key: str) -> TemporaryFile:
        """Raises OSError."""
        return create_temporary(str(self._tmp), key)

    def publish(
        self,
        temp: TemporaryFile,
        path: Names,
        *,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        xattrs: Xattrs,
        sync_dir: bool = True,
    ) -> None:
        """Give the temporary file its attributes and its name, replacing what stands there. ``temp`` stays open.

        A second call after a success is harmless: the temporary name is gone, its inode stands at ``path``.
        """
        with self._parent(path, "publish") as (fd, name):
            self._attributes(temp.fd, mode, uid, gid, mtime_ns, xattrs)
            try:
                temp.commit(fd, name, sync_dir=sync_dir)
            except FileNotFoundError:
                standing = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if standing.st_ino != os.fstat(temp.fd).st_ino:
                    raise

    def set_attributes(
        self, path: Names, *, mode: int, uid: int, gid: int, mtime_ns: int, xattrs: Xattrs
    ) -> None:
        with self._parent(path, "set attributes of") as (fd, name):
            kind = stat.S_IFMT(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
            if kind in (stat.S_IFREG, stat.S_IFDIR):
                object_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    self._attributes(object_fd, mode, uid, gid, mtime_ns, xattrs)
                finally:
                    os.close(object_fd)
                return
            with contextlib.suppress(PermissionError):
                os.chown(name, uid, gid, dir_fd=fd, follow_symlinks=False)
            os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=fd, follow_symlinks=False)

    def _attributes(self, fd: int, mode: int, uid: int, gid: int, mtime_ns: int, xattrs: Xattrs) -> None:
        with contextlib.suppress(PermissionError):
            os.fchown(fd, uid, gid)
        os.fchmod(fd, mode)
        try:
            wanted = {os.fsdecode(name): value for name, value in xattrs}
            for name in os.listxattr(fd):
                if name.startswith("user.") and name not in wanted:
                    os.removexattr(fd, name)
            for name, value in wanted.items():
                os.setxattr(fd, name, value)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSPC, errno.E2BIG, errno.EPERM, errno.EACCES):
                raise
        os.utime(fd, ns=(mtime_ns, mtime_ns))

    def open(self, path: Names) -> int:
        """A read-only descriptor."""
        with self._parent(path, "open") as (fd, name):
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)

    def sync_directories(self, paths: Sequence[Names]) -> None:
        """fsync each directory that still stands."""
        for path in paths:
            try:
                fd = self._descend(path)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    continue
                raise TierError.of(self.name, "open directory", error) from error
            try:
                os.fsync(fd)
            except OSError as error:
                raise TierError.of(self.name, "fsync directory", error) from error
            finally:
                os.close(fd)

    def usage(self, held: int) -> Usage:
        """Raises OSError."""
        return filesystem_usage(self.root, self._size, held)
