"""An assembled mount and an ordinary directory, to do the same on both and to compare what can be seen.

`Mounted` answers paths as the kernel does that stands before a filesystem: what it looks up and refuses by itself is
refused here, with its errno, and the rest is asked of the mount. `Reference` asks the real kernel about a directory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import trio
from assembled import assemble
from held_world import CALLER, World, inside

from tierfs.errors import FsError
from tierfs.fs.filesystem import Change
from tierfs.fs.namespace import RENAME_EXCHANGE, RENAME_NOREPLACE
from tierfs.fs.settle import settle
from tierfs.fsck.check import open_replica
from tierfs.migrator.recovery import reclaim_orphans
from tierfs.tiers.content import FileContent
from tierfs.types import ROOT_INO, Attributes, ReplicaState

SET_BEFORE = 10**18
"""Times below were set by a program; those above are those of the change, which differ between mount and reference."""
LIBC = ctypes.CDLL(None, use_errno=True)
GONE = "gone/nowhere"
"""Where all symlinks point: what follows one finds nothing."""


class Seen(NamedTuple):
    """What a path shows."""

    kind: int
    mode: int
    nlink: int
    content: bytes | str | None
    """Bytes of a file, target of a symlink, None for directories, and for files whose bytes are lost."""
    xattrs: tuple[tuple[bytes, bytes], ...]
    mtime_ns: int
    first: str = ""
    """The first path of the same inode."""

    def comparable(self) -> Seen:
        return self._replace(mtime_ns=self.mtime_ns if self.mtime_ns < SET_BEFORE else -1)


Tree = dict[str, Seen]


def comparable(tree: Tree) -> Tree:
    return {path: seen.comparable() for path, seen in tree.items()}


@dataclass
class Handle:
    fh: int
    ino: int
    flags: int


class Mounted(World):
    """The mount. Errors are FsError."""

    def __init__(self, top: Path) -> None:
        self.handles: dict[int, Handle] = {}
        super().__init__(top)

    # what the kernel does

    def _walk(self, path: str) -> tuple[int, bytes]:
        *above, name = os.fsencode(path).split(b"/")
        ino: int = ROOT_INO
        for part in above:
            found = self.parts.names.lookup(ino, part)
            if found is None or stat.S_ISLNK(found.mode):
                raise FsError(errno.ENOENT)
            if not stat.S_ISDIR(found.mode):
                raise FsError(errno.ENOTDIR)
            ino = found.ino
        return ino, name

    def _get(self, path: str) -> Attributes:
        found = self.parts.names.lookup(*self._walk(path))
        if found is None:
            raise FsError(errno.ENOENT)
        return found

    def _followed(self, path: str) -> Attributes:
        found = self._get(path)
        if stat.S_ISLNK(found.mode):
            raise FsError(errno.ENOENT)
        return found

    def _forget(self, *inos: int) -> None:
        """The kernel forgets an inode when it has neither a name nor a handle."""
        held = {handle.ino for handle in self.handles.values()}
        gone = []
        for ino in inos:
            attributes = self.parts.catalog.attributes(ino)
            if ino not in held and attributes is not None and not attributes.nlink:
                gone.append(ino)
        inside(self.parts.names.forget, gone)

    # operations

    def open(self, number: int, path: str, flags: int) -> None:
        parent, name = self._walk(path)
        found = self.parts.names.lookup(parent, name)
        if found is None:
            if not flags & os.O_CREAT:
                raise FsError(errno.ENOENT)
            fh, found = trio.run(self.parts.filesystem.create, parent, name, 0o644, flags, CALLER)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise FsError(errno.EEXIST)
        elif stat.S_ISLNK(found.mode):
            raise FsError(errno.ELOOP)
        elif stat.S_ISDIR(found.mode):
            raise FsError(errno.EISDIR)
        else:
            fh = trio.run(self.parts.files.open, found.ino, flags)
        self.handles[number] = Handle(fh, found.ino, flags)

    def put(self, number: int, offset: int, data: bytes) -> None:
        """``offset`` -1: at the end, as the kernel finds it."""
        handle = self.handles[number]
        at = self.parts.names.attributes(handle.ino).size if offset < 0 else offset
        assert trio.run(self.parts.filesystem.write, handle.fh, at, data) == len(data)

    def get(self, number: int) -> bytes:
        return trio.run(self.parts.filesystem.read, self.handles[number].fh, 0, 1 << 20)

    def cut(self, number: int, size: int) -> None:
        trio.run(self.parts.filesystem.set_attributes, self.handles[number].ino, Change(size=size), CALLER)

    def shut(self, number: int) -> None:
        handle = self.handles.pop(number)
        trio.run(self.parts.filesystem.flush, handle.fh)
        inside(self.parts.files.release, handle.fh)
        self._forget(handle.ino)

    def truncate(self, path: str, size: int) -> None:
        found = self._followed(path)
        trio.run(self.parts.filesystem.set_attributes, found.ino, Change(size=size), CALLER)

    def mkdir(self, path: str) -> None:
        parent, name = self._walk(path)
        inside(self.parts.names.make, parent, name, stat.S_IFDIR | 0o755, CALLER)

    def symlink(self, path: str) -> None:
        parent, name = self._walk(path)
        self.parts.names.make(parent, name, stat.S_IFLNK | 0o777, CALLER, target=GONE.encode())

    def link(self, path: str, to: str) -> None:
        found = self._get(path)
        parent, name = self._walk(to)
        if self.parts.names.lookup(parent, name) is not None:
            raise FsError(errno.EEXIST)
        self.parts.names.link(found.ino, parent, name, CALLER)

    def unlink(self, path: str) -> None:
        ino = self._get(path).ino
        inside(self.parts.names.unlink, *self._walk(path), CALLER)
        self._forget(ino)

    def rmdir(self, path: str) -> None:
        ino = self._get(path).ino
        inside(self.parts.names.rmdir, *self._walk(path), CALLER)
        self._forget(ino)

    def move(self, path: str, to: str, flags: int) -> None:
        place, place2 = self._walk(path), self._walk(to)
        moved, over = self._get(path), self.parts.names.lookup(*place2)
        if flags & RENAME_NOREPLACE and over is not None:
            raise FsError(errno.EEXIST)
        if flags & RENAME_EXCHANGE and over is None:
            raise FsError(errno.ENOENT)
        if to.startswith(path + "/"):
            raise FsError(errno.EINVAL)
        if path.startswith(to + "/"):
            raise FsError(errno.EINVAL if flags & RENAME_EXCHANGE else errno.ENOTEMPTY)
        if over is not None and not flags & RENAME_EXCHANGE and over.ino != moved.ino:
            if stat.S_ISDIR(moved.mode) and not stat.S_ISDIR(over.mode):
                raise FsError(errno.ENOTDIR)
            if stat.S_ISDIR(over.mode) and not stat.S_ISDIR(moved.mode):
                raise FsError(errno.EISDIR)
        inside(self.parts.names.rename, *place, *place2, flags, CALLER)
        if over is not None:
            self._forget(over.ino)

    def chmod(self, path: str, mode: int) -> None:
        trio.run(self.parts.filesystem.set_attributes, self._followed(path).ino, Change(mode=mode), CALLER)

    def utime(self, path: str, mtime_ns: int) -> None:
        change = Change(atime_ns=mtime_ns, mtime_ns=mtime_ns)
        trio.run(self.parts.filesystem.set_attributes, self._get(path).ino, change, CALLER)

    def setxattr(self, path: str, value: bytes, flags: int) -> None:
        found = self._get(path)
        if stat.S_ISLNK(found.mode):
            raise FsError(errno.EPERM)
        trio.run(self.parts.filesystem.set_xattr, found.ino, b"user.x", value, CALLER, flags)

    def removexattr(self, path: str) -> None:
        found = self._get(path)
        if stat.S_ISLNK(found.mode):
            raise FsError(errno.EPERM)
        inside(self.parts.filesystem.remove_xattr, found.ino, b"user.x", CALLER)

    def read_all(self, path: str) -> bytes:
        """Through open and read, with a recall where the bytes are not here."""
        return self.read(path)

    # what can be seen, without changing where the bytes are

    def tree(self) -> Tree:
        found: Tree = {}
        inodes: dict[str, int] = {}
        directories: list[tuple[int, str]] = [(ROOT_INO, "")]
        for above, prefix in directories:
            for entry in self.parts.names.entries(above, 0, 1000):
                path, shown = prefix + os.fsdecode(entry.name), entry.attributes
                kind = stat.S_IFMT(shown.mode)
                content: bytes | str | None = None
                if kind == stat.S_IFDIR:
                    directories.append((shown.ino, path + "/"))
                elif kind == stat.S_IFLNK:
                    content = os.fsdecode(self.parts.catalog.target(shown.ino) or b"")
                else:
                    content = self.content(shown)
                    assert content is None or len(content) == shown.size, path
                xattrs = tuple(sorted(self.parts.catalog.xattrs(shown.ino)))
                inodes[path] = shown.ino
                found[path] = Seen(kind, stat.S_IMODE(shown.mode), shown.nlink, content, xattrs, shown.mtime_ns)
        return _grouped(found, inodes)

    def content(self, attributes: Attributes) -> bytes | None:
        inode = self.parts.files.inodes.get(attributes.ino)
        if inode is not None:
            return os.pread(inode.fd, 1 << 20, 0)
        catalog, stores = self.parts.catalog, self.parts.stores
        replicas = [r for r in catalog.replicas(attributes.ino) if r.version == attributes.version]
        found = {}
        for replica in replicas:
            source = open_replica(catalog, stores, self.parts.tree, replica)
            assert isinstance(source, FileContent)
            found[replica.tier] = os.pread(source.fd, 1 << 20, 0)
            os.close(source.fd)
        assert len(set(found.values())) <= 1, f"{attributes.ino}: tiers differ: {found}"
        return next(iter(found.values()), None)

    def is_durable(self, path: str) -> bool:
        """The bytes of the present version stand on a disk or the archive, and nobody is writing on."""
        found = self._get(path)
        return any(
            r.version == found.version and r.state is ReplicaState.DURABLE and r.tier in self.persistent
            for r in self.parts.catalog.replicas(found.ino)
        )

    # what must not be seen

    def writers(self) -> bool:
        return any(inode.writers for inode in self.parts.files.inodes.values())

    def drain_to(self, tier: str) -> None:
        catalog = self.parts.catalog
        if tier == "archive":
            queue = [ino for ino, version, *_ in catalog.wanted_contents(100) if not self._ready(ino, version)]
        else:
            queue = [ino for ino, _, name, *_ in catalog.wanted_drains(100) if name == tier]
        for ino in queue:
            found = catalog.attributes(ino)
            if found is not None:
                self.drain_inode(found, tier)

    def _ready(self, ino: int, version: int) -> bool:
        return (ino, version) in self.parts.migrator.ready

    def flush(self, tier: str) -> None:
        """By the migrator's own loop. Raises NotDurableInTime."""
        migrator = self.parts.migrator

        async def flush() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(migrator.run)
                await migrator.flusher.flush(ROOT_INO, tier, 20)
                migrator.paused = True
                with trio.fail_after(20):  # a batch of the archive is not left half done, as its thread would go on
                    while migrator._replaying or migrator.running:  # noqa: ASYNC110 - no event tells both
                        await trio.sleep(0.002)
                nursery.cancel_scope.cancel()
            migrator.paused = False

        trio.run(flush)
        self.settle()

    def evict(self, path: str, tier: str) -> None:
        found = self._get(path)
        self.parts.migrator.evictor.evict(found.ino, found.version, tier)
        trio.run(self.parts.migrator.remove_discarded)

    def recall(self, path: str) -> None:
        found = self._get(path)
        if stat.S_ISREG(found.mode):
            trio.run(self.parts.migrator.recaller.warmup, found)

    def scrub(self) -> None:
        report = trio.run(self.parts.migrator.scrubber.scrub, self.persistent, None, lambda done, total: None)
        assert not report.skipped, report
        assert not list(self.parts.catalog.damaged(1))

    def hang_up(self) -> None:
        """The daemon dies: what it had in memory is gone."""
        self.parts.catalog._db.close()
        self.parts.catalog._journal.close()
        for inode in self.parts.files.inodes.values():
            os.close(inode.fd)
        for tier in (*self.parts.stores.values(), self.parts.tree):
            tier.close()

    def kill(self) -> None:
        """The next daemon takes the handles over."""
        self.hang_up()
        self.parts = parts = assemble(self.top, disks=self.disks, rules=self.rules)
        parts.migrator.hurry = 1
        parts.files.orphans.update(parts.catalog.orphans())
        for handle in self.handles.values():
            parts.files.adopt(handle.fh, handle.ino, handle.flags, 0)
        inside(settle, parts.files)
        trio.run(reclaim_orphans, parts.catalog, parts.stores, parts.files.former_key)

    def remount(self) -> None:
        """Keeper and daemon die, and with them the handles; memory stays."""
        self.hang_up()
        self.handles.clear()
        self.start()

    def lose_memory(self) -> None:
        self.hang_up()
        self.handles.clear()
        shutil.rmtree(self.top / "memory")
        self.start()


