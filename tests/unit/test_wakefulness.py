"""While pyfuse3's requests come in quick succession the event loop does not go to sleep; else it does."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tierfs.fuse import adapter
from tierfs.fuse.adapter import SPIN, SUCCESSION, Wakefulness


class Clock:
    """perf_counter of the module under test; each reading takes ``step`` seconds."""

    def __init__(self, step: float) -> None:
        self.now, self.step, self.readings = 10.0, step, 0

    def __call__(self) -> float:
        self.now += self.step
        self.readings += 1
        return self.now


@pytest.mark.parametrize(("pause", "awake"), [(SUCCESSION / 2, True), (SUCCESSION * 2, False)], ids=["quick", "slow"])
def test_loop_stays_awake_for_quick_successions_only(
    pause: float, awake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(SPIN / 10)
    monkeypatch.setattr(adapter.time, "perf_counter", clock)
    wakefulness = Wakefulness()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wakefulness.stay_awake)
            await trio.testing.wait_all_tasks_blocked()
            wakefulness.asked()
            wakefulness.answered()
            await trio.testing.wait_all_tasks_blocked()
            clock.now += pause
            clock.readings = 0
            wakefulness.asked()
            wakefulness.answered()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert (clock.readings > 4) is awake, "asked and answered read it twice"
    assert clock.readings < 20, "it sleeps in the end"
