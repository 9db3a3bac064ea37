"""Busy is what happened since the last look, not since the start."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tierfs.migrator import throttle as throttle_module
from tierfs.migrator.pace import BUSY_RATE, COURTESY, SAVING_RATE, Pace
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


def test_copies_step_back_while_training_writes_and_there_is_room() -> None:
    async def run() -> None:
        throttle = Throttle(None)
        pace = Pace(throttle)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pace.run)
            await trio.sleep(0.5)
            throttle(4000)
            await trio.sleep(1)
            written = 0
            for grows, room, courtesy in (
                (2 * SAVING_RATE, True, 4000 // COURTESY),
                (2 * SAVING_RATE, False, None),
                (2 * SAVING_RATE, True, 4000 // COURTESY),
                (SAVING_RATE // 2, True, None),
                (0, True, None),
            ):
                pace.written(written, room=True)
                written += grows // 10
                await trio.sleep(0.1)
                pace.written(written, room=room)
                assert throttle.courtesy == courtesy
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_courtesy_bounds_the_rate_and_never_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(throttle_module.time, "sleep", slept.append)
    monkeypatch.setattr(throttle_module.time, "monotonic", lambda: 100.0)
    for rate, courtesy, expected in ((None, 500, 2.0), (250, 500, 4.0), (1000, 500, 2.0)):
        throttle = Throttle(rate)
        throttle.courtesy = courtesy
        throttle(1000)
        throttle(1000)
        assert slept.pop() == expected
