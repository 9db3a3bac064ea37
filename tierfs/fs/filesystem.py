"""The filesystem: what each operation does, knowing neither the kernel's protocol nor how copies are made."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from tierfs.catalog import Catalog
from tierfs.errors import FsError
from tierfs.fs.admission import MustWait, Ticket
from tierfs.fs.caller import Caller
from tierfs.fs.handles import Handle, OpenInode
from tierfs.fs.lanes import SLOWEST
from tierfs.fs.mover import FULL
from tierfs.fs.namespace import Namespace
from tierfs.fs.open_files import OpenFiles, unprivileged
from tierfs.types import Attributes, OpKind

TRIES = 8
"""Times that a write looks for room without getting a byte further."""
XATTR_SIZE_MAX = 65536
XATTR_LIST_MAX = 65536
VIRTUAL = b"user.tierfs."
FLUSH_XATTR = b"user.tierfs.flush"


@dataclass(frozen=True, slots=True)
class Change:
    """What setattr is to change; None leaves a field alone. Times in ns, size in bytes."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass
class Filesystem:
    catalog: Catalog
    names: Namespace
    files: OpenFiles
    wait_durable: Callable[[int, int, str], Awaitable[None]]
    """(ino, version, tier): returns when that version, or a newer one, is durable at the tier or below."""
    wait_settled: Callable[[str], Awaitable[None]]
    """Returns when nothing done until now can be undone by a loss above this tier; on the archive it shows, too."""
    describe: Callable[[Attributes], dict[bytes, bytes]]
    """The read-only user.tierfs.* attributes of a regular file."""

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[int, Attributes]:
        """Create and open a regular file, or open the one that is there: (handle, attributes). FsError EEXIST with
        O_EXCL."""
        made = self.names.answered(caller)
        ticket = Ticket()
        while made is None:
            try:
                return self.names.create(parent, name, mode, flags, caller, ticket)
            except MustWait as wanted:
                await self.files.admission.wait(wanted, ticket)
            except FsError as error:
                # The kernel looked the name up before it asked to create it: here another client was faster.
                existing = self.names.lookup(parent, name) if error.errno == errno.EEXIST else None
                if existing is None or flags & os.O_EXCL:
                    raise
                made = existing.ino
        fh = await self.files.open(made, flags, caller.uid)
        return fh, self.names.attributes(made)

    # attributes

    async def set_attributes(self, ino: int, change: Change, caller: Caller) -> Attributes:
        """chmod, chown, truncate and utimensat. Permissions were checked by the kernel."""
        if self.names.answered(caller) is not None:
            return self.names.attributes(ino)
        if change.size is not None:
            attributes = self.names.attributes(ino)
            if stat.S_ISDIR(attributes.mode):
                raise FsError(errno.EISDIR)
            await self.files.truncate(ino, change.size, caller.uid)
        attributes = self.names.attributes(ino)
        mode = attributes.mode if change.mode is None else stat.S_IFMT(attributes.mode) | stat.S_IMODE(change.mode)
        if (change.uid is not None or change.gid is not None) and not stat.S_ISDIR(mode):
            mode = unprivileged(mode)
        new = attributes._replace(
            mode=mode,
            uid=attributes.uid if change.uid is None else change.uid,
            gid=attributes.gid if change.gid is None else change.gid,
            atime_ns=attributes.atime_ns if change.atime_ns is None else change.atime_ns,
            mtime_ns=attributes.mtime_ns if change.mtime_ns is None else change.mtime_ns,
            ctime_ns=time.time_ns(),
        )
        inode = self.files.inodes.get(ino)
        if inode is not None and change.mtime_ns is not None:
            os.utime(inode.fd, ns=(new.atime_ns, new.mtime_ns))
        with self.catalog.transaction() as transaction:
            self.catalog.set_attributes(new)
            if change != Change(size=change.size):
                self.catalog.log(OpKind.ATTRIBUTES, ino, new.ctime_ns)
            transaction.record(caller.request, ino)
        self.files.changed()
        return self.names.current(new)

    # handles

    def handle(self, fh: int) -> Handle:
        try:
            return self.files.handles[fh]
        except KeyError:
            raise FsError(errno.EBADF) from None

    async def read(self, fh: int, offset: int, length: int) -> bytes:
        """Waits for bytes that are still on their way from a slower tier."""
        inode = self.handle(fh).inode
        while True:
            filling = inode.filling
            found = await filling.wait(offset, length) if filling is not None else None
            if found is None:
                found = await self.files.local.read(inode.replica.tier, inode.fd, length, offset)
                if inode.filling is not filling and inode.filling is not None:
                    continue  # there was no room for the bytes: what was read is not them
            return found

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        """Bytes written. When the file's tier is full the file goes on one tier further down."""
        inode = self.handle(fh).inode
        done, tries = 0, 0
        while True:
            while inode.moving is not None:
                await inode.moving.wait()
            try:
                while done < len(data):
                    piece = partial(os.pwrite, inode.fd, data[done:] if done else data, offset + done)
                    done += self.files.local.at_once(inode.replica.tier, piece, "write")
                    tries = 0
                return done
            except OSError as error:
                tries += 1
                left = len(data) - done
                if error.errno in FULL and tries <= TRIES and await self.files.mover.make_room(inode, left):
                    continue
                if done:
                    return done
                raise

    async def flush(self, fh: int) -> None:
        """A descriptor was closed. Waits where the rule's ``close`` names a tier."""
        handle = self.handle(fh)
        if handle.writes and handle.inode.rule.close is not None:
            version = self.files.take_snapshot(handle.inode)
            await self.wait_durable(handle.inode.ino, version, handle.inode.rule.close)

    async def fsync(self, fh: int) -> None:
        """Waits for the tier that the rule's ``fsync`` names; else for the ack tier's own fsync."""
        inode = self.handle(fh).inode
        tier = inode.rule.fsync
        if tier is not None:
            version = self.files.take_snapshot(inode) if inode.writers else inode.replica.version
            await self.wait_durable(inode.ino, version, tier)
        elif self.files.policy.tier(inode.replica.tier).persistent:
            await self._sync_file(inode)
            await self._sync_catalog()

    async def _sync_file(self, inode: OpenInode) -> None:
        lane = self.files.lanes.get(inode.replica.tier)
        if lane is None:
            await trio.to_thread.run_sync(os.fsync, inode.fd)
        else:
            patience = lane.patience + os.fstat(inode.fd).st_size / SLOWEST
            await lane.run(partial(os.fsync, inode.fd), "fsync", patience=patience)

    async def fsync_directory(self, ino: int) -> None:
        """Names below a directory whose rule's ``fsync`` names a tier are safe when this returns, as far down as that:
        in the catalog, with all that was closed before durable there, so that no loss undoes them, or on the archive,
        too. Without such a rule they are as safe as files in the ack tier."""
        tier = self.files.rule_of(self.catalog.path_of(ino))[1].fsync
        if tier is not None:
            await self.wait_settled(tier)
        elif not any(tier.kind == "memory" for tier in self.files.policy.tiers):
            await self._sync_catalog()

    async def _sync_catalog(self) -> None:
        self.catalog.commit()
        await trio.to_thread.run_sync(self.catalog.sync)

    # extended attributes

    def get_xattr(self, ino: int, name: bytes) -> bytes:
        if not name.startswith(b"user."):  # in mode userspace the kernel asks for one before each write
            raise FsError(errno.ENODATA)
        if name.startswith(VIRTUAL):
            virtual = self.describe(self.names.attributes(ino))
            if name in virtual:
                return virtual[name]
            raise FsError(errno.ENODATA)
        value = self.catalog.xattr(ino, name)
        if value is None:
            raise FsError(errno.ENODATA)
        return value

    def list_xattrs(self, ino: int) -> list[bytes]:
        return [name for name, _ in self.catalog.xattrs(ino)]

    async def set_xattr(self, ino: int, name: bytes, value: bytes, caller: Caller, flags: int = 0) -> None:
        """setxattr(2), with XATTR_CREATE and XATTR_REPLACE."""
        if name == FLUSH_XATTR:
            await self._flush_request(ino)
            return
        self._check_writable(name)
        if self.names.answered(caller) is not None:
            return
        if flags and (self.catalog.xattr(ino, name) is not None) != (flags == os.XATTR_REPLACE):
            raise FsError(errno.ENODATA if flags == os.XATTR_REPLACE else errno.EEXIST)
        if len(value) > XATTR_SIZE_MAX:
            raise FsError(errno.E2BIG)
        others = sum(len(n) + len(v) for n, v in self.catalog.xattrs(ino) if n != name)
        if others + len(name) + len(value) > XATTR_LIST_MAX * 4:
            raise FsError(errno.ENOSPC)
        with self.catalog.transaction() as transaction:
            self.catalog.set_xattr(ino, name, value)
            self._touched(ino)
            transaction.record(caller.request)

    def remove_xattr(self, ino: int, name: bytes, caller: Caller) -> None:
        self._check_writable(name)
        if self.names.answered(caller) is not None:
            return
        with self.catalog.transaction() as transaction:
            if not self.catalog.remove_xattr(ino, name):
                raise FsError(errno.ENODATA)
            self._touched(ino)
            transaction.record(caller.request)

    def _check_writable(self, name: bytes) -> None:
        if not name.startswith(b"user."):
            raise FsError(errno.EOPNOTSUPP)
        if name.startswith(VIRTUAL):
            raise FsError(errno.EPERM)

    def _touched(self, ino: int) -> None:
        now = time.time_ns()
        self.catalog.add_links(ino, 0, now)
        self.catalog.log(OpKind.ATTRIBUTES, ino, now)
        self.files.changed()

    async def _flush_request(self, ino: int) -> None:
        attributes = self.names.attributes(ino)
        if not stat.S_ISREG(attributes.mode):
            raise FsError(errno.EOPNOTSUPP)
        inode = self.files.inodes.get(ino)
        tier = self.files.copies.reachable(ino, self.files.policy.tiers[-1].name)
        if tier is None:
            raise FsError(errno.EOPNOTSUPP)
        version = self.files.take_snapshot(inode) if inode and inode.writers else attributes.version
        await self.wait_durable(ino, version, tier)
