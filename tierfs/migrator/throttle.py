"""A token bucket for threads: bounds the bytes per second of all copies together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """Call it before each chunk with the chunk's bytes; it sleeps as long as the rate asks for."""

    def __init__(self, rate: int | None) -> None:
        """``rate`` in bytes per second; None never waits."""
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.total = 0
        self.courtesy: int | None = None
        """A lower rate for the time being, in bytes per second."""

    def __call__(
        self, size: int, cancel: threading.Event | None = None, alive: Callable[[], object] | None = None
    ) -> None:
        """``cancel`` ends the wait: who asks a copy to stop must not wait for its turn. ``alive`` is called at least
        every second: waiting is no hanging."""
        with self._lock:
            self.total += size
            rates = [rate for rate in (self._rate, self.courtesy) if rate is not None]
            if not rates:
                return
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / min(rates)
        left = start - now
        while left > 0:
            if alive is not None:
                alive()
            step = left if alive is None else min(left, 1.0)
            left -= step
            if cancel is None:
                time.sleep(step)
            elif cancel.wait(step):
                return
