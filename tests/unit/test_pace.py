"""Busy is what happened since the last look, not since the start."""

from __future__ import annotations

import trio
import trio.testing

from tierfs.migrator.pace import BUSY_RATE, Pace
from tierfs.migrator.throttle import Throttle


def test_busy_while_files_come_fast_and_no_longer() -> None:
    async def run() -> None:
        pace = Pace(Throttle(None))
        await trio.sleep(1)
        assert not pace.busy()
        pace.changes += 2 * BUSY_RATE
        await trio.sleep(1)
        assert pace.busy()
        pace.changes += BUSY_RATE
        await trio.sleep(2)
        assert not pace.busy()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_rate_is_of_the_last_second() -> None:
    async def run() -> None:
        throttle = Throttle(None)
        pace = Pace(throttle)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pace.run)
            await trio.sleep(0.5)
            throttle(1000)
            await trio.sleep(1)
            assert pace.rate == 1000
            await trio.sleep(1)
            assert pace.rate == 0
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
