"""The state directory: one mount or fsck at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tierfs.errors import MountError

CATALOG = "catalog.sqlite"


@contextlib.contextmanager
def state_lock(state: Path) -> Iterator[None]:
    """Only one mount (or fsck) uses a state directory; MountError when another holds it."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
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
