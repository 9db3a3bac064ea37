"""Temporary file, fsync, rename, fsync of the directory: the only place that does this dance."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from tierfs.points import At, reach

_UNFINISHED = ".tmp"
"""How temporary names of `write_whole` end; they begin with a dot."""


def fsync_directory(fd: int) -> None:
    """Make the names in an open directory durable. Raises OSError."""
    os.fsync(fd)


class TemporaryFile:
    """A file under a temporary name, until it is committed to its own or discarded.

    ``fd`` is open for reading and writing until ``close`` or ``discard``. The directory descriptor is borrowed: it
    must stay open as long as this object is used. One thread at a time may commit, discard or close.
    """

    def __init__(self, fd: int, dir: int, name: bytes) -> None:
        self.fd = fd
        self.name = name
        self.committed = False
        self._dir = dir

    @property
    def path(self) -> Path:
        """Where the file stands now, for messages and tests. Raises OSError once closed."""
        return Path(os.readlink(f"/proc/self/fd/{self.fd}"))

    def commit(self, dst_dir_fd: int, name: bytes, *, sync_dir: bool = True) -> None:
        """Sync the file, rename it over ``name`` and sync that directory. Raises OSError.

        A second commit does not rename again, so a batch may be repeated after an error. ``sync_dir=False`` leaves
        the directory to the caller. The descriptor stays open.
        """
        os.fsync(self.fd)
        if not self.committed:
            os.rename(self.name, name, src_dir_fd=self._dir, dst_dir_fd=dst_dir_fd)
            self.committed = True
        if sync_dir:
            fsync_directory(dst_dir_fd)

    def close(self) -> None:
        """Close the descriptor; nothing is removed. Harmless when already closed."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def discard(self) -> None:
        """Close and, unless it was committed, remove the file. Never raises: leftovers go at the next start."""
        with contextlib.suppress(OSError):
            self.close()
        if not self.committed:
            with contextlib.suppress(OSError):
                os.unlink(self.name, dir_fd=self._dir)


def create_temporary(dir_fd: int, prefix: str = "t") -> TemporaryFile:
    """A new empty file (0600, read and write) in the directory, named ``prefix.<random>``. Raises OSError."""
    name = f"{prefix}.{secrets.token_hex(8)}".encode()
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    return TemporaryFile(fd, dir_fd, name)


def write_whole(directory: Path, name: str, text: str) -> None:
    """Replace the file ``name`` by ``text``, durably: whole or not at all. Blocks on the disk. Raises OSError.

    Its temporary name is the same each time: whoever is killed in here leaves one file at most, which the next call
    takes and `remove_unfinished` removes. So only one process at a time may write a file."""
    temporary = directory / f".{name}{_UNFINISHED}"
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            with open(temporary, "w", encoding="ascii", opener=_private) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            reach(At.REPORT_WRITTEN)
            os.rename(temporary, directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        fsync_directory(fd)
    finally:
        os.close(fd)


def remove_unfinished(directory: Path) -> None:
    """Remove what a `write_whole` that was killed left in ``directory``, while nobody else writes there. Raises
    OSError."""
    for left in directory.glob(f".*{_UNFINISHED}"):
        if not left.is_dir() or left.is_symlink():
            left.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
