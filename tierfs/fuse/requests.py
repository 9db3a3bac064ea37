"""Answers the kernel's requests by calls of `fs`: one method per opcode, bytes in and bytes out.

Methods that may have to wait return a coroutine. A request that a former daemon carried out, but was killed before it
could answer, is asked again: `Namespace.answered` knows what came of it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Coroutine

from tierfs.errors import FsError
from tierfs.fs.admission import MustWait, Ticket
from tierfs.fs.filesystem import Change, Filesystem
from tierfs.fuse import wire
from tierfs.fuse.device import Answer, Handler, Opened, Request
from tierfs.types import Attributes, Usage

CACHE_SECONDS = 3600
"""How long the kernel may keep names and attributes: it alone changes them, so for long. Writes through
passthrough make it drop the size and times it has."""

LIST_BATCH = 256
FILES = 1 << 40
"""What statfs gives as the number of files there is room for."""

DONE = b""


class Requests:
    def __init__(self, filesystem: Filesystem, space: Callable[[], Usage]) -> None:
        self._fs = filesystem
        self._names = filesystem.names
        self._files = filesystem.files
        self._space = space
        op = wire.Op
        self.handlers: dict[int, Handler] = {
            op.LOOKUP: self.lookup,
            op.GETATTR: self.getattr,
            op.SETATTR: self.setattr,
            op.READLINK: self.readlink,
            op.SYMLINK: self.symlink,
            op.MKNOD: self.mknod,
            op.MKDIR: self.mkdir,
            op.UNLINK: self.unlink,
            op.RMDIR: self.rmdir,
            op.RENAME: self.rename,
            op.RENAME2: self.rename2,
            op.LINK: self.link,
            op.OPEN: self.open,
            op.CREATE: self.create,
            op.READ: self.read,
            op.WRITE: self.write,
            op.STATFS: self.statfs,
            op.RELEASE: self.release,
            op.FLUSH: self.flush,
            op.FSYNC: self.fsync,
            op.SETXATTR: self.setxattr,
            op.GETXATTR: self.getxattr,
            op.LISTXATTR: self.listxattr,
            op.REMOVEXATTR: self.removexattr,
            op.OPENDIR: self.opendir,
            op.READDIR: self.readdir,
            op.READDIRPLUS: self.readdirplus,
            op.RELEASEDIR: self.nothing,
            op.FSYNCDIR: self.fsyncdir,
            op.DESTROY: self.nothing,
        }

    def forget(self, inos: list[int]) -> None:
        self._names.forget(inos)

    def closed(self, fh: int) -> None:
        self._files.release(fh)

    def outdated(self) -> list[int]:
        found = self._files.outdated
        if found:
            self._files.outdated = []
        return found

    def nothing(self, request: Request) -> bytes:
        return DONE

    # names

    def lookup(self, request: Request) -> bytes:
        found = self._names.lookup(request.ino, wire.name_of(request.body))
        return wire.absent_entry_out(CACHE_SECONDS) if found is None else _entry(found)

    def create(self, request: Request) -> Answer | Coroutine[object, object, Answer]:
        flags, mode, _, _ = wire.CREATE_IN.unpack_from(request.body)
        name = wire.name_of(request.body, wire.CREATE_IN.size)
        if request.former is not None:
            return self._opened(request.former.fh, flags, self._names.attributes(request.former.ino))
        caller = request.caller
        if not caller.resent:
            try:
                fh, made = self._names.create(request.ino, name, mode, flags, caller, Ticket())
            except MustWait:
                pass
            except FsError as error:
                if error.errno != errno.EEXIST:
                    raise
            else:
                return self._opened(fh, flags, made)
        return self._create_again(request, name, mode, flags)

    async def _create_again(self, request: Request, name: bytes, mode: int, flags: int) -> Answer:
        fh, found = await self._fs.create(request.ino, name, mode, flags, request.caller)
        return self._opened(fh, flags, found)

    def _opened(self, fh: int, flags: int, made: Attributes | None = None) -> Opened:
        """The answer to CREATE (with the attributes of what was ``made``) and OPEN."""
        handle = self._files.handles[fh]
        inode = handle.inode
        entry = _entry(made) if made is not None else b""
        return Opened(fh, inode.ino, flags, inode.backing_id, not handle.waits_at_close, entry)

    def mkdir(self, request: Request) -> bytes:
        mode, _ = wire.MKDIR_IN.unpack_from(request.body)
        return self._make(request, wire.name_of(request.body, wire.MKDIR_IN.size), _DIRECTORY | mode)

    def mknod(self, request: Request) -> bytes:
        mode, rdev, _, _ = wire.MKNOD_IN.unpack_from(request.body)
        return self._make(request, wire.name_of(request.body, wire.MKNOD_IN.size), mode, rdev=rdev)

    def symlink(self, request: Request) -> bytes:
        name, target = wire.two_names(request.body)
        return self._make(request, name, _SYMLINK, target=target)

    def _make(self, request: Request, name: bytes, mode: int, *, rdev: int = 0, target: bytes | None = None) -> bytes:
        return _entry(self._names.make(request.ino, name, mode, request.caller, rdev=rdev, target=target))

    def link(self, request: Request) -> bytes:
        (ino,) = wire.U64.unpack_from(request.body)
        name = wire.name_of(request.body, wire.U64.size)
        return _entry(self._names.link(ino, request.ino, name, request.caller))

    def readlink(self, request: Request) -> bytes:
        target = self._fs.catalog.target(request.ino)
        if target is None:
            raise FsError(errno.EINVAL)
        return target

    def unlink(self, request: Request) -> bytes:
        self._names.unlink(request.ino, wire.name_of(request.body), request.caller)
        return DONE

    def rmdir(self, request: Request) -> bytes:
        self._names.rmdir(request.ino, wire.name_of(request.body), request.caller)
        return DONE

    def rename(self, request: Request) -> bytes:
        (parent2,) = wire.U64.unpack_from(request.body)
        return self._rename(request, parent2, 0, wire.U64.size)

    def rename2(self, request: Request) -> bytes:
        parent2, flags, _ = wire.RENAME2_IN.unpack_from(request.body)
        return self._rename(request, parent2, flags, wire.RENAME2_IN.size)

    def _rename(self, request: Request, parent2: int, flags: int, offset: int) -> bytes:
        name, name2 = wire.two_names(request.body, offset)
        self._names.rename(request.ino, name, parent2, name2, flags, request.caller)
        return DONE

    # attributes

    def getattr(self, request: Request) -> bytes:
        return wire.attr_out(self._names.attributes(request.ino), CACHE_SECONDS)

    def setattr(self, request: Request) -> Coroutine[object, object, Answer]:
        return self._setattr(request, Change(*wire.parse_setattr(request.body, time.time_ns())))

    async def _setattr(self, request: Request, change: Change) -> bytes:
        return wire.attr_out(await self._fs.set_attributes(request.ino, change, request.caller), CACHE_SECONDS)

    def getxattr(self, request: Request) -> bytes:
        room, _ = wire.XATTR_IN.unpack_from(request.body)
        return wire.xattr_out(self._fs.get_xattr(request.ino, wire.name_of(request.body, wire.XATTR_IN.size)), room)

    def listxattr(self, request: Request) -> bytes:
        room, _ = wire.XATTR_IN.unpack_from(request.body)
        return wire.xattr_out(b"".join(name + b"\0" for name in self._fs.list_xattrs(request.ino)), room)

    def setxattr(self, request: Request) -> Coroutine[object, object, Answer]:
        size, flags = wire.XATTR_IN.unpack_from(request.body)
        name, _, rest = request.body[wire.XATTR_IN.size :].partition(b"\0")
        return self._setxattr(request, name, rest[:size], flags)

    async def _setxattr(self, request: Request, name: bytes, value: bytes, flags: int) -> bytes:
        await self._fs.set_xattr(request.ino, name, value, request.caller, flags)
        return DONE

    def removexattr(self, request: Request) -> bytes:
        self._fs.remove_xattr(request.ino, wire.name_of(request.body), request.caller)
        return DONE

    def statfs(self, request: Request) -> bytes:
        usage = self._space()
        return wire.statfs_out(usage.capacity, usage.available, FILES)

    # files

    def open(self, request: Request) -> Answer | Coroutine[object, object, Answer]:
        (flags,) = wire.U32.unpack_from(request.body)
        if request.former is not None:
            return self._opened(request.former.fh, flags)
        return self._open(request, flags)

    async def _open(self, request: Request, flags: int) -> Answer:
        return self._opened(await self._files.open(request.ino, flags, request.uid), flags)

    def read(self, request: Request) -> Coroutine[object, object, Answer]:
        fh, offset, size, _ = wire.READ_IN.unpack_from(request.body)
        return self._fs.read(fh, offset, size)

    def write(self, request: Request) -> Coroutine[object, object, Answer]:
        fh, offset, size, _ = wire.READ_IN.unpack_from(request.body)
        data = request.body[wire.WRITE_DATA : wire.WRITE_DATA + size]
        return self._write(fh, offset, data)

    async def _write(self, fh: int, offset: int, data: bytes) -> bytes:
        return wire.size_out(await self._fs.write(fh, offset, data))

    def release(self, request: Request) -> bytes:
        (fh,) = wire.U64.unpack_from(request.body)
        self._files.release(fh)
        return DONE

    def flush(self, request: Request) -> Coroutine[object, object, Answer]:
        (fh,) = wire.U64.unpack_from(request.body)
        return _then_done(self._fs.flush(fh))

    def fsync(self, request: Request) -> Coroutine[object, object, Answer]:
        (fh,) = wire.U64.unpack_from(request.body)
        return _then_done(self._fs.fsync(fh))

    # directories: the handle says nothing, so a new daemon needs no table of them

    def opendir(self, request: Request) -> bytes:
        self._names.attributes(request.ino)
        return wire.open_out(0)

    def readdir(self, request: Request) -> bytes:
        return self._list(request, wire.dirent)

    def readdirplus(self, request: Request) -> bytes:
        return self._list(request, _direntplus)

    def _list(self, request: Request, form: Callable[[Attributes, bytes, int], bytes]) -> bytes:
        _, start, room, _ = wire.READ_IN.unpack_from(request.body)
        filled: list[bytes] = []
        while True:
            entries = self._names.entries(request.ino, start, LIST_BATCH)
            for entry in entries:
                packed = form(entry.attributes, entry.name, entry.cookie)
                if len(packed) > room:
                    return b"".join(filled)
                filled.append(packed)
                room -= len(packed)
                start = entry.cookie
            if len(entries) < LIST_BATCH:
                return b"".join(filled)

    def fsyncdir(self, request: Request) -> Coroutine[object, object, Answer]:
        return _then_done(self._fs.fsync_directory(request.ino))


_DIRECTORY, _SYMLINK = 0o040000, 0o120777


def _entry(attributes: Attributes) -> bytes:
    return wire.entry_out(attributes, CACHE_SECONDS)


def _direntplus(attributes: Attributes, name: bytes, cookie: int) -> bytes:
    return wire.direntplus(attributes, name, cookie, CACHE_SECONDS)


async def _then_done(waiting: Coroutine[object, object, None]) -> bytes:
    await waiting
    return DONE