class Reference:
    """A directory of the machine. Errors are OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.handles: dict[int, int] = {}
        root.mkdir()

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def open(self, number: int, path: str, flags: int) -> None:
        self.handles[number] = os.open(self._at(path), flags | os.O_NOFOLLOW, 0o644)

    def put(self, number: int, offset: int, data: bytes) -> None:
        fd = self.handles[number]
        os.pwrite(fd, data, os.fstat(fd).st_size if offset < 0 else offset)

    def get(self, number: int) -> bytes:
        return os.pread(self.handles[number], 1 << 20, 0)

    def cut(self, number: int, size: int) -> None:
        os.ftruncate(self.handles[number], size)

    def shut(self, number: int) -> None:
        os.close(self.handles.pop(number))

    def truncate(self, path: str, size: int) -> None:
        """As POSIX says, the mtime moves to whatever size; truncate(2) on tmpfs leaves it where the size stays."""
        fd = os.open(self._at(path), os.O_WRONLY)
        os.ftruncate(fd, size)
        os.close(fd)

    def mkdir(self, path: str) -> None:
        os.mkdir(self._at(path), 0o755)

    def symlink(self, path: str) -> None:
        os.symlink(GONE, self._at(path))

    def link(self, path: str, to: str) -> None:
        os.link(self._at(path), self._at(to), follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def move(self, path: str, to: str, flags: int) -> None:
        at_cwd = -100
        if LIBC.renameat2(at_cwd, os.fsencode(self._at(path)), at_cwd, os.fsencode(self._at(to)), flags):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utime(self, path: str, mtime_ns: int) -> None:
        os.utime(self._at(path), ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def setxattr(self, path: str, value: bytes, flags: int) -> None:
        os.setxattr(self._at(path), "user.x", value, flags, follow_symlinks=False)

    def removexattr(self, path: str) -> None:
        os.removexattr(self._at(path), "user.x", follow_symlinks=False)

    def tree(self) -> Tree:
        return directory_tree(self.root)

    def close_all(self) -> None:
        for fd in self.handles.values():
            os.close(fd)
        self.handles.clear()

    def become(self, tree: Tree) -> None:
        """The same as ``tree``, from nothing."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        for path, seen in tree.items():
            at = self._at(path)
            if seen.first != path:
                os.link(self._at(seen.first), at, follow_symlinks=False)
            elif isinstance(seen.content, str):
                os.symlink(seen.content, at)
            elif seen.content is None:
                os.mkdir(at)
            else:
                Path(at).write_bytes(seen.content)
        for path, seen in reversed(tree.items()):
            at = self._at(path)
            if seen.kind != stat.S_IFLNK:
                for name, value in seen.xattrs:
                    os.setxattr(at, name, value)
                os.chmod(at, seen.mode)
            os.utime(at, ns=(seen.mtime_ns, seen.mtime_ns), follow_symlinks=False)


