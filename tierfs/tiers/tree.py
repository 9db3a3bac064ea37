"""The archive, layout ``tree``: the namespace as ordinary files that anyone can read without tierfs.

Paths are tuples of names below the root. Every component is opened by descriptor with O_NOFOLLOW, so that no
symlink in the archive leads out of it. ``.tierfs`` in the root is reserved for the marker and temporary files.

Every operation may be repeated: where its result already holds, it succeeds. A source that is missing counts as moved
before, directories that are missing on the way to a new name are made, and renaming a directory over a full one merges
them. This tells done from not done only while nothing else has taken the names meanwhile: migrator.steps sees to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import xxhash

from tierfs.durable import create_temporary, fsync_directory
from tierfs.errors import TierError
from tierfs.points import At, reach
from tierfs.tiers.base import DIRECTORY, failing_as, refusal, same_file
from tierfs.tiers.content import Content, FileContent
from tierfs.tiers.root import ASIDE, RESERVED, ArchiveRoot, Held

log = logging.getLogger("tierfs.archive")

Path = tuple[bytes, ...]

_RENAME_EXCHANGE = 2
_ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
KEPT = b"kept"
"""Directory in the private one that takes paths like any other: what is set aside (migrator.archive)."""
_EXCHANGE = (b"exchange.", b"exchanged.", ASIDE)
"""Prefixes in the private directory: journal of a swap, the same once only its last rename is left, what is aside."""
_REMEMBERED = 4096
"""Files whose refused attributes were logged and are remembered, so that each is logged once."""
_TOO_MUCH = (errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ERANGE, errno.ENAMETOOLONG)
_NOT_LINKED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What a filesystem says that has no further link for an object."""
_NOT_HERE = (errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EINVAL)

_libc = ctypes.CDLL(None, use_errno=True)


