"""What tiers have in common, and the store of every tier but the archive: one plain file per replica."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tierfs.durable import TemporaryFile, create_temporary, fsync_directory
from tierfs.errors import TierError
from tierfs.tiers.beside import SUFFIX, Beside, Describe, decode, read_record, write_record
from tierfs.types import Usage

MARKER = b"tierfs-tier"
OWNER = b"tierfs-owner"
"""In a tier's directory: the uuid of the catalog that knows what is in it."""
FORMAT = 1
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_OF_FILESYSTEMS = ("lost+found", ".snapshot", ".snapshots")
"""What a filesystem has in its root without anybody's doing."""
_HEX = "(?:[0-7][0-9a-f]{15}|[0-9a-f]{1,15})"
_KEY = re.compile(f"{_HEX}-{_HEX}")
"""Two numbers that the catalog can hold. Whatever else stands in a tier's directories is none of tierfs's."""


class Target(Protocol):
    """Where a copy can go: a ReplicaStore or the archive's TreeStore."""

    @property
    def name(self) -> str: ...
    def temporary(self, key: str) -> TemporaryFile: ...
    def usage(self, own_used: int) -> Usage: ...
    def probe(self) -> None: ...


@contextlib.contextmanager
def failing_as(tier: str, action: str) -> Iterator[None]:
    """Turn an OSError met inside into a TierError of this tier."""
    try:
        yield
    except OSError as error:
        raise TierError.of(tier, action, error) from error


def usage_of(fd: int, size: int | None, own_used: int) -> Usage:
    """Usage in bytes of the filesystem ``fd`` lies on, limited to ``size``, of which ``own_used`` are tierfs's own.
    Raises OSError."""
    fs = os.fstatvfs(fd)
    total = fs.f_blocks * fs.f_frsize
    capacity = min(size or total, total)
    return Usage(capacity, own_used, max(0, min(capacity - own_used, fs.f_bavail * fs.f_frsize)))


def check_marker(tier: str, dir_fd: int, tmp_fd: int, where: Path, *, create: bool = True) -> str:
    """Read the marker file of a tier's directory, writing one when there is none: its uuid.

    Raises OSError: ENOENT when there is none and ``create`` is false; TierError (not temporary) when the directory
    belongs to another tier or format.
    """
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    except FileNotFoundError:
        if not create:
            raise
        fresh = {"name": tier, "uuid": str(uuid.uuid4()), "format": FORMAT}
        temp = create_temporary(tmp_fd, "marker")
        try:
            os.write(temp.fd, json.dumps(fresh).encode() + b"\n")
            temp.commit(dir_fd, MARKER)
        finally:
            temp.discard()
        return str(fresh["uuid"])
    with os.fdopen(fd, "rb") as file:
        raw = file.read(65536)
    return parse_marker(tier, raw, where, os.fsdecode(MARKER), FORMAT)


def parse_marker(tier: str, raw: bytes, where: Path | str, marker: str, known: int) -> str:
    """The uuid in a marker. Raises TierError (not temporary) as `check_marker` does."""
    try:
        found = json.loads(raw)
        name, identity, version = found["name"], found["uuid"], found["format"]
    except (ValueError, KeyError, TypeError):
        raise refusal(tier, f"{where}/{marker} is damaged; move it away if {where} is this tier") from None
    if version != known:
        raise refusal(tier, f"{where} has format {version}; this tierfs knows format {known}")
    if name != tier:
        raise refusal(tier, f"{where} belongs to a tier called {name}; rename the tier or choose another directory")
    return str(identity)


def check_owner(tier: str, dir_fd: int, where: Path, catalog: str, *, claim: bool, known: bool = False) -> None:
    """Refuse a directory whose files another catalog knows: to this one they are orphans, which it would remove.

    One that nobody owns yet becomes ``catalog``'s with ``claim``, unless the catalog has files on the tier (``known``):
    then this is not where they are, such as below a mount that is missing. Raises OSError, and TierError (not
    temporary).
    """
    owner = read_owner(dir_fd)
    why = catalog_refusal(tier, where, os.fsdecode(OWNER), owner, catalog, known=known)
    if why is not None:
        raise refusal(tier, why)
    if owner is None and claim:
        temp = create_temporary(dir_fd, "owner")
        try:
            os.write(temp.fd, catalog.encode() + b"\n")
            temp.commit(dir_fd, OWNER)
        finally:
            temp.discard()


