"""Byte layouts of the FUSE kernel protocol: requests are taken apart and replies put together here, and nowhere else.

Source: the kernel's include/uapi/linux/fuse.h, protocol 7.40 and later (fuse_*_in and fuse_*_out of the names given).
All integers are little-endian; a name is ended by a zero byte; offsets count from the start of the structure.
"""

from __future__ import annotations

import enum
import errno
import struct
from typing import NamedTuple

from tierfs.types import Attributes

Buffer = bytes | bytearray | memoryview


class Op(enum.IntEnum):
    """Opcodes that the daemon answers (fuse_opcode); every other one gets ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


UNANSWERED = frozenset({Op.FORGET, Op.INTERRUPT, Op.BATCH_FORGET})
"""Requests that the kernel expects no reply to, and never sends again."""

IN_HEADER = struct.Struct("<IIQQIIII")
"""fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, total_extlen and padding"""
OUT_HEADER = struct.Struct("<IiQ")
"""fuse_out_header: len, error (negative errno; for notifications the positive code), unique"""

UNIQUE_RESEND = 1 << 63
"""Bit of ``unique``: the kernel sent the request before, to a daemon that did not answer."""

MAX_WRITE = 1 << 20
BUFFER_SIZE = MAX_WRITE + 4096
"""Room for any request; the kernel refuses to hand one to a smaller buffer."""

# fuse_init_in, fuse_init_out

_INIT_IN = struct.Struct("<IIII")
"""major, minor, max_readahead, flags"""
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
"""major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
map_alignment, flags2, max_stack_depth"""
MAJOR, MINOR = 7, 40
STACK_DEPTH = 2
"""How deep backing files may be stacked: one on overlayfs is allowed, too."""

ASYNC_READ, ATOMIC_O_TRUNC, EXPORT_SUPPORT, BIG_WRITES = 1 << 0, 1 << 3, 1 << 4, 1 << 5
AUTO_INVAL_DATA, DO_READDIRPLUS, READDIRPLUS_AUTO, ASYNC_DIO = 1 << 12, 1 << 13, 1 << 14, 1 << 15
PARALLEL_DIROPS, MAX_PAGES, INIT_EXT = 1 << 18, 1 << 22, 1 << 30
HANDLE_KILLPRIV_V2 = 1 << 28
"""The filesystem clears setuid and setgid bits itself. Without it the kernel asks for ``security.capability`` before
each single write, also with passthrough (file_remove_privs in fs/inode.c; fs/fuse/inode.c sets SB_NOSEC for it)."""
PASSTHROUGH2, HAS_RESEND2 = 1 << (37 - 32), 1 << (39 - 32)
WANTED = (
    ASYNC_READ
    | ATOMIC_O_TRUNC
    | EXPORT_SUPPORT
    | BIG_WRITES
    | AUTO_INVAL_DATA
    | DO_READDIRPLUS
    | READDIRPLUS_AUTO
    | ASYNC_DIO
    | PARALLEL_DIROPS
    | MAX_PAGES
    | HANDLE_KILLPRIV_V2
)
"""What is asked for where the kernel offers it. Not among them: writeback caching, which excludes passthrough."""

FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 5, 1 << 7

_NOTIFY_INVAL_INODE, _NOTIFY_RESEND = 2, 7
NOTIFY_RESEND = OUT_HEADER.pack(OUT_HEADER.size, _NOTIFY_RESEND, 0)
"""The kernel is to send every unanswered request again, with UNIQUE_RESEND set."""

# bodies of requests

U64 = struct.Struct("<Q")
U32 = struct.Struct("<I")
RENAME2_IN = struct.Struct("<QII")
"""newdir, flags, padding"""
MKNOD_IN = struct.Struct("<IIII")
"""mode, rdev, umask (applied by the kernel), padding"""
MKDIR_IN = struct.Struct("<II")
"""mode, umask"""
CREATE_IN = struct.Struct("<IIII")
"""flags, mode, umask, open_flags"""
READ_IN = struct.Struct("<QQII")
"""fh, offset, size, read_flags, and 16 bytes more; WRITE and READDIR begin alike"""
WRITE_DATA = 40
"""Where the bytes of a WRITE begin in its body."""
XATTR_IN = struct.Struct("<II")
"""SETXATTR: size, flags; GETXATTR, LISTXATTR: size of the caller's buffer, padding"""
FORGET_ONE = struct.Struct("<QQ")
"""nodeid, nlookup"""