class TreeStore(ArchiveRoot):
    """The archive's directory. Thread-safe for different paths. Every method raises TierError when it fails."""

    chunked = False
    """Whether regular files are manifests: then `ChunkedStore`."""

    # walking

    def _check(self, path: Path) -> None:
        if path[:1] == (RESERVED,) and (len(path) < 2 or path[1] != KEPT):
            raise refusal(self.name, "the name .tierfs in the archive's root is reserved")
        for name in path:
            if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
                raise refusal(self.name, f"{name!r} is not a name")

    @contextlib.contextmanager
    def directory(self, path: Path, *, create: bool = False) -> Iterator[int]:
        """Descriptor of a directory. Raises OSError."""
        self._check(path)
        with self.use() as held:
            fd = os.open(b".", DIRECTORY, dir_fd=held.root)
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
            with self.directory(path[:-1], create=create) as fd:
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
            self._put(path, parent, lambda temp, tmp: os.symlink(target, temp, dir_fd=tmp))

    def special(self, path: Path, mode: int, rdev: int) -> None:
        """Make a fifo, socket or device (``mode`` has its type), over whatever file had its name. Devices that a user
        who is not root may not make are left out."""
        with self._parent("make special file", path, create=True) as (parent, _):
            try:
                self._put(path, parent, lambda temp, tmp: os.mknod(temp, mode, rdev, dir_fd=tmp))
            except PermissionError:
                if os.geteuid() == 0:
                    raise
                log.warning("archive leaves out the device %s", b"/".join(path).decode(errors="replace"))

    def link(self, source: Path, path: Path) -> None:
        """Make ``path`` another name of ``source``, over whatever file had that name. Of a symlink or special file that
        this filesystem does not link there is another one then. Nothing happens when ``source`` is missing: it was
        renamed or removed later."""
        with (
            self._parent("link to", path, create=True) as (parent, name),
            self._existing("link", source) as found,
        ):
            if found is None:
                return
            old_parent, old_name = found
            with contextlib.suppress(FileNotFoundError):
                if same_file(
                    os.stat(old_name, dir_fd=old_parent, follow_symlinks=False),
                    os.stat(name, dir_fd=parent, follow_symlinks=False),
                ):
                    return
            self._put(path, parent, partial(_link, old_parent, old_name))

    def _put(self, path: Path, parent: int, make: Callable[[bytes, int], None]) -> None:
        """Let ``make(name, directory)`` make something, then rename that over ``path``. Its temporary name is the same
        at each try, so that an archive that fails in between keeps at most one of them."""
        temp = self.prefix() + b"name." + xxhash.xxh3_128_hexdigest(b"/".join(path)).encode()
        with self.use() as held:
            try:
                make(temp, held.tmp)
            except FileExistsError:
                os.unlink(temp, dir_fd=held.tmp)
                make(temp, held.tmp)
            os.rename(temp, path[-1], src_dir_fd=held.tmp, dst_dir_fd=parent)

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
                return
            with self._parent("rename to", target, create=True) as (parent, name):
                _move(*found, parent, name)

    def exchange(self, a: Path, b: Path, token: str) -> None:
        """Swap two names, once for each ``token``: a journal in the private directory tells done from not done. It
        stays until ``forget_exchange``, to be called once the caller has durably recorded the swap.

        Where the filesystem cannot swap, three renames do it, with the first object in the private directory meanwhile.
        """
        journal, moved, aside = (kind + token.encode() for kind in _EXCHANGE)
        with (
            failing_as(self.name, f"exchange {b'/'.join(a).decode(errors='replace')}"),
            self.use() as held,
            self._existing("exchange", a) as first,
            self._existing("exchange", b) as second,
        ):
            if _exists(held.tmp, moved):
                if _exists(held.tmp, aside):
                    self._last_of_three(held, moved, aside, b)
                return
            if _exists(held.tmp, aside):
                self._rest_of_three(held, journal, moved, aside, a, b)
                return
            if first is None or second is None:
                log.info("archive: an end of an exchange is missing: %r, %r", a, b)
                return
            inode = os.stat(first[1], dir_fd=first[0], follow_symlinks=False).st_ino
            before = _read_number(held.tmp, journal)
            if before is None:
                self._write_journal(held, journal, inode)
            elif before != inode:
                return
            reach(At.PUBLISH_EXCHANGE)
            if not _libc.renameat2(first[0], first[1], second[0], second[1], _RENAME_EXCHANGE):
                return
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise OSError(code, os.strerror(code))
            os.rename(first[1], aside, src_dir_fd=first[0], dst_dir_fd=held.tmp)
            self._rest_of_three(held, journal, moved, aside, a, b)

    def _write_journal(self, held: Held, journal: bytes, inode: int) -> None:
        temp = create_temporary(held.tmp, "journal")
        try:
            os.write(temp.fd, b"%d\n" % inode)
            temp.commit(held.tmp, journal)
        finally:
            temp.discard()

    def _rest_of_three(self, held: Held, journal: bytes, moved: bytes, aside: bytes, a: Path, b: Path) -> None:
        fsync_directory(held.tmp)
        with self._existing("exchange", b) as second, self._parent("exchange", a) as (parent, name):
            if second is not None:
                os.rename(second[1], name, src_dir_fd=second[0], dst_dir_fd=parent)
                fsync_directory(parent)
        os.rename(journal, moved, src_dir_fd=held.tmp, dst_dir_fd=held.tmp)
        fsync_directory(held.tmp)
        self._last_of_three(held, moved, aside, b)

    def _last_of_three(self, held: Held, moved: bytes, aside: bytes, b: Path) -> None:
        with self._parent("exchange", b) as (parent, name):
            os.rename(aside, name, src_dir_fd=held.tmp, dst_dir_fd=parent)
            fsync_directory(parent)

    def forget_exchange(self, token: str) -> None:
        """Remove the journal of an exchange; none is fine."""
        for name in self.journals(token):
            self.discard(name)

    def journals(self, token: str) -> list[bytes]:
        """Names that the journal of an exchange may have in the private directory."""
        return [kind + token.encode() for kind in _EXCHANGE[:2]]

    def remove(self, path: Path) -> None:
        """Remove a name that is not a directory; a missing one is fine, and a directory stays."""
        with self._existing("remove", path) as found:
            if found is not None:
                with contextlib.suppress(IsADirectoryError, FileNotFoundError):
                    os.unlink(found[1], dir_fd=found[0])

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory; a missing one is fine, and one that holds files of others stays."""
        with self._existing("remove directory", path) as found:
            if found is not None:
                try:
                    os.rmdir(found[1], dir_fd=found[0])
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                        raise
                    shown = b"/".join(path).decode(errors="replace")
                    log.info("archive keeps directory %s: %s", shown, error.strerror)

    # content and attributes

    def open(self, path: Path) -> int:
        """Descriptor of a regular file, for reading."""
        with self._parent("open", path) as (parent, name):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "not a regular file")
            return fd

    def open_first(self, paths: Sequence[Path], size: int) -> int:
        """Like ``open``, for a file that stands at one of ``paths``; one with ``size`` bytes is preferred."""
        self.attach()
        error: TierError | None = None
        last = -1
        for path in paths:
            try:
                fd = self.open(path)
            except TierError as failed:
                error = error or failed
                continue
            if os.fstat(fd).st_size == size:
                if last >= 0:
                    os.close(last)
                return fd
            if last >= 0:
                os.close(fd)
            else:
                last = fd
        if last >= 0:
            return last
        raise error or TierError(f"tier {self.name}: the file has no name here", errno=errno.ENOENT)

    def content(self, path: Path) -> Content:
        """The bytes of a regular file."""
        return FileContent(self.open(path))

    def content_first(self, paths: Sequence[Path], size: int) -> Content:
        """Like `content`, as ``open_first`` chooses."""
        return FileContent(self.open_first(paths, size))

    def lacks(self, path: Path) -> str | None:
        """What is missing of what the regular file there stands for, as far as can be told without reading it; None:
        nothing is."""
        return None

    def changing(self, alive: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """To be held while files are moved or removed. ``alive`` is called when that has to wait."""
        return contextlib.nullcontext()

    def seen(self, parent: int, name: bytes, status: os.stat_result) -> os.stat_result:
        """The lstat of what is there, with the size of the file that it stands for. Raises OSError."""
        return status

    def publish(
        self,
        temp: bytes,
        path: Path,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        xattrs: Mapping[bytes, bytes],
        *,
        sync_dir: bool = True,
    ) -> bool:
        """Give the temporary file of this name its attributes, sync it and rename it over ``path``. With
        ``sync_dir=False`` it is durable only after ``sync_directories``. False when the temporary file is gone, as it
        is after an earlier publish."""
        with failing_as(self.name, "publish"), self.use() as held:
            try:
                fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=held.tmp)
            except FileNotFoundError:
                return False
            try:
                with self._parent("publish", path, create=True) as (parent, name):
                    self._apply(path, f"/proc/self/fd/{fd}", mode, uid, gid, mtime_ns, xattrs)
                    os.fsync(fd)
                    reach(At.PUBLISH_CONTENT)
                    os.rename(temp, name, src_dir_fd=held.tmp, dst_dir_fd=parent)
                    if sync_dir:
                        fsync_directory(parent)
            finally:
                os.close(fd)
        return True

    def size(self, path: Path) -> int | None:
        """Bytes of the regular file there; None when there is none."""
        with self._existing("look at", path) as found:
            if found is None:
                return None
            status = os.stat(found[1], dir_fd=found[0], follow_symlinks=False)
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def stands(self, path: Path, temp: bytes, size: int) -> bool:
        """Whether what waited as ``temp`` may be the file there: here only its size tells."""
        return self.size(path) == size

    def ends_with_process(self, temp: bytes) -> bool:
        """Whether what waits as ``temp`` is lost when its process ends."""
        return False

    def status(self, path: Path) -> os.stat_result | None:
        """lstat of what is there, with the size of the file that it stands for; None when nothing is."""
        with self._existing("look at", path) as found:
            if found is None:
                return None
            return self.seen(*found, os.stat(found[1], dir_fd=found[0], follow_symlinks=False))

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
                with contextlib.suppress(PermissionError):
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
                    self._apply(path, proc, mode, uid, gid, mtime_ns, xattrs if plain else None)
                    if file is not None:
                        os.fsync(file)
                finally:
                    if file is not None:
                        os.close(file)
            finally:
                os.close(entry)

    def _apply(
        self,
        shown: Path,
        file: str,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        xattrs: Mapping[bytes, bytes] | None,
    ) -> None:
        """Set the attributes of ``file``, one of /proc/self/fd, so that it is followed to the open file and nowhere
        else. What the archive's filesystem refuses is left out: content must get through, and the catalog has it all.
        """
        refused = []
        try:
            os.chown(file, uid, gid)
        except PermissionError:
            if os.geteuid() == 0:
                refused.append("owner")
        if xattrs is not None:
            if os.geteuid():
                os.chmod(file, mode | 0o600)
            refused += _set_xattrs(file, xattrs)
        os.chmod(file, mode)
        os.utime(file, ns=(mtime_ns, mtime_ns))
        if refused and shown not in self._noted:
            self._noted[shown] = None
            if len(self._noted) > _REMEMBERED:
                self._noted.popitem(last=False)
            name = b"/".join(shown).decode(errors="replace")
            log.info("archive: %s goes without its %s, which this filesystem refuses", name, ", ".join(refused))

    def sync_directories(self, paths: Iterable[Path]) -> None:
        """Make the names in these directories durable, wherever later renames took them."""
        moved = False
        with failing_as(self.name, "sync directories"):
            for path in set(paths):
                try:
                    with self.directory(path) as fd:
                        fsync_directory(fd)
                except (FileNotFoundError, NotADirectoryError):
                    moved = True
            if moved:
                with self.use() as held:
                    if _libc.syncfs(held.root):
                        code = ctypes.get_errno()
                        raise OSError(code, os.strerror(code))


def _exists(parent: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _link(old_parent: int, old_name: bytes, name: bytes, parent: int) -> None:
    try:
        os.link(old_name, name, src_dir_fd=old_parent, dst_dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        status = os.stat(old_name, dir_fd=old_parent, follow_symlinks=False)
        if error.errno not in _NOT_LINKED or stat.S_ISREG(status.st_mode):
            raise
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(old_name, dir_fd=old_parent), name, dir_fd=parent)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=parent)


def _move(old_parent: int, old_name: bytes, parent: int, name: bytes) -> None:
    """Rename; a directory is merged into one that is not empty, the moved entries win. What has the name and is of the
    other kind goes first. Two names of one file become the new name alone, like any other rename."""
    try:
        os.rename(old_name, name, src_dir_fd=old_parent, dst_dir_fd=parent)
    except (NotADirectoryError, IsADirectoryError) as error:
        (os.unlink if isinstance(error, NotADirectoryError) else os.rmdir)(name, dir_fd=parent)
        os.rename(old_name, name, src_dir_fd=old_parent, dst_dir_fd=parent)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        if (old_parent, old_name) != (parent, name) and _exists(old_parent, old_name):
            same_directory = same_file(os.fstat(old_parent), os.fstat(parent))
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


def _read_number(dir_fd: int, name: bytes) -> int | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    try:
        return int(os.read(fd, 32))
    except ValueError:
        raise OSError(errno.EUCLEAN, f"{name!r} is damaged", os.fsdecode(name)) from None
    finally:
        os.close(fd)


def _set_xattrs(path: str, xattrs: Mapping[bytes, bytes]) -> list[str]:
    """Give an open file exactly these user xattrs: the names of those that its filesystem refuses."""
    try:
        present = [os.fsencode(name) for name in os.listxattr(path)]
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return [f"xattr {os.fsdecode(name)}" for name in xattrs]
    for name in present:
        if name.startswith(b"user.") and name not in xattrs:
            os.removexattr(path, name)
    refused = []
    for name, value in xattrs.items():
        try:
            if name not in present or os.getxattr(path, name) != value:
                os.setxattr(path, name, value)
        except OSError as error:
            if error.errno not in _TOO_MUCH and error.errno not in _NOT_HERE:
                raise
            if name in present:
                with contextlib.suppress(OSError):
                    os.removexattr(path, name)
            refused.append(f"xattr {os.fsdecode(name)}")
    return refused
