"""Mounts without a keeper, through pyfuse3: turns its calls into calls of `fs` and errors into errnos.
The only importer of pyfuse3.

A handler that raises anything but FUSEError would end the session, so every handler is wrapped:
a TierfsError or OSError becomes its errno, anything else EIO, logged once with its traceback.
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import pyfuse3
import trio

from tierfs.errors import FsError
from tierfs.fs.caller import Caller
from tierfs.fs.filesystem import Change, Filesystem
from tierfs.fuse import wire
from tierfs.fuse.device import SPIN, SUCCESSION, errno_of
from tierfs.fuse.requests import CACHE_SECONDS, FILES, LIST_BATCH
from tierfs.types import Attributes, Usage

log = logging.getLogger("tierfs.fuse")


P = ParamSpec("P")
R = TypeVar("R")


def _answer(
    handler: Callable[Concatenate[Adapter, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Adapter, P], Coroutine[Any, Any, R]]:
    opcode = wire.Op[handler.__name__.upper()]

    @functools.wraps(handler)
    async def wrapped(self: Adapter, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.wakefulness.asked()
        try:
            return await handler(self, *args, **kwargs)
        except Exception as error:
            raise pyfuse3.FUSEError(errno_of(error, opcode)) from None
        finally:
            self.wakefulness.answered()

    return wrapped


class Wakefulness:
    """Keeps the event loop from sleeping while requests come in quick succession, as fuse.device does by itself."""

    def __init__(self) -> None:
        self._answered_at = 0.0
        self._quick = False
        self._until = 0.0
        self._idle = trio.lowlevel.ParkingLot()

    def asked(self) -> None:
        self._quick = time.perf_counter() - self._answered_at < SUCCESSION

    def answered(self) -> None:
        self._answered_at = now = time.perf_counter()
        if self._quick:
            self._until = now + SPIN
            self._idle.unpark_all()

    async def stay_awake(self) -> NoReturn:
        """With a task that can always run, the loop asks for events without waiting for them."""
        while True:
            await self._idle.park()
            while time.perf_counter() < self._until:
                await trio.lowlevel.checkpoint()


class Session:
    """pyfuse3's session, of which a process can have one. Raises RuntimeError when it cannot mount."""

    def __init__(
        self, filesystem: Filesystem, space: Callable[[], Usage], mountpoint: Path, *, allow_other: bool
    ) -> None:
        options = {"default_permissions", "fsname=tierfs", "subtype=tierfs"}
        if allow_other:
            options.add("allow_other")
        self._adapter = Adapter(filesystem, space)
        pyfuse3.init(self._adapter, str(mountpoint), options)

    async def serve(self) -> None:
        """Answer until the mount ends, or `terminate`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._adapter.wakefulness.stay_awake)
            await pyfuse3.main()
            nursery.cancel_scope.cancel()

    def terminate(self) -> None:
        pyfuse3.terminate()

    def close(self) -> None:
        """Unmount."""
        pyfuse3.close(unmount=True)


class Adapter(pyfuse3.Operations):
    enable_writeback_cache = False
    supports_dot_lookup = True
    enable_acl = False

    def __init__(self, filesystem: Filesystem, space: Callable[[], Usage]) -> None:
        super().__init__()
        self._fs = filesystem
        self._names = filesystem.names
        self._files = filesystem.files
        self._space = space
        self.wakefulness = Wakefulness()

    # names

    @_answer
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        found = self._names.lookup(parent_inode, name)
        if found is None:
            absent = pyfuse3.EntryAttributes()
            absent.st_ino = pyfuse3.InodeT(0)
            absent.entry_timeout = CACHE_SECONDS
            return absent
        return _entry(found)

    def forget(self, inode_list: Sequence[tuple[int, int]]) -> Any:
        try:
            self._names.forget([ino for ino, _ in inode_list])
        except Exception:
            log.exception("forget failed")

    @_answer
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        fh, attributes = await self._fs.create(parent_inode, name, mode, flags, _caller(ctx))
        return pyfuse3.FileInfo(fh=fh), _entry(attributes)

    @_answer
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return _entry(self._names.make(parent_inode, name, mode, _caller(ctx)))

    @_answer
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return _entry(self._names.make(parent_inode, name, mode, _caller(ctx), rdev=rdev))

    @_answer
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return _entry(self._names.make(parent_inode, name, 0o120777, _caller(ctx), target=target))

    @_answer
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return _entry(self._names.link(inode, new_parent_inode, new_name, _caller(ctx)))

    @_answer
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        target = self._fs.catalog.target(inode)
        if target is None:
            raise FsError(errno.EINVAL)
        return target

    @_answer
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._names.unlink(parent_inode, name, _caller(ctx))

    @_answer
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._names.rmdir(parent_inode, name, _caller(ctx))

    @_answer
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        self._names.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, _caller(ctx))

    # attributes

    @_answer
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return _entry(self._names.attributes(inode))

    @_answer
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        change = Change(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        return _entry(await self._fs.set_attributes(inode, change, _caller(ctx)))

    @_answer
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        return self._fs.get_xattr(inode, name)

    @_answer
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return self._fs.list_xattrs(inode)

    @_answer
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._fs.set_xattr(inode, name, value, _caller(ctx))

    @_answer
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._fs.remove_xattr(inode, name, _caller(ctx))

    @_answer
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = self._space()
        data = pyfuse3.StatvfsData()
        block = wire.BLOCK
        data.f_bsize = data.f_frsize = block
        data.f_blocks = usage.capacity // block
        data.f_bfree = data.f_bavail = usage.available // block
        data.f_files = data.f_ffree = data.f_favail = FILES
        data.f_namemax = wire.NAME_MAX
        return data

    # files

    @_answer
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=await self._files.open(inode, flags, ctx.uid))

    @_answer
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._fs.read(fh, off, size)

    @_answer
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._fs.write(fh, off, buf)

    @_answer
    async def flush(self, fh: int) -> None:
        await self._fs.flush(fh)

    @_answer
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._fs.fsync(fh)

    @_answer
    async def release(self, fh: int) -> None:
        self._files.release(fh)
        while self._files.outdated:
            pyfuse3.invalidate_inode(pyfuse3.InodeT(self._files.outdated.pop()), attr_only=True)

    # directories: the handle is the inode

    @_answer
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        self._names.attributes(inode)
        return inode

    @_answer
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        while True:
            entries = self._names.entries(fh, start_id, LIST_BATCH)
            for entry in entries:
                if not pyfuse3.readdir_reply(token, entry.name, _entry(entry.attributes), entry.cookie):
                    return
                start_id = entry.cookie
            if len(entries) < LIST_BATCH:
                return

    @_answer
    async def releasedir(self, fh: int) -> None:
        pass

    @_answer
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._fs.fsync_directory(fh)


def _caller(ctx: pyfuse3.RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid)


def _entry(attributes: Attributes) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(attributes.ino)
    entry.st_mode = pyfuse3.ModeT(attributes.mode)
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_rdev = attributes.rdev
    entry.st_size = attributes.size
    entry.st_blocks = attributes.blocks
    entry.st_blksize = wire.BLOCK_SIZE
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    entry.entry_timeout = CACHE_SECONDS
    entry.attr_timeout = CACHE_SECONDS
    return entry
