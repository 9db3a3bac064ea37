"""How fast things go: the bytes per second of all copies, and whether programs are busy with small files."""

from __future__ import annotations

import trio

from tierfs.migrator.throttle import Throttle

BUSY_RATE = 100
"""Closes, renames and removals per second from which on small files are not drained in passing."""


class Pace:
    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self.rate = 0.0
        """Bytes copied per second, over the last second."""
        self.changes = 0
        """Closes, renames and removals so far; counted by the migrator."""
        self._counted = (0, 0.0)

    async def run(self) -> None:
        """Measure until cancelled."""
        last, at = self._throttle.total, trio.current_time()
        while True:
            await trio.sleep(1)
            now = trio.current_time()
            self.rate = (self._throttle.total - last) / (now - at)
            last, at = self._throttle.total, now

    def busy(self) -> bool:
        """Whether, since the last call, programs made and removed files so fast that requests need the time of this
        process."""
        (before, at), now = self._counted, trio.current_time()
        self._counted = self.changes, now
        return now > at and (self.changes - before) / (now - at) > BUSY_RATE
