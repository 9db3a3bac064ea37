"""What lies beside each replica on a persistent tier, so that the catalog can be rebuilt from the tiers alone.

A `Beside` says what the catalog said of the file when the replica became durable: inode and version, size and digest,
attributes, user xattrs and all names, each with the chain of directories above it. It is kept in the xattr
``user.tierfs.replica`` of the replica's own file or, where that does not fit or the filesystem has no user xattrs, in
the file ``<key>.record`` next to it. Either is synced before the replica has its name.

A later rename does not change it: its names are true as of ``seq``, and whoever rebuilds takes the newest statement
about each file. What was written into the replica later (a new version in place) shows in the size and mtime of the
replica's file, which the record carries as they were.

Format 1: ``tierfs-replica 1 <crc32 of the rest, 8 hex digits> <JSON>``, bytes as latin-1 text. Another number is
another format: such a record is treated as if there were none. Records are read back from disks that anybody may
have damaged or forged, so `decode` takes nothing for granted: no inode number, name or size in it is out of range,
and names lead nowhere but down from the mount's root.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tierfs.durable import create_temporary

XATTR = "user.tierfs.replica"
SUFFIX = ".record"
"""Of the file beside a replica, after its key."""
LIMIT = 1 << 20
"""Bytes of a record, more than all the xattrs that a file may have."""
XATTR_LIMIT = 3 << 10
"""Longer records go to a file of their own: ext4 has 4 KiB for all xattrs of a file."""
NAMES = 64
"""Names of a file with many hard links that its record has."""
DEPTH = 4096

_MAGIC = b"tierfs-replica 1 "
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MOST = (1 << 63) - 1
_NO_XATTR = (errno.ENOTSUP, errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ERANGE)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Chain = tuple[tuple[int, bytes], ...]
"""From the root down, each with the inode that it names; the last one is the file."""


@dataclass(frozen=True, slots=True)
class DirectoryBeside:
    """A directory above a recorded file."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Beside:
    ino: int
    version: int
    seq: int
    """The catalog's next sequence number at that moment: what has a higher one came later."""
    mode: int
    uid: int
    gid: int
    size: int
    """Bytes."""
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    digest: bytes | None
    """None: the replica was synced where it had been written, and never read."""
    names: tuple[Chain, ...]
    directories: dict[int, DirectoryBeside]
    xattrs: dict[bytes, bytes]
    file_mtime_ns: int = 0
    """mtime of the replica's own file."""

    def of_file(self, digest: bytes | None, size: int, mtime_ns: int) -> Beside:
        """The same, for a replica with this digest in a file with these stat fields."""
        return replace(self, digest=digest, size=size, file_mtime_ns=mtime_ns)

    @property
    def paths(self) -> list[tuple[bytes, ...]]:
        return [tuple(name for _, name in chain) for chain in self.names]


def encode(record: Beside) -> bytes:
    """Raises nothing: what a catalog may hold, a record may."""
    fields = [
        [record.ino, record.version, record.seq],
        [record.mode, record.uid, record.gid, record.size],
        [record.atime_ns, record.mtime_ns, record.ctime_ns, record.file_mtime_ns],
        record.digest.hex() if record.digest else None,
        [[[ino, name.decode("latin-1")] for ino, name in chain] for chain in record.names],
        [[ino, d.mode, d.uid, d.gid, d.mtime_ns] for ino, d in record.directories.items()],
        [[name.decode("latin-1"), value.decode("latin-1")] for name, value in record.xattrs.items()],
    ]
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("latin-1")
    return _MAGIC + b"%08x " % zlib.crc32(text) + text


def decode(raw: bytes) -> Beside | None:
    """None when it is no record of this format, damaged, or says what cannot be."""
    head = len(_MAGIC) + 9
    if len(raw) > LIMIT or not raw.startswith(_MAGIC) or raw[head - 1 : head] != b" ":
        return None
    text = raw[head:]
    if raw[len(_MAGIC) : head - 1] != b"%08x" % zlib.crc32(text):
        return None
    try:
        return _parse(json.loads(text.decode("latin-1")))
    except (ValueError, TypeError, RecursionError, UnicodeError):
        return None