def directory_tree(root: Path, reserved: str = "") -> Tree:
    found: Tree = {}
    inodes: dict[str, int] = {}
    directories = [(str(root), "")]
    for directory, prefix in directories:
        for name in sorted(os.listdir(directory)):
            if not prefix and name == reserved:
                continue
            path, at = prefix + name, f"{directory}/{name}"
            status = os.lstat(at)
            kind = stat.S_IFMT(status.st_mode)
            content: bytes | str | None = None
            xattrs: list[tuple[bytes, bytes]] = []
            if kind == stat.S_IFDIR:
                directories.append((at, path + "/"))
            elif kind == stat.S_IFLNK:
                content = os.readlink(at)
            else:
                content = Path(at).read_bytes()
            if kind != stat.S_IFLNK:
                names = [name for name in os.listxattr(at) if name.startswith("user.")]
                xattrs = [(os.fsencode(name), os.getxattr(at, name)) for name in sorted(names)]
            inodes[path] = status.st_ino
            mode = stat.S_IMODE(status.st_mode)
            found[path] = Seen(kind, mode, status.st_nlink, content, tuple(xattrs), status.st_mtime_ns)
    return _grouped(found, inodes)


def _grouped(tree: Tree, inodes: dict[str, int]) -> Tree:
    """In the order of paths, each with the first of its inode."""
    first: dict[int, str] = {}
    return {path: tree[path]._replace(first=first.setdefault(inodes[path], path)) for path in sorted(tree)}
