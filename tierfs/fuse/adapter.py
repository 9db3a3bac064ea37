"""The only importer of pyfuse3: turns kernel requests into calls of `fs` and errors into errnos.

A handler that raises anything but FUSEError would end the session, so every handler is wrapped:
a TierfsError or OSError becomes its errno, anything else EIO, logged once with its traceback.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3

from tierfs.errors import FsError, TierfsError
from tierfs.fs.caller import Caller
from tierfs.fs.filesystem import Change, Filesystem
from tierfs.types import Attributes, Usage

log = logging.getLogger("tierfs.fuse")

CACHE_SECONDS = 3600.0
"""How long the kernel may keep names and attributes: it alone changes them, so for long. Writes through
passthrough make it drop the size and times it has."""

RESENT = 1 << 30
REQUEST = RESENT - 1
LIST_BATCH = 256

P = ParamSpec("P")
R = TypeVar("R")


def _answer(
    handler: Callable[Concatenate[Adapter, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Adapter, P], Coroutine[Any, Any, R]]:
    @functools.wraps(handler)
    async def wrapped(self: Adapter, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except FsError as error:
            raise pyfuse3.FUSEError(error.errno) from None
        except TierfsError as error:
            log.error("%s: %s", handler.__name__, error)
            raise pyfuse3.FUSEError(error.errno) from None
        except OSError as error:
            if error.errno not in _ORDINARY:
                log.error("%s: %s", handler.__name__, error)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        except Exception:
            log.exception("%s failed", handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return wrapped


_ORDINARY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINVAL})


_CHANNEL_ENDED = frozenset({errno.EIO, errno.ECONNRESET})
"""What libfuse makes of the end of the keeper's channel: a short read, or a reset if a reply was left unread in it."""


async def serve_kernel() -> None:
    """pyfuse3's loop, until the mount ends."""
    try:
        await pyfuse3.main()
    except* OSError as group:
        if any(getattr(error, "errno", None) not in _CHANNEL_ENDED for error in group.exceptions):
            raise


class Adapter(pyfuse3.Operations):
    enable_writeback_cache = False
    supports_dot_lookup = True
    enable_acl = False

    def __init__(self, filesystem: Filesystem, space: Callable[[], Usage], *, keeper: bool) -> None:
        super().__init__()
        self._fs = filesystem
        self._names = filesystem.names
        self._files = filesystem.files
        self._space = space
        self._keeper = keeper

    def _caller(self, ctx: pyfuse3.RequestContext) -> Caller:
        if self._keeper:
            return Caller(ctx.uid, ctx.gid, ctx.pid & REQUEST, bool(ctx.pid & RESENT))
        return Caller(ctx.uid, ctx.gid)

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
        caller = self._caller(ctx)
        made = self._names.answered(caller)
        if made is None:
            try:
                fh, attributes = self._names.create(parent_inode, name, mode, flags, caller)
            except FsError as error:
                # The kernel looked the name up before it asked to create it: here another client was faster.
                existing = self._names.lookup(parent_inode, name) if error.errno == errno.EEXIST else None
                if existing is None or flags & os.O_EXCL:
                    raise
                made = existing.ino
            else:
                return pyfuse3.FileInfo(fh=fh), _entry(attributes)
        fh = await self._files.open(made, flags, ctx.uid)
        return pyfuse3.FileInfo(fh=fh), _entry(self._names.attributes(made))

    async def _make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        ctx: pyfuse3.RequestContext,
        rdev: int = 0,
        target: bytes | None = None,
    ) -> pyfuse3.EntryAttributes:
        caller = self._caller(ctx)
        made = self._names.answered(caller)
        if made is not None:
            return _entry(self._names.attributes(made))
        return _entry(self._names.make(parent, name, mode, caller, rdev=rdev, target=target))

    @_answer
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return await self._make(parent_inode, name, mode, ctx)

    @_answer
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return await self._make(parent_inode, name, mode, ctx, rdev=rdev)

    @_answer
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return await self._make(parent_inode, name, 0o120777, ctx, target=target)

    @_answer
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        caller = self._caller(ctx)
        if self._names.answered(caller) is not None:
            return _entry(self._names.attributes(inode))
        return _entry(self._names.link(inode, new_parent_inode, new_name, caller))

    @_answer
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        target = self._fs.catalog.target(inode)
        if target is None:
            raise FsError(errno.EINVAL)
        return target

    @_answer
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        caller = self._caller(ctx)
        if self._names.answered(caller) is None:
            self._names.unlink(parent_inode, name, caller)

    @_answer
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        caller = self._caller(ctx)
        if self._names.answered(caller) is None:
            self._names.rmdir(parent_inode, name, caller)

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
        caller = self._caller(ctx)
        if self._names.answered(caller) is None:
            self._names.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, caller)

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
        return _entry(await self._fs.set_attributes(inode, change, self._caller(ctx)))

    @_answer
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if self._names.answered(self._caller(ctx)) is not None:
            # pyfuse3 asks on behalf of a setxattr with XATTR_CREATE or XATTR_REPLACE that a former daemon carried out:
            # the error 0 makes it answer that setxattr with success.
            raise pyfuse3.FUSEError(0)
        return self._fs.get_xattr(inode, name)

    @_answer
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return self._fs.list_xattrs(inode)

    @_answer
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._fs.set_xattr(inode, name, value, self._caller(ctx))

    @_answer
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._fs.remove_xattr(inode, name, self._caller(ctx))

    @_answer
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = self._space()
        data = pyfuse3.StatvfsData()
        block = 4096
        data.f_bsize = data.f_frsize = block
        data.f_blocks = usage.capacity // block
        data.f_bfree = data.f_bavail = usage.available // block
        data.f_files = data.f_ffree = data.f_favail = 1 << 40
        data.f_namemax = 255
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
        return self._fs.write(fh, off, buf)

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

    # directories: the handle is the inode, so a new daemon needs no table of them

    @_answer
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        self._names.attributes(inode)
        return inode << 32

    @_answer
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        while True:
            entries = self._names.entries(fh >> 32, start_id, LIST_BATCH)
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
        await self._fs.fsync_directory()


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
    entry.st_blksize = 1 << 20
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    entry.entry_timeout = CACHE_SECONDS
    entry.attr_timeout = CACHE_SECONDS
    return entry