def catalog_refusal(
    tier: str, where: Path | str, file: str, owner: str | None, catalog: str, *, known: bool
) -> str | None:
    """Why a tier whose ``file`` says that it is ``owner``'s is none for this catalog; None when it is one."""
    if owner is None and known:
        return (
            f"{where} is not the directory that the state directory knows: nothing of the tier is there; is it "
            f"mounted? If you moved the tier, move all its contents along; if they are gone for good, "
            f"`tierfs fsck --repair --gone {tier} CONFIG` goes on without them"
        )
    if owner is not None and owner != catalog:
        return (
            f"the files in {where} belong to another state directory than this one (or its catalog was lost: "
            f"`tierfs fsck --rebuild CONFIG` makes another from the tiers); give the tier a directory of its own, or "
            f"remove {where}/{file} to give those files up"
        )
    return None


def refuse_strangers(tier: str, where: Path | str, names: Iterable[str]) -> None:
    """Refuse an archive that has files already of which nobody told tierfs: the mount would not show them, and write
    over them. Raises TierError."""
    found = min((name for name in names if name not in _OF_FILESYSTEMS and not name.startswith(".Trash-")), default="")
    if found:
        raise refusal(
            tier,
            f"{where} is not empty (it has {found!r}): the mount would not show what is there, and write over it; give "
            "the archive an empty place, or make these the files of the mount with `tierfs fsck --rebuild CONFIG` and "
            "a new state directory",
        )


