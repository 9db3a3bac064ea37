"""Temporary file, fsync, rename, fsync of the directory: the only place that does this dance."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


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
