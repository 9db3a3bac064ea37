"""Who changes an archive with layout `chunks`, and who collects its garbage, keep out of each other's way: by locks in
the archive's private directory, so that it works between processes and, where its filesystem has locks, machines.

Whoever stores chunks holds the lock, with others, from the first chunk that it finds there until the manifest that
needs it is complete; and whoever moves manifests, so that a collector meets each of them. A collector holds it alone.
It first closes a gate, else it would wait for ever for copies that overlap. A lock goes with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator

from tierfs.errors import TierError

_GATE, _LOCK = b"gate", b"lock"
_POLL = 0.02
"""Seconds between two looks at a lock: flock has no timeout, and a thread that waits in it cannot say that it lives."""
_NONE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a filesystem without locks says."""


PATIENCE = 900.0
"""Seconds that a copy waits for a collector, which may wait for another copy: more, and it hangs."""


@contextlib.contextmanager
def among_others(tier: str, own: int, alive: Callable[[], object]) -> Iterator[None]:
    """For the block nothing is collected. ``alive`` is called while a collector is waited for. Where the filesystem has
    no locks there is no collector. Raises OSError; TierError when the collector does not end."""
    end = time.monotonic() + PATIENCE

    def waiting() -> None:
        alive()
        if time.monotonic() > end:
            raise TierError(f"tier {tier}: `tierfs gc` keeps copies from it for {PATIENCE:g} s already")

    with contextlib.ExitStack() as stack:
        try:
            with _locked(own, _GATE, fcntl.LOCK_SH, waiting):
                stack.enter_context(_locked(own, _LOCK, fcntl.LOCK_SH, waiting))
        except OSError as error:
            if error.errno not in _NONE:
                raise
        yield


@contextlib.contextmanager
def alone(tier: str, own: int, patience: float) -> Iterator[None]:
    """For the block nothing is stored and no manifest moves. Raises OSError; TierError when what goes on does not end
    within ``patience`` seconds, or the filesystem has no locks."""
    end = time.monotonic() + patience

    def alive() -> None:
        if time.monotonic() > end:
            raise TierError(f"tier {tier}: a copy goes on for {patience:g} s already; try again later")

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(own, _GATE, fcntl.LOCK_EX, alive))
            stack.enter_context(_locked(own, _LOCK, fcntl.LOCK_EX, alive))
        except OSError as error:
            if error.errno not in _NONE:
                raise
            raise TierError(
                f"tier {tier}: its filesystem has no locks, and without them nothing can be collected beside a mount",
                errno=error.errno or errno.ENOLCK,
                temporary=False,
            ) from error
        yield


@contextlib.contextmanager
def _locked(own: int, name: bytes, how: int, alive: Callable[[], object]) -> Iterator[None]:
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=own)
    try:
        while True:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                alive()
                time.sleep(_POLL)
        yield
    finally:
        os.close(fd)
