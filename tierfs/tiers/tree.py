"""The archive, layout ``tree``: the namespace as ordinary files that anyone can read without tierfs.

Paths are tuples of names below the root. Every component is opened by descriptor with O_NOFOLLOW, so that no
symlink in the archive leads out of it. ``.tierfs`` in the root is reserved for the marker and temporary files.

Every operation may be repeated: where its result already holds, it succeeds. Directories that are missing on the way
to a new name are made, and renaming a directory over a full one merges them, because a replay can find later steps
done already. ``exchange`` is the exception: twice is as good as never.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path as FilePath

from tierfs.durable import TemporaryFile, create_temporary, fsync_directory
from tierfs.errors import TierError
from tierfs.tiers.base import (
    DIRECTORY,
    check_marker,
    empty_directory,
    failing_as,
    open_directory,
    refusal,
    remove_temporaries,
    usage_of,
)
from tierfs.types import Usage

log = logging.getLogger("tierfs.archive")

Path = tuple[bytes, ...]

RESERVED = b".tierfs"
_RENAME_EXCHANGE = 2
_ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


class TreeStore:
    """The archive's directory. Thread-safe for different paths. Every method raises TierError when it fails."""

    def __init__(self, name: str, root: FilePath, size: int | None = None) -> None:
        """``size`` in bytes limits the capacity; None means the whole filesystem."""
        self.name = name
        self.root = root
        self.limit = size
        self.uuid = ""
        self._root_fd = self._tmp_fd = -1

    def prepare(self) -> None:
        """Create or check the directory and remove what earlier copies left behind."""
        with failing_as(self.name, f"prepare {self.root}"):
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            root = os.open(self.root, DIRECTORY)
            try:
                own = open_directory(RESERVED, root)
                try:
                    owner = os.fstat(own).st_uid
                    if owner != os.geteuid():
                        raise refusal(self.name, f"{self.root}/.tierfs belongs to user {owner}, not to {os.geteuid()}")
                    os.fchmod(own, 0o700)
                    tmp = open_directory(b"tmp", own)
                    empty_directory(tmp)
                    self.uuid = check_marker(self.name, own, tmp, self.root / ".tierfs")
                finally:
                    os.close(own)
            except BaseException:
                os.close(root)
                raise
        self.close()
        self._root_fd, self._tmp_fd = root, tmp

    def close(self) -> None:
        """Let go of the directories. ``prepare`` opens them again."""
        for fd in (self._tmp_fd, self._root_fd):
            if fd >= 0:
                os.close(fd)
        self._root_fd = self._tmp_fd = -1

    def usage(self, own_used: int) -> Usage:
        """Space in bytes, given the bytes that tierfs holds here. Raises OSError, like ReplicaStore.usage."""
        return usage_of(self._root_fd, self.limit, own_used)

    # walking

    def _check(self, path: Path) -> None:
        if path[:1] == (RESERVED,):
            raise refusal(self.name, "the name .tierfs in the archive's root is reserved")
        for name in path:
            if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
                raise refusal(self.name, f"{name!r} is not a name")

    @contextlib.contextmanager
    def _directory(self, path: Path, *, create: bool = False) -> Iterator[int]:
        self._check(path)
        fd = os.open(b".", DIRECTORY, dir_fd=self._root_fd)
        try:
            for name in path:
                try:
                    below = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                except FileNotFoundError:
                    if not create:
                        raise
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o755, dir_fd=fd)
                    fsync_directory(fd)
                    below = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _parent(self, action: str, path: Path, *, create: bool = False) -> Iterator[tuple[int, bytes]]:
        """(descriptor of the directory, name in it); an OSError inside names the action and the path."""
        shown = b"/".join(path).decode(errors="replace")
        with failing_as(self.name, f"{action} {shown}"):
            if not path:
                raise OSError(errno.EPERM, "the root itself")
            self._check(path)
            with self._directory(path[:-1], create=create) as fd:
                yield fd, path[-1]

    # making names

    def mkdir(self, path: Path) -> None:
        """Make a directory (0755 until ``set_attributes``); one that is there already stays."""
        with self._parent("make directory", path, create=True) as (parent, name):
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise

    def symlink(self, target: bytes, path: Path) -> None:
        """Make a symlink, over whatever file had its name."""
        with self._parent("make symlink", path, create=True) as (parent, name):
            with contextlib.suppress(OSError):
                if os.readlink(name, dir_fd=parent) == target:
                    return
            self._put(parent, name, lambda temp: os.symlink(target, temp, dir_fd=self._tmp_fd))

    def special(self, path: Path, mode: int, rdev: int) -> None:
        """Make a fifo, socket or device (``mode`` has its type), over whatever file had its name. Devices that a user
        who is not root may not make are left out."""
        with self._parent("make special file", path, create=True) as (parent, name):
            try:
                self._put(parent, name, lambda temp: os.mknod(temp, mode, rdev, dir_fd=self._tmp_fd))
            except PermissionError:
                if os.geteuid() == 0:
                    raise
                log.warning("archive leaves out the device %s", b"/".join(path).decode(errors="replace"))

    def link(self, source: Path, path: Path) -> None:
        """Make ``path`` another name of ``source``, over whatever file had that name."""
        with (
            self._parent("link to", path, create=True) as (parent, name),
            self._existing("link", source) as found,
        ):
            if found is None:
                if not _exists(parent, name):
                    raise FileNotFoundError(errno.ENOENT, "the other name is missing")
                return
            old_parent, old_name = found
            with contextlib.suppress(FileNotFoundError):
                if _same(
                    os.stat(old_name, dir_fd=old_parent, follow_symlinks=False),
                    os.stat(name, dir_fd=parent, follow_symlinks=False),
                ):
                    return
            self._put(
                parent,
                name,
                lambda temp: os.link(
                    old_name, temp, src_dir_fd=old_parent, dst_dir_fd=self._tmp_fd, follow_symlinks=False
                ),
            )

    def _put(self, parent: int, name: bytes, make: Callable[[bytes], None]) -> None:
        temp = b"name." + secrets.token_hex(8).encode()
        make(temp)
        try:
            os.rename(temp, name, src_dir_fd=self._tmp_fd, dst_dir_fd=parent)
        except BaseException:
            os.unlink(temp, dir_fd=self._tmp_fd)
            raise

    @contextlib.contextmanager
    def _existing(self, action: str, path: Path) -> Iterator[tuple[int, bytes] | None]:
        """Like ``_parent``, but None when the name, or a directory above, is missing."""
        with contextlib.ExitStack() as stack:
            found: tuple[int, bytes] | None
            try:
                found = stack.enter_context(self._parent(action, path))
            except TierError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                found = None
            if found is not None and not _exists(*found):
                found = None
            yield found

    # moving and removing names

    def rename(self, source: Path, target: Path) -> None:
        """Rename, over whatever had the name. A missing source counts as renamed before."""
        with self._existing("rename", source) as found:
            if found is None:
                with self._existing("rename to", target) as there:
                    if there is None:
                        log.warning("archive: neither end of a rename exists: %r, %r", source, target)
                return
            with self._parent("rename to", target, create=True) as (parent, name):
                _move(*found, parent, name)

    def exchange(self, a: Path, b: Path) -> None:
        """Swap two names. Not idempotent; does nothing when one is missing."""
        with self._existing("exchange", a) as first, self._existing("exchange", b) as second:
            if first is None or second is None:
                log.warning("archive: an end of an exchange is missing: %r, %r", a, b)
                return
            if not _libc.renameat2(first[0], first[1], second[0], second[1], _RENAME_EXCHANGE):
                return
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise OSError(code, os.strerror(code))
            temp = b"exchange." + secrets.token_hex(8).encode()
            os.rename(first[1], temp, src_dir_fd=first[0], dst_dir_fd=self._tmp_fd)
            os.rename(second[1], first[1], src_dir_fd=second[0], dst_dir_fd=first[0])
            os.rename(temp, second[1], src_dir_fd=self._tmp_fd, dst_dir_fd=second[0])

    def remove(self, path: Path) -> None:
        """Remove a name that is not a directory; a missing one is fine."""
        with self._existing("remove", path) as found:
            if found is not None:
                os.unlink(found[1], dir_fd=found[0])

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory; a missing one is fine."""
        with self._existing("remove directory", path) as found:
            if found is not None:
                os.rmdir(found[1], dir_fd=found[0])

    # content and attributes

    def open(self, path: Path) -> int:
        """Descriptor of a regular file, for reading."""
        with self._parent("open", path) as (parent, name):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "not a regular file")
            return fd

    def temporary(self, key: str) -> TemporaryFile:
        """A file to fill and then ``publish``."""
        with failing_as(self.name, "create a file"):
            return create_temporary(self._tmp_fd, key)

    def remove_temporaries(self, former: Callable[[str], bool]) -> int:
        """Remove the temporary files of keys that ``former`` knows: how many."""
        with failing_as(self.name, "remove temporary files"):
            return remove_temporaries(self._tmp_fd, former)

    def publish(
        self,
        temp: TemporaryFile,
        path: Path,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        xattrs: Mapping[bytes, bytes],
        *,
        sync_dir: bool = True,
    ) -> None:
        """Give a filled file its attributes, sync it and rename it over ``path``. May be repeated with the same
        ``temp``, which stays open. With ``sync_dir=False`` it is durable only after ``sync_directories``."""
        with self._parent("publish", path, create=not temp.committed) as (parent, name):
            _set_attributes(f"/proc/self/fd/{temp.fd}", mode, uid, gid, mtime_ns, xattrs)
            temp.commit(parent, name, sync_dir=sync_dir)

    def set_attributes(
        self, path: Path, mode: int, uid: int, gid: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]
    ) -> None:
        """Set permission bits, owner, mtime and exactly these user xattrs, and sync. A missing path is fine: it was
        renamed or removed later."""
        with self._existing("set attributes of", path) as found:
            if found is None:
                return
            parent, name = found
            kind = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISLNK(kind):
                with _owner_errors():
                    os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
                os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)
                return
            entry = os.open(name, _ENTRY, dir_fd=parent)
            try:
                proc = f"/proc/self/fd/{entry}"
                plain = stat.S_ISREG(kind) or stat.S_ISDIR(kind)
                file = None
                if plain:
                    with contextlib.suppress(PermissionError):
                        file = os.open(proc, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    _set_attributes(proc, mode, uid, gid, mtime_ns, xattrs if plain else None)
                    if file is not None:
                        os.fsync(file)
                finally:
                    if file is not None:
                        os.close(file)
            finally:
                os.close(entry)

    def sync_directories(self, paths: Iterable[Path]) -> None:
        """Make the names in these directories durable, wherever later renames took them."""
        moved = False
        with failing_as(self.name, "sync directories"):
            for path in set(paths):
                try:
                    with self._directory(path) as fd:
                        fsync_directory(fd)
                except (FileNotFoundError, NotADirectoryError):
                    moved = True
            if moved and _libc.syncfs(self._root_fd):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))


def _same(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def _exists(parent: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _move(old_parent: int, old_name: bytes, parent: int, name: bytes) -> None:
    """Rename; a directory is merged into one that is not empty, the moved entries win. Two names of one file
    become the new name alone, like any other rename."""
    try:
        os.rename(old_name, name, src_dir_fd=old_parent, dst_dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        if (old_parent, old_name) != (parent, name) and _exists(old_parent, old_name):
            same_directory = _same(os.fstat(old_parent), os.fstat(parent))
            if not (same_directory and old_name == name):
                os.unlink(old_name, dir_fd=old_parent)
        return
    flags = DIRECTORY | os.O_NOFOLLOW
    source = os.open(old_name, flags, dir_fd=old_parent)
    try:
        target = os.open(name, flags, dir_fd=parent)
        try:
            for entry in os.listdir(source):
                _move(source, os.fsencode(entry), target, os.fsencode(entry))
            fsync_directory(target)
        finally:
            os.close(target)
    finally:
        os.close(source)
    os.rmdir(old_name, dir_fd=old_parent)


@contextlib.contextmanager
def _owner_errors() -> Iterator[None]:
    """Only root may give files away: for others the owner stays theirs."""
    try:
        yield
    except PermissionError:
        if os.geteuid() == 0:
            raise


def _set_attributes(
    path: str, mode: int, uid: int, gid: int, mtime_ns: int, xattrs: Mapping[bytes, bytes] | None
) -> None:
    """``path`` is one of /proc/self/fd, so that it is followed to the open file and nowhere else."""
    with _owner_errors():
        os.chown(path, uid, gid)
    if xattrs is not None:
        if os.geteuid():
            os.chmod(path, mode | 0o600)
        _set_xattrs(path, xattrs)
    os.chmod(path, mode)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def _set_xattrs(path: str, xattrs: Mapping[bytes, bytes]) -> None:
    try:
        present = [os.fsencode(name) for name in os.listxattr(path)]
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return
    for name in present:
        if name.startswith(b"user.") and name not in xattrs:
            os.removexattr(path, name)
    for name, value in xattrs.items():
        try:
            if name not in present or os.getxattr(path, name) != value:
                os.setxattr(path, name, value)
        except OSError as error:
            if error.errno != errno.ENOTSUP and (error.errno != errno.EPERM or os.geteuid() == 0):
                raise