def read_owner(dir_fd: int) -> str | None:
    """The catalog to which the files in a tier's directory belong; None when none claimed it. Raises OSError."""
    try:
        fd = os.open(OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(4096).decode(errors="replace").strip()


def refusal(tier: str, why: str) -> TierError:
    """An error that trying again does not cure."""
    return TierError(f"tier {tier}: {why}", errno=errno.EPERM, temporary=False)


def empty_directory(fd: int) -> None:
    """Remove the files (not directories) in an open directory. Raises OSError."""
    for name in os.listdir(fd):
        with contextlib.suppress(IsADirectoryError, FileNotFoundError):
            os.unlink(name, dir_fd=fd)


def remove_temporaries(fd: int, former: Callable[[str], bool]) -> int:
    """Remove the temporary files in an open directory that were made for a key that ``former`` knows: how many."""
    removed = 0
    for name in os.listdir(fd):
        key, _, random = name.partition(".")
        if random and _KEY.fullmatch(key) and former(key):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
                removed += 1
    return removed


def write_and_remove(fd: int) -> None:
    """Whether files can be written in an open directory. Raises OSError."""
    temp = create_temporary(fd, "probe")
    try:
        os.write(temp.fd, b"tierfs")
        os.fsync(temp.fd)
    finally:
        temp.discard()


def open_directory(name: bytes, parent: int, *, create: bool = True) -> int:
    """Descriptor of a 0700 directory in ``parent``, made durably if it is missing. Raises OSError."""
    flags = DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    fsync_directory(parent)
    return os.open(name, flags, dir_fd=parent)


def same_file(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


@dataclass(eq=False)
class _Opened:
    """Descriptors of a tier's directory; closed once it is retired and nobody uses it."""

    root: int
    data: int
    tmp: int
    spread: dict[int, int] = field(default_factory=dict)
    """Of the directories in ``data`` that were needed, by number."""
    users: int = 0
    retired: bool = False

    def close(self) -> None:
        for fd in (*self.spread.values(), self.data, self.tmp, self.root):
            os.close(fd)


class _Use:
    """See `ReplicaStore._use`: on the way of every create and open."""

    __slots__ = ("_opened", "_store")

    def __init__(self, store: ReplicaStore) -> None:
        self._store = store

    def __enter__(self) -> _Opened:
        with self._store._lock:
            opened = self._store._opened
            if opened is None:
                raise OSError(errno.EBADF, "the tier is not open")
            opened.users += 1
        self._opened = opened
        return opened

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._store._lock:
            self._opened.users -= 1
            self._store._drop(self._opened)


class ReplicaStore:
    """A private directory with one file per replica, ``data/<two hex digits>/<key>``. Thread-safe once prepared.

    ``create``, ``open``, ``size``, ``remove``, ``keys`` and ``usage`` raise OSError as it comes, so that callers can
    tell a full tier from a missing file; ``prepare``, ``temporary``, ``probe`` and ``publish`` raise TierError.

    The directory may go away and come back while tierfs runs: ``temporary`` and ``probe`` look at its path again, and
    only a directory with this tier's own marker is ever written into.
    """

    chunked = False
    """A replica's file has its bytes."""

    def __init__(self, name: str, root: Path, *, persistent: bool, size: int | None = None) -> None:
        """``size`` in bytes limits the capacity; None means the whole filesystem."""
        self.name = name
        self.root = root
        self.persistent = persistent
        self.limit = size
        self.uuid = ""
        self._opened: _Opened | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Create or check the directory and remove what earlier copies left behind. Raises TierError."""
        with failing_as(self.name, f"prepare {self.root}"):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._swap(self._open_root(create=True))

    def _open_root(self, *, create: bool) -> _Opened:
        with contextlib.ExitStack() as undo:

            def opened(fd: int) -> int:
                undo.callback(os.close, fd)
                return fd

            root = opened(os.open(self.root, DIRECTORY))
            self._check_owner(os.fstat(root))
            if create:
                os.fchmod(root, 0o700)
            if not create:  # before anything is made: this may be somebody else's
                self._check_same(check_marker(self.name, root, root, self.root, create=False))
            tmp = opened(open_directory(b"tmp", root))
            if create:
                empty_directory(tmp)
            data = opened(open_directory(b"data", root, create=create))
            for own in (tmp, data):
                self._check_owner(os.fstat(own))
            if create:
                self.uuid = check_marker(self.name, root, tmp, self.root)
            undo.pop_all()
        return _Opened(root, data, tmp)

    def _check_same(self, found: str) -> None:
        if found != self.uuid:
            raise TierError(f"tier {self.name}: another tier lies at {self.root} now")

    def attach(self) -> None:
        """Make sure that the path leads to this tier, and open it again where it was mounted anew, or where its
        directory for temporary files was removed: that one is made again. A directory without this tier's marker is a
        temporary TierError and not touched: the mount below it is lost."""
        with failing_as(self.name, f"find {self.root}"):
            with self._use() as opened:
                if self._stands(opened):
                    return
            try:
                fresh = self._open_root(create=False)
            except FileNotFoundError as error:
                message = f"tier {self.name}: {self.root} has no marker any more; is it still mounted?"
                raise TierError(message, errno=errno.ENOENT) from error
            self._swap(fresh)

    def _stands(self, opened: _Opened) -> bool:
        """Whether the opened directory is what its path leads to, with what belongs in it."""
        try:
            return same_file(os.fstat(opened.root), os.stat(self.root)) and same_file(
                os.fstat(opened.tmp), os.stat(b"tmp", dir_fd=opened.root, follow_symlinks=False)
            )
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT, errno.ENOTDIR):
                return False
            raise

    def _swap(self, fresh: _Opened | None) -> None:
        with self._lock:
            old, self._opened = self._opened, fresh
            if old is not None:
                old.retired = True
                self._drop(old)

    def _drop(self, opened: _Opened) -> None:
        if opened.retired and not opened.users:
            opened.close()

    def _use(self) -> _Use:
        """For a block: the opened directory, kept open meanwhile. OSError when there is none."""
        return _Use(self)

    def check_catalog(self, catalog: str, *, claim: bool, known: bool = False) -> None:
        """See `check_owner`. Raises TierError."""
        with failing_as(self.name, f"look at {self.root}"), self._use() as opened:
            check_owner(self.name, opened.root, self.root, catalog, claim=claim, known=known)

    def owner(self) -> str | None:
        """See `read_owner`. Raises TierError."""
        with failing_as(self.name, f"look at {self.root}"), self._use() as opened:
            return read_owner(opened.root)

    def _check_owner(self, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise refusal(self.name, f"{self.root} belongs to user {status.st_uid}, not to {os.geteuid()}")
        if status.st_mode & stat.S_ISVTX:
            raise refusal(self.name, f"{self.root} is a shared directory; give the tier one of its own below it")

    def close(self) -> None:
        """Let go of the directories. ``prepare`` opens them again."""
        self._swap(None)

    @contextlib.contextmanager
    def _directory(self, key: str, *, create: bool = False) -> Iterator[int]:
        """Descriptor of the directory in which the replica is. Raises OSError."""
        with self._use() as opened:
            yield self._spread(opened, key, create=create)

    def _spread(self, opened: _Opened, key: str, *, create: bool) -> int:
        if not _KEY.fullmatch(key):
            raise OSError(errno.EINVAL, "not a replica key", key)
        number = int(self._belongs(key), 16)
        fd = opened.spread.get(number)
        if fd is None:
            fresh = open_directory(b"%02x" % number, opened.data, create=create)
            fd = opened.spread.setdefault(number, fresh)
            if fd != fresh:
                os.close(fresh)
        return fd

    def create(self, key: str) -> int:
        """A new empty replica, open for reading and writing. Raises OSError: EEXIST when there is one."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._use() as opened:
            return os.open(key, flags, 0o600, dir_fd=self._spread(opened, key, create=True))

    def open(self, key: str, *, write: bool = True) -> int:
        """The replica, open for reading and, by default, writing. Raises OSError: ENOENT when there is none."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._use() as opened:
            return os.open(key, flags, dir_fd=self._spread(opened, key, create=False))

    def is_written(self, key: str) -> bool:
        """Whether anybody has the replica open or mapped for writing. False, too, where the filesystem has no leases,
        which is no filesystem that passthrough can use. Raises OSError: ENOENT when there is none."""
        fd = self.open(key, write=False)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES):
                return False
            raise
        else:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return False
        finally:
            os.close(fd)

    def size(self, key: str) -> int:
        """Bytes of the replica. Raises OSError: ENOENT when there is none."""
        with self._directory(key) as directory:
            return os.stat(key, dir_fd=directory, follow_symlinks=False).st_size

    def remove(self, key: str) -> None:
        """Remove the replica and what lies beside it; no error when there is none. Raises OSError."""
        for name in (key, key + SUFFIX) if self.persistent else (key,):
            with contextlib.suppress(FileNotFoundError), self._directory(key) as directory:
                os.unlink(name, dir_fd=directory)

    # what lies beside a replica (tiers.beside)

    def describe(self, fd: int, key: str, describe: Describe, digest: bytes | None) -> None:
        """Keep a record beside the replica ``key``, whose file is open: durable once that file is synced and its
        directory, too. Raises OSError, TierError."""
        self.attach()
        status = os.fstat(fd)
        raw = describe(digest, status.st_size, status.st_mtime_ns)
        with self._use() as opened, self._directory(key, create=True) as directory:
            write_record(fd, raw, opened.tmp, directory, key)

    def record(self, key: str) -> Beside | None:
        """What lies beside a replica; None when there is nothing, or nothing that can be read. Raises OSError: ENOENT
        when there is no replica."""
        with self._directory(key) as directory:
            raw = read_record(directory, key)
        return None if raw is None else decode(raw)

    def loose_records(self) -> Iterator[str]:
        """Keys of records whose replica is not there. Raises OSError."""
        for directory, names in self._listed():
            there = set(names)
            for name in names:
                key = name.removesuffix(SUFFIX)
                if key != name and _KEY.fullmatch(key) and key not in there and self._belongs(key) == directory:
                    yield key

    def status(self, key: str) -> os.stat_result:
        """Raises OSError: ENOENT when there is no replica."""
        with self._directory(key) as directory:
            return os.stat(key, dir_fd=directory, follow_symlinks=False)

    def keys(self) -> Iterator[str]:
        """Keys of all replicas, in no order. Raises OSError."""
        for directory, names in self._listed():
            yield from (name for name in names if _KEY.fullmatch(name) and self._belongs(name) == directory)

    @staticmethod
    def _belongs(key: str) -> str:
        """The name of the directory in which a replica is."""
        return f"{zlib.crc32(key.encode()) & 0xFF:02x}"

    def _listed(self) -> Iterator[tuple[str, list[str]]]:
        """(name of a directory, names in it) of those below ``data``. Raises OSError."""
        with self._use() as opened:
            directories = os.listdir(opened.data)
        for directory in directories:
            with self._use() as opened:
                try:
                    fd = os.open(directory, DIRECTORY | os.O_NOFOLLOW, dir_fd=opened.data)
                except NotADirectoryError:
                    continue
                try:
                    names = os.listdir(fd)
                finally:
                    os.close(fd)
            yield directory, names

    def usage(self, own_used: int) -> Usage:
        """Space in bytes, given the bytes that tierfs holds here. Raises OSError."""
        with self._use() as opened:
            return usage_of(opened.root, self.limit, own_used)

    def probe(self) -> None:
        """Write, sync and remove a file. Raises TierError when the tier does not work."""
        self.attach()
        with failing_as(self.name, "try to write"), self._use() as opened:
            write_and_remove(opened.tmp)

    def temporary(self, key: str) -> TemporaryFile:
        """A file to fill and then ``publish``. Raises TierError."""
        self.attach()
        with failing_as(self.name, "create a file"), self._use() as opened:
            return create_temporary(opened.tmp, key)

    def remove_temporaries(self, former: Callable[[str], bool]) -> int:
        """Remove the temporary files, and the records without a replica, of keys that ``former`` knows: how many
        files. Raises TierError."""
        with failing_as(self.name, "remove temporary files"), self._use() as opened:
            if self.persistent:
                for key in self.loose_records():
                    if former(key):
                        self.remove(key)
            return remove_temporaries(opened.tmp, former)

    def publish(
        self, temp: TemporaryFile, key: str, describe: Describe | None = None, digest: bytes | None = None
    ) -> None:
        """Make a filled temporary file the replica ``key``, durably and, on a persistent tier, with a record beside
        it, and close it. Raises TierError."""
        with failing_as(self.name, "publish"), self._directory(key, create=True) as directory:
            if describe is not None and self.persistent:
                self.describe(temp.fd, key, describe, digest)
            temp.commit(directory, key.encode())
            temp.close()
