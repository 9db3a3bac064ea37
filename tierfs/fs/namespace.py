"""Names: lookup, creation, links, removal, rename and listing. Each change is one transaction,
together with its place in the oplog and, under a keeper, the id of the kernel's request: one that is asked again after
a former daemon had carried it out changes nothing and is answered as then."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass

from tierfs.catalog import Catalog, Entry
from tierfs.errors import FsError
from tierfs.fs.admission import Ticket
from tierfs.fs.caller import Caller
from tierfs.fs.open_files import OpenFiles
from tierfs.plan.placement import role_of
from tierfs.points import At, reach
from tierfs.types import ROOT_INO, Attributes, OpKind, ReplicaState

NAME_MAX = 255
LINK_MAX = 65000
RESERVED_AT_ROOT = b".tierfs"
"""Name at the mount's root that the archive keeps for itself."""

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


@dataclass
class Namespace:
    catalog: Catalog
    files: OpenFiles

    def attributes(self, ino: int) -> Attributes:
        """What stat shows now: from the backing file while the inode is open for writing."""
        attributes = self.catalog.attributes(ino)
        if attributes is None:
            raise FsError(errno.ENOENT)
        return self.current(attributes)

    def current(self, attributes: Attributes) -> Attributes:
        """``attributes`` with size and times of the backing file while it is open for writing."""
        inode = self.files.inodes.get(attributes.ino)
        if inode is None or not inode.writers:
            return attributes
        status = os.fstat(inode.fd)
        return attributes._replace(
            size=status.st_size,
            blocks=status.st_blocks,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=max(attributes.ctime_ns, status.st_mtime_ns),
        )

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """None when there is no such entry, which the kernel may remember."""
        if len(name) > NAME_MAX:
            raise FsError(errno.ENAMETOOLONG)
        if name == b"..":
            path = self.catalog.path_of(parent)
            above = self.catalog.resolve(path[:-1]) if path is not None else None
            return self.attributes(above.ino if above else ROOT_INO)
        if name == b".":
            return self.attributes(parent)
        found = self.catalog.lookup(parent, name)
        return self.current(found) if found else None

    def entries(self, parent: int, after: int, limit: int) -> list[Entry]:
        """Entries in the order they were made, so that a listing neither skips nor repeats while it changes."""
        found = self.catalog.entries(parent, after, limit)
        if not self.files.inodes:
            return found
        return [entry._replace(attributes=self.current(entry.attributes)) for entry in found]

    # making

    def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller, ticket: Ticket | None = None
    ) -> tuple[int, Attributes]:
        """Create and open a regular file: (handle, attributes). FsError EEXIST when the name is taken. MustWait: see
        fs.admission; never without a ``ticket``."""
        directory = self._place(parent, name)
        now = time.time_ns()
        above = self.catalog.directory_path(parent)
        path = (*above, name) if above is not None else None
        number, rule = self.files.rule_of(path)
        role = role_of(number, path)
        tier = self.files.place(rule, role, ticket or Ticket(over=True))
        made: list[tuple[str, str, int]] = []
        try:
            with self.catalog.transaction() as change:
                uid, gid, mode = _ownership(directory, stat.S_IFREG | stat.S_IMODE(mode), caller)
                attributes = self.catalog.add_inode(mode, uid, gid, now)
                self._enter(directory, name, attributes, now)
                replica, fd = self.files.create_replica(attributes.ino, 1, rule, tier)
                made.append((replica.tier, replica.key, fd))
                self.catalog.put_replica(replica)
                change.record(caller.request, attributes.ino)
                reach(At.CREATE_UNRECORDED)
        except BaseException:
            for tier, key, fd in made:
                os.close(fd)
                self.files.discard(tier, key)
            raise
        reach(At.CREATE_RECORDED)
        inode = self.files.attach(replica, fd, rule, role)
        return self.files.add_handle(inode, flags, caller.uid, empty=True), attributes

    def make(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0, target: bytes | None = None
    ) -> Attributes:
        """mkdir, symlink and mknod: the type comes with ``mode``."""
        answered = self.answered(caller)
        if answered is not None:
            return self.attributes(answered)
        kind = stat.S_IFMT(mode)
        if kind == stat.S_IFREG:
            fh, attributes = self.create(parent, name, mode, os.O_WRONLY, caller)
            self.files.release(fh)
            return attributes
        directory = self._place(parent, name)
        now = time.time_ns()
        with self.catalog.transaction() as change:
            uid, gid, mode = _ownership(directory, mode, caller)
            links = 2 if kind == stat.S_IFDIR else 1
            attributes = self.catalog.add_inode(mode, uid, gid, now, nlink=links, rdev=rdev, target=target)
            self._enter(directory, name, attributes, now)
            change.record(caller.request, attributes.ino)
        return attributes

    def link(self, ino: int, parent: int, name: bytes, caller: Caller) -> Attributes:
        attributes = self.attributes(ino)
        if self.answered(caller) is not None:
            return attributes
        if stat.S_ISDIR(attributes.mode):
            raise FsError(errno.EPERM)
        if attributes.nlink == 0:
            raise FsError(errno.ENOENT)
        if attributes.nlink >= LINK_MAX:
            raise FsError(errno.EMLINK)
        directory = self._place(parent, name)
        now = time.time_ns()
        with self.catalog.transaction() as change:
            self.catalog.add_links(ino, 1, now)
            self._enter(directory, name, attributes, now)
            change.record(caller.request, ino)
        return attributes._replace(nlink=attributes.nlink + 1, ctime_ns=now)

    def _place(self, parent: int, name: bytes) -> Attributes:
        if len(name) > NAME_MAX:
            raise FsError(errno.ENAMETOOLONG)
        directory = self._directory(parent)
        if parent == ROOT_INO and name == RESERVED_AT_ROOT:
            raise FsError(errno.EPERM, "this name is reserved for the archive")
        return directory

    def _directory(self, ino: int) -> Attributes:
        directory = self.catalog.attributes(ino)
        if directory is None or directory.nlink == 0:
            raise FsError(errno.ENOENT)
        if not stat.S_ISDIR(directory.mode):
            raise FsError(errno.ENOTDIR)
        return directory

    def _enter(self, directory: Attributes, name: bytes, child: Attributes, now: int) -> None:
        self.catalog.add_entry(directory.ino, name, child.ino)
        self.catalog.touch_directory(directory.ino, now, 1 if stat.S_ISDIR(child.mode) else 0)
        self.catalog.log(OpKind.LINK, child.ino, now, parent=directory.ino, name=name, arg=child.mode)
        if not stat.S_ISREG(child.mode):
            self.files.changed()

    # removing

    def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        if self.answered(caller) is not None:
            return
        child = self._child(parent, name)
        if stat.S_ISDIR(child.mode):
            raise FsError(errno.EISDIR)
        with self.catalog.transaction() as change:
            self._remove(parent, name, child, time.time_ns())
            change.record(caller.request)
            reach(At.UNLINK_UNRECORDED)
        reach(At.UNLINK_RECORDED)

    def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        if self.answered(caller) is not None:
            return
        child = self._child(parent, name)
        if not stat.S_ISDIR(child.mode):
            raise FsError(errno.ENOTDIR)
        if self.catalog.has_entries(child.ino):
            raise FsError(errno.ENOTEMPTY)
        with self.catalog.transaction() as change:
            self._remove(parent, name, child, time.time_ns())
            change.record(caller.request)
            reach(At.UNLINK_UNRECORDED)
        reach(At.UNLINK_RECORDED)

    def _child(self, parent: int, name: bytes) -> Attributes:
        child = self.catalog.lookup(parent, name)
        if child is None:
            raise FsError(errno.ENOENT)
        return child

    def _remove(self, parent: int, name: bytes, child: Attributes, now: int) -> None:
        """Take the entry out; the content goes with the last name and the last handle."""
        self.catalog.remove_entry(parent, name)
        self._unname(child, now)
        self.catalog.touch_directory(parent, now, -1 if stat.S_ISDIR(child.mode) else 0)
        seq = self.catalog.log(OpKind.UNLINK, child.ino, now, parent=parent, name=name, arg=child.mode)
        self._hold(seq, child, parent, name)
        self.files.changed()

    def _unname(self, child: Attributes, now: int) -> None:
        """``child`` loses one name."""
        links = 0 if stat.S_ISDIR(child.mode) else child.nlink - 1
        self.catalog.set_links(child.ino, links, now)
        if links == 0:
            self.files.orphans.add(child.ino)

    def _hold(self, seq: int, child: Attributes, parent: int, name: bytes) -> None:
        """The operation ``seq`` took this name from ``child``: it can be undone until what came before is durable."""
        last = child.nlink == 1 and stat.S_ISREG(child.mode)
        self.catalog.hold_name(seq, child.ino, self._waiting_since(child) if last else 0, parent, name)

    def _waiting_since(self, child: Attributes) -> int:
        """The close of a file's current version if that is durable nowhere yet, but waits to be; else 0."""
        if any(
            r.version == child.version and r.state is ReplicaState.DURABLE for r in self.catalog.replicas(child.ino)
        ):
            return 0
        return self.catalog.queued_since(child.ino, child.version)

    def forget(self, inos: list[int]) -> None:
        """The kernel no longer knows these inodes: those without a name go."""
        for ino in inos:
            if ino in self.files.orphans:
                if ino in self.files.inodes:
                    self.files.forgotten.add(ino)
                else:
                    self.files.drop_orphan(ino)

    # renaming

    def rename(self, parent: int, name: bytes, parent2: int, name2: bytes, flags: int, caller: Caller) -> None:
        """rename(2), with RENAME_NOREPLACE and RENAME_EXCHANGE."""
        if self.answered(caller) is not None:
            return
        if len(name2) > NAME_MAX:
            raise FsError(errno.ENAMETOOLONG)
        if parent2 == ROOT_INO and name2 == RESERVED_AT_ROOT:
            raise FsError(errno.EPERM)
        moved = self._child(parent, name)
        self._directory(parent2)
        other = self.catalog.lookup(parent2, name2)
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            raise FsError(errno.EINVAL)
        if flags & RENAME_NOREPLACE and other is not None:
            raise FsError(errno.EEXIST)
        if flags & RENAME_EXCHANGE and other is None:
            raise FsError(errno.ENOENT)
        if other is not None and other.ino == moved.ino:
            return
        now = time.time_ns()
        renamed = [moved]
        with self.catalog.transaction() as change:
            if flags & RENAME_EXCHANGE and other is not None:
                self._exchange(parent, name, moved, parent2, name2, other, now)
                renamed.append(other)
            else:
                self._move(parent, name, moved, parent2, name2, other, now)
            for child in renamed:
                self.files.copies.renamed(child.ino)
            change.record(caller.request)
            reach(At.RENAME_UNRECORDED)
        reach(At.RENAME_RECORDED)
        if stat.S_ISDIR(moved.mode) or (other is not None and stat.S_ISDIR(other.mode)):
            self.catalog.forget_paths()
        self.files.changed()

    def _move(
        self,
        parent: int,
        name: bytes,
        moved: Attributes,
        parent2: int,
        name2: bytes,
        other: Attributes | None,
        now: int,
    ) -> None:
        directory = stat.S_ISDIR(moved.mode)
        self.catalog.remove_entry(parent, name)
        if other is not None:
            if stat.S_ISDIR(other.mode):
                if not directory:
                    raise FsError(errno.EISDIR)
                if self.catalog.has_entries(other.ino):
                    raise FsError(errno.ENOTEMPTY)
            elif directory:
                raise FsError(errno.ENOTDIR)
            self.catalog.set_entry(parent2, name2, moved.ino)
            self._unname(other, now)
        else:
            self.catalog.add_entry(parent2, name2, moved.ino)
        replaced_directory = other is not None and stat.S_ISDIR(other.mode)
        self.catalog.touch_directory(parent, now, -1 if directory else 0)
        self.catalog.touch_directory(parent2, now, int(directory) - int(replaced_directory))
        self.catalog.add_links(moved.ino, 0, now)
        seq = self.catalog.log(OpKind.RENAME, moved.ino, now, parent=parent, name=name, arg=parent2, name2=name2)
        if other is not None:
            self._hold(seq, other, parent2, name2)

    def _exchange(
        self, parent: int, name: bytes, a: Attributes, parent2: int, name2: bytes, b: Attributes, now: int
    ) -> None:
        self.catalog.set_entry(parent, name, b.ino)
        self.catalog.set_entry(parent2, name2, a.ino)
        shift = int(stat.S_ISDIR(b.mode)) - int(stat.S_ISDIR(a.mode)) if parent != parent2 else 0
        self.catalog.touch_directory(parent, now, shift)
        self.catalog.touch_directory(parent2, now, -shift)
        self.catalog.add_links(a.ino, 0, now)
        self.catalog.add_links(b.ino, 0, now)
        self.catalog.log(OpKind.EXCHANGE, a.ino, now, parent=parent, name=name, arg=parent2, name2=name2)

    # exactly once

    def answered(self, caller: Caller) -> int | None:
        """For a resent request that a former daemon committed: the inode it made (0: none)."""
        if caller.resent and caller.request is not None:
            return self.catalog.answered(caller.request)
        return None


def _ownership(directory: Attributes, mode: int, caller: Caller) -> tuple[int, int, int]:
    """(uid, gid, mode) of a new child: a setgid directory passes on its group, and itself to directories."""
    if directory.mode & stat.S_ISGID:
        if stat.S_ISDIR(mode):
            mode |= stat.S_ISGID
        return caller.uid, directory.gid, mode
    return caller.uid, caller.gid, mode
