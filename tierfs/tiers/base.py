"""A local tier: a private directory with one plain file per replica."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from tierfs.durable import TemporaryFile, create_temporary
from tierfs.errors import TierError
from tierfs.types import Usage

MARKER = "tierfs-tier"


def prepare_private(name: str, directory: Path) -> None:
    """Create ``directory`` with mode 0700, or check that it is ours. TierError when it belongs to another user."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise TierError.of(name, f"prepare {directory}", error) from error
    if status.st_uid != os.geteuid():
        raise TierError(f"tier {name}: {directory} belongs to uid {status.st_uid}, not to you", temporary=False)
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)


def write_marker(directory: Path, name: str) -> None:
    """A file that tells a mounted tier from the empty directory below a missing mount."""
    marker = directory / MARKER
    if not marker.exists():
        temp = create_temporary(str(directory), MARKER)
        os.write(temp.fd, json.dumps({"tier": name, "uuid": str(uuid.uuid4()), "format": 1}).encode())
        dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            temp.commit(dir_fd, MARKER)
        finally:
            temp.close()
            os.close(dir_fd)


def filesystem_usage(path: Path, size: int | None, held: int) -> Usage:
    """Usage of a directory that may take ``size`` bytes (None: all) and holds ``held``. Raises OSError."""
    status = os.statvfs(path)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    if size is None:
        return Usage(total, total - free, free)
    capacity = min(size, total)
    return Usage(capacity, held, max(0, min(capacity - held, free)))


class ReplicaStore:
    """Synchronous; called from threads where a disk may be slow. Methods raise OSError."""

    def __init__(self, name: str, root: Path, *, persistent: bool, size: int | None = None) -> None:
        """``size`` bounds what tierfs keeps here, in bytes; None: the whole filesystem below ``root``."""
        self.name = name
        self.root = root
        self.persistent = persistent
        self._size = size
        self._data = root / "data"
        self._tmp = root / "tmp"
        self._made: set[str] = set()

    def prepare(self) -> None:
        """Create the directories and drop temporary files of a former run. Raises TierError."""
        prepare_private(self.name, self.root)
        try:
            self._data.mkdir(mode=0o700, exist_ok=True)
            self._tmp.mkdir(mode=0o700, exist_ok=True)
            for left in self._tmp.iterdir():
                left.unlink()
            write_marker(self.root, self.name)
        except OSError as error:
            raise TierError.of(self.name, "prepare", error) from error

    def _directory(self, key: str) -> str:
        bucket = key.rpartition("-")[2][-2:].rjust(2, "0")
        path = f"{self._data}/{bucket}"
        if bucket not in self._made:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            self._made.add(bucket)
        return path

    def path(self, key: str) -> str:
        return f"{self._directory(key)}/{key}"

    def create(self, key: str) -> int:
        """A descriptor, O_RDWR, of a new replica; FileExistsError when there is one."""
        return os.open(self.path(key), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, key: str) -> int:
        """A descriptor, O_RDWR, of an existing replica."""
        return os.open(self.path(key), os.O_RDWR | os.O_CLOEXEC)

    def size(self, key: str) -> int:
        return os.stat(self.path(key)).st_size

    def remove(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(key))

    def keys(self) -> Iterator[str]:
        for bucket in sorted(os.listdir(self._data)):
            yield from os.listdir(self._data / bucket)

    def temporary(self, key: str) -> TemporaryFile:
        return create_temporary(str(self._tmp), key)

    def publish(self, temp: TemporaryFile, key: str) -> None:
        """The temporary file becomes the replica, durably; its descriptor is closed."""
        dir_fd = os.open(self._directory(key), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            temp.commit(dir_fd, key)
        finally:
            temp.close()
            os.close(dir_fd)

    def usage(self, held: int) -> Usage:
        """``held``: bytes of the replicas here, which count where the tier is a bounded part of a filesystem."""
        return filesystem_usage(self.root, self._size, held)