_SETATTR_IN = struct.Struct("<IIQQQqqqIIIIIII4x")
"""valid, padding, fh, size, lock_owner, atime, mtime, ctime, their nanoseconds, mode, unused, uid, gid"""
FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE, FATTR_ATIME, FATTR_MTIME = (1 << bit for bit in range(6))
FATTR_ATIME_NOW, FATTR_MTIME_NOW = 1 << 7, 1 << 8

# bodies of replies

_ATTR = struct.Struct("<QQQqqqIIIIIIIIII")
"""fuse_attr: ino, size, blocks, atime, mtime, ctime, their nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags"""
_ENTRY = struct.Struct("<QQQQII")
"""fuse_entry_out up to its fuse_attr: nodeid, generation, entry_valid, attr_valid, their nanoseconds"""
_ATTR_OUT = struct.Struct("<QII")
"""fuse_attr_out up to its fuse_attr: attr_valid, its nanoseconds, padding"""
_OPEN_OUT = struct.Struct("<QII")
"""fh, open_flags, backing_id"""
_SIZE_OUT = struct.Struct("<II")
"""WRITE: size written; GETXATTR and LISTXATTR asked with size 0: size needed"""
_STATFS = struct.Struct("<QQQQQIII4x24x")
"""blocks, bfree, bavail, files, ffree, bsize, namelen, frsize"""
_DIRENT = struct.Struct("<QQII")
"""ino, off (what a listing goes on from), namelen, type"""

BLOCK = 4096
BLOCK_SIZE = 1 << 20
"""st_blksize: what programs should read and write at a time, in bytes."""
NAME_MAX = 255
_SECOND = 1_000_000_000


class Init(NamedTuple):
    """The kernel's first request."""

    unique: int
    minor: int
    max_readahead: int
    flags: int
    flags2: int


def parse_init(request: Buffer) -> Init:
    """Raises ValueError when ``request`` is no INIT of a protocol that this module speaks."""
    length, opcode, unique = IN_HEADER.unpack_from(request)[:3]
    if opcode != Op.INIT or length < IN_HEADER.size + _INIT_IN.size:
        raise ValueError(f"opcode {opcode} before INIT")
    major, minor, readahead, flags = _INIT_IN.unpack_from(request, IN_HEADER.size)
    if major != MAJOR:
        raise ValueError(f"FUSE protocol {major}, not {MAJOR}")
    flags2 = 0
    if flags & INIT_EXT and length >= IN_HEADER.size + _INIT_IN.size + U32.size:
        (flags2,) = U32.unpack_from(request, IN_HEADER.size + _INIT_IN.size)
    return Init(unique, minor, readahead, flags, flags2)


def missing_features(init: Init) -> list[str]:
    """Names of the features the keeper needs that this kernel does not offer."""
    needed = {"passthrough": PASSTHROUGH2, "resend": HAS_RESEND2}
    return [name for name, bit in needed.items() if not init.flags2 & bit]


def init_reply(init: Init) -> bytes:
    body = _INIT_OUT.pack(
        MAJOR,
        min(MINOR, init.minor),
        init.max_readahead,
        WANTED & init.flags | INIT_EXT,
        0,
        0,
        MAX_WRITE,
        1,
        MAX_WRITE // BLOCK,
        0,
        PASSTHROUGH2 | HAS_RESEND2,
        STACK_DEPTH,
    )
    return reply(init.unique, body)


def reply(unique: int, body: bytes) -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique) + body


def error_reply(unique: int, code: int) -> bytes:
    """``code`` is a positive errno."""
    return OUT_HEADER.pack(OUT_HEADER.size, -code, unique)


def attributes_outdated(ino: int) -> bytes:
    """FUSE_NOTIFY_INVAL_INODE for the attributes alone (a negative offset leaves cached data alone)."""
    body = struct.pack("<Qqq", ino, -1, 0)
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), _NOTIFY_INVAL_INODE, 0) + body


def name_of(body: bytes, offset: int = 0) -> bytes:
    """The one name that ends ``body``."""
    return body[offset:-1]


def two_names(body: bytes, offset: int = 0) -> tuple[bytes, bytes]:
    first, second, _ = body[offset:].split(b"\0", 2)
    return first, second


