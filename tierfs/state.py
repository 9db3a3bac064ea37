"""The state directory: one mount or fsck at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tierfs.errors import MountError

CATALOG = "catalog.sqlite"


def _require_private(state: Path) -> None:
    """Names, attributes and the log of a mount are nobody else's business. Raises OSError, MountError."""
    status = state.stat()
    if status.st_uid != os.geteuid():
        raise MountError(f"state directory {state} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & stat.S_ISVTX:
        raise MountError(f"state directory {state} is a shared directory; choose one of its own below it")
    if stat.S_IMODE(status.st_mode) & 0o077:
        state.chmod(0o700)


@contextlib.contextmanager
def state_lock(state: Path) -> Iterator[None]:
    """Only one mount (or fsck) uses a state directory; MountError when another holds it."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(state)
        fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MountError(f"state directory {state}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MountError(f"state directory {state} is in use by another mount; umount it first") from None
        yield
    finally:
        os.close(fd)
