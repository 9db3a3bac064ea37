"""How fast things go: the bytes per second of all copies and of what programs write, and whether they are busy with
small files."""

from __future__ import annotations

import trio

from tierfs.migrator.throttle import Throttle

BUSY_RATE = 100
"""Closes, renames and removals per second from which on small files are not drained in passing."""

SAVING_RATE = 100 << 20
"""Bytes per second by which open files grow from which on training is writing a checkpoint, and waits for it."""
COURTESY = 4
"""Part of their fastest pace that copies keep while training writes and there is room: processors and memory are
training's then. Copies at full pace make a save take twice as long on 2 cores."""
FADING = 0.95
"""What the fastest pace counts for a second later, so that it follows a tier that has become slower."""


class Pace:
    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._written = (0, 0.0)
        self._fastest = 0.0
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
            if self._throttle.courtesy is None:
                self._fastest = max(self.rate, FADING * self._fastest)

    def written(self, total: int, *, room: bool) -> None:
        """``total`` bytes were written by programs so far. Copies step back while that grows fast, if there is ``room``
        for what they leave."""
        (before, at), now = self._written, trio.current_time()
        self._written = total, now
        saving = room and now > at and (total - before) / (now - at) > SAVING_RATE
        self._throttle.courtesy = max(1, int(self._fastest / COURTESY)) if saving and self._fastest else None

    def busy(self) -> bool:
        """Whether, since the last call, programs made and removed files so fast that requests need the time of this
        process."""
        (before, at), now = self._counted, trio.current_time()
        self._counted = self.changes, now
        return now > at and (self.changes - before) / (now - at) > BUSY_RATE