class Setattr(NamedTuple):
    """What a SETATTR is to change; None leaves a field alone. Times in ns (None with ``*_now``: the present)."""

    mode: int | None
    uid: int | None
    gid: int | None
    size: int | None
    atime_ns: int | None
    mtime_ns: int | None


def parse_setattr(body: bytes, now_ns: int) -> Setattr:
    fields = _SETATTR_IN.unpack_from(body)
    valid = fields[0]

    def time(bit: int, now_bit: int, seconds: int, nanoseconds: int) -> int | None:
        if not valid & bit:
            return None
        return now_ns if valid & now_bit else seconds * _SECOND + nanoseconds

    return Setattr(
        mode=fields[11] if valid & FATTR_MODE else None,
        uid=fields[13] if valid & FATTR_UID else None,
        gid=fields[14] if valid & FATTR_GID else None,
        size=fields[3] if valid & FATTR_SIZE else None,
        atime_ns=time(FATTR_ATIME, FATTR_ATIME_NOW, fields[5], fields[8]),
        mtime_ns=time(FATTR_MTIME, FATTR_MTIME_NOW, fields[6], fields[9]),
    )


def parse_batch_forget(body: bytes) -> list[int]:
    """The inodes of a BATCH_FORGET (fuse_batch_forget_in: count, dummy, then fuse_forget_one)."""
    (count,) = U32.unpack_from(body)
    return [FORGET_ONE.unpack_from(body, 8 + FORGET_ONE.size * number)[0] for number in range(count)]


def attr(a: Attributes) -> bytes:
    atime, atime_ns = divmod(a.atime_ns, _SECOND)
    mtime, mtime_ns = divmod(a.mtime_ns, _SECOND)
    ctime, ctime_ns = divmod(a.ctime_ns, _SECOND)
    return _ATTR.pack(
        a.ino,
        a.size,
        a.blocks,
        atime,
        mtime,
        ctime,
        atime_ns,
        mtime_ns,
        ctime_ns,
        a.mode,
        a.nlink,
        a.uid,
        a.gid,
        a.rdev,
        BLOCK_SIZE,
        0,
    )


def entry_out(a: Attributes, valid: int) -> bytes:
    """fuse_entry_out; ``valid`` is how many seconds the kernel may keep name and attributes."""
    return _ENTRY.pack(a.ino, 0, valid, valid, 0, 0) + attr(a)


def absent_entry_out(valid: int) -> bytes:
    """The name does not exist, which the kernel may remember for ``valid`` seconds."""
    return _ENTRY.pack(0, 0, valid, 0, 0, 0) + bytes(_ATTR.size)


def attr_out(a: Attributes, valid: int) -> bytes:
    return _ATTR_OUT.pack(valid, 0, 0) + attr(a)


def open_out(fh: int, flags: int = 0, backing_id: int = 0) -> bytes:
    return _OPEN_OUT.pack(fh, flags | (FOPEN_PASSTHROUGH if backing_id else 0), backing_id)


def size_out(size: int) -> bytes:
    return _SIZE_OUT.pack(size, 0)


def xattr_out(value: bytes, room: int) -> bytes:
    """The reply to GETXATTR or LISTXATTR by a caller with ``room`` bytes. Raises OSError ERANGE when it is too long."""
    if room == 0:
        return size_out(len(value))
    if len(value) > room:
        raise OSError(errno.ERANGE, "the value does not fit")
    return value


def statfs_out(capacity: int, available: int, files: int) -> bytes:
    """fuse_statfs_out for ``capacity`` and ``available`` bytes and a limit of ``files`` files."""
    free = available // BLOCK
    return _STATFS.pack(capacity // BLOCK, free, free, files, files, BLOCK, NAME_MAX, BLOCK)


def dirent(a: Attributes, name: bytes, cookie: int) -> bytes:
    """fuse_dirent, filled up to a multiple of 8 bytes; ``cookie`` is where a listing goes on after it."""
    return _DIRENT.pack(a.ino, cookie, len(name), a.mode >> 12) + name + bytes(-len(name) % 8)


def direntplus(a: Attributes, name: bytes, cookie: int, valid: int) -> bytes:
    """fuse_direntplus: the entry as LOOKUP would answer it, which counts as a lookup, and the fuse_dirent."""
    return entry_out(a, valid) + dirent(a, name, cookie)