def _parse(fields: Any) -> Beside:
    ids, owner, times, digest, names, directories, xattrs = fields
    ino, version, seq = (_number(value) for value in ids)
    mode, uid, gid, size = (_number(value) for value in owner)
    atime, mtime, ctime, file_mtime = (_time(value) for value in times)
    if ino < 2 or version < 1 or not stat.S_ISREG(mode) or mode > 0o177777 or max(uid, gid) > 0xFFFFFFFF:
        raise ValueError("no regular file")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise ValueError("no digest")
    return Beside(
        ino=ino,
        version=version,
        seq=seq,
        mode=mode,
        uid=uid,
        gid=gid,
        size=size,
        atime_ns=atime,
        mtime_ns=mtime,
        ctime_ns=ctime,
        digest=bytes.fromhex(digest) if digest else None,
        names=tuple(_chain(chain, ino) for chain in _limited(names, NAMES)),
        directories={_number(row[0]): _directory(*row[1:]) for row in _limited(directories, NAMES * DEPTH)},
        xattrs={_xattr(name): _bytes(value) for name, value in xattrs},
        file_mtime_ns=file_mtime,
    )


def _limited(values: Any, most: int) -> list[Any]:
    if not isinstance(values, list) or len(values) > most:
        raise ValueError("too many")
    return values


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("no number")
    return value


def _time(value: Any) -> int:
    if type(value) is not int or abs(value) > _MOST:
        raise ValueError("no time")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value.encode("latin-1")


def _xattr(value: Any) -> bytes:
    name = _bytes(value)
    if not name.startswith(b"user.") or name.startswith(b"user.tierfs.") or len(name) > 255 or b"\0" in name:
        raise ValueError("no xattr of a user")
    return name


def is_name(name: bytes) -> bool:
    """Whether a file may be called so."""
    return 0 < len(name) <= 255 and name not in (b".", b"..") and b"/" not in name and b"\0" not in name


def _chain(rows: Any, ino: int) -> Chain:
    chain = tuple((_number(number), _bytes(name)) for number, name in _limited(rows, DEPTH))
    inos = [number for number, _ in chain]
    if not chain or inos[-1] != ino or min(inos) < 2 or len(set(inos)) != len(inos):
        raise ValueError("no path of this file")
    if not all(is_name(name) for _, name in chain) or chain[0][1] == b".tierfs":
        raise ValueError("no name")
    return chain


def _directory(mode: Any, uid: Any, gid: Any, mtime_ns: Any) -> DirectoryBeside:
    found = DirectoryBeside(_number(mode), _number(uid), _number(gid), _time(mtime_ns))
    if not stat.S_ISDIR(found.mode) or found.mode > 0o177777 or max(found.uid, found.gid) > 0xFFFFFFFF:
        raise ValueError("no directory")
    return found


Describe = Callable[[bytes | None, int, int], bytes]
"""(digest, size, mtime of the file in ns) → the record to keep beside a replica."""


def describer(record: Beside | None) -> Describe | None:
    """Completes ``record`` once the copy is made; None when there is none to keep."""
    if record is None:
        return None
    return lambda digest, size, mtime_ns: encode(record.of_file(digest, size, mtime_ns))


# where it lies


def write_record(fd: int, raw: bytes, tmp: int, directory: int, key: str) -> None:
    """Put a record on the open file of the replica ``key`` or, where it does not fit, beside it in ``directory``, by
    way of ``tmp``. Durable once file and directory are synced. Raises OSError."""
    if len(raw) <= XATTR_LIMIT:
        try:
            os.setxattr(fd, XATTR, raw)
        except OSError as error:
            if error.errno not in _NO_XATTR:
                raise
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key + SUFFIX, dir_fd=directory)
            return
    temp = create_temporary(tmp, key)
    try:
        with open(temp.fd, "wb", closefd=False) as file:
            file.write(raw)
        temp.commit(directory, (key + SUFFIX).encode())
    finally:
        temp.discard()
    with contextlib.suppress(OSError):  # an older one must not be taken for this replica's
        os.removexattr(fd, XATTR)


def read_record(directory: int, key: str) -> bytes | None:
    """None when there is none. Raises OSError: ENOENT when there is no replica."""
    fd = os.open(key, _READ, dir_fd=directory)
    try:
        return os.getxattr(fd, XATTR)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.ERANGE, errno.E2BIG):
            raise
    finally:
        os.close(fd)
    try:
        fd = os.open(key + SUFFIX, _READ, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    with open(fd, "rb") as file:
        return file.read(LIMIT + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else None
