"""What a recall tried in vain, and whether it tries again: a tier that fails costs a read nothing but time, up to the
policy's ``limits.read_timeout``."""

from __future__ import annotations

import errno

import trio

from tierfs.errors import DigestMismatch, SourceChanged, TierError
from tierfs.types import Replica

RETRY_FIRST, RETRY_LAST = 0.1, 5.0


class Tries:
    def __init__(self, patience: float, why: str) -> None:
        """``why``: what there is to say when nothing was tried at all."""
        self.code, self.why = errno.EIO, why
        """What whoever waits is told in the end."""
        self._deadline = trio.current_time() + patience
        self._delay = RETRY_FIRST
        self._failed: dict[tuple[str, str], bool] = {}
        """(tier, key) → whether that may pass."""

    def may(self, source: Replica) -> bool:
        return (source.tier, source.key) not in self._failed

    def failed(self, source: Replica, error: TierError, *, full: bool) -> bool:
        """Whether the source is worth another try: not when there is no room (``full``) for what it has, nor when it
        says that the file is not there, or another one."""
        lasts = full or isinstance(error, DigestMismatch | SourceChanged) or error.errno == errno.ENOENT
        self._failed[source.tier, source.key] = not lasts
        self.code = errno.ENOSPC if full else errno.EIO
        self.why = str(error)
        return not lasts

    @property
    def passing(self) -> bool:
        return any(self._failed.values())

    async def again(self) -> bool:
        """Wait, and let those be tried again that are worth it; False when none is, or the time is over."""
        if not self.passing or trio.current_time() + self._delay >= self._deadline:
            return False
        await trio.sleep(self._delay)
        self._delay = min(RETRY_LAST, 2 * self._delay)
        self._failed = {key: passes for key, passes in self._failed.items() if not passes}
        return True
