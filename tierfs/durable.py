"""The one way bytes become durable: write a temporary file, fsync it, rename it, fsync the directory."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field


@dataclass
class TemporaryFile:
    """A file under construction. ``directory`` is the path of the directory it stands in."""

    fd: int
    directory: str
    name: str
    _open: bool = field(default=True, repr=False)

    @property
    def path(self) -> str:
        return os.path.join(self.directory, self.name)

    def commit(self, dir_fd: int, name: bytes | str, *, sync_dir: bool = True) -> None:
        """fsync, rename to ``name`` in the directory of ``dir_fd`` (replacing what stands there), fsync that directory.

        The descriptor stays open until `close`. Raises OSError with nothing renamed when the fsync fails.
        """
        os.fsync(self.fd)
        os.rename(self.path, name, dst_dir_fd=dir_fd)
        if sync_dir:
            os.fsync(dir_fd)

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self.fd)

    def discard(self) -> None:
        """Remove the file, if it still stands under its temporary name, and close it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.close()


def create_temporary(directory: str, label: str) -> TemporaryFile:
    """A new empty temporary file, mode 0600, O_RDWR. Raises OSError."""
    name = f"{label}.{secrets.token_hex(6)}"
    fd = os.open(os.path.join(directory, name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return TemporaryFile(fd, directory, name)


def sync_directory(path: str) -> None:
    """fsync a directory by path. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
