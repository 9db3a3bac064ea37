"""The circuit breaker of a tier, on a virtual clock, and the threads that a tier may hold."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from tierfs.errors import NoAnswer, SourceChanged, TierError
from tierfs.fs import lanes
from tierfs.fs.lanes import Beat, Lane
from tierfs.migrator.outage import JITTER, RETRY_FIRST, RETRY_LAST, Breaker, Outages


def at_virtual_times(main: Callable[[], Awaitable[None]], threshold: float = 0.0) -> None:
    """Threads need a ``threshold``: real seconds without anything to do until the clock jumps."""
    trio.run(main, clock=MockClock(autojump_threshold=threshold))


def error(text: str = "gone") -> TierError:
    return TierError(text)


# the breaker


def test_delays_double_up_to_a_limit_with_jitter_that_a_seed_fixes() -> None:
    def delays(seed: int) -> list[float]:
        found: list[float] = []

        async def main() -> None:
            outages = Outages(random.Random(seed))
            for _ in range(12):
                outages.failed("nvme", error())
                found.append(outages["nvme"].retry_at - trio.current_time())
                await trio.sleep(found[-1])

        at_virtual_times(main)
        return found

    first = delays(1)
    expected = [min(RETRY_LAST, RETRY_FIRST * 2**n) for n in range(12)]
    for delay, middle in zip(first, expected, strict=True):
        assert middle * (1 - JITTER) <= delay <= middle * (1 + JITTER)
    assert first == delays(1)
    assert first != delays(2), "every machine returns at the same moment"


def test_open_then_one_try_at_a_time_then_closed() -> None:
    async def main() -> None:
        outages = Outages(random.Random(1))
        assert outages.choose("nvme", [1, 2, 3]) == [1, 2, 3]
        outages.failed("nvme", error(), 1)
        assert outages.state("nvme") is Breaker.OPEN
        assert outages.choose("nvme", [1, 2, 3]) == []
        await trio.sleep(1)
        assert outages.state("nvme") is Breaker.HALF_OPEN
        assert outages.choose("nvme", [1, 2, 3]) == [2], "what failed has its turn after the others"
        outages.begin("nvme", 2)
        assert outages.wait("nvme")
        assert outages.choose("nvme", [1, 2, 3]) == [], "a second one at the same time"
        outages.end("nvme", 2)
        assert outages.choose("nvme", [3]) == [3], "a try without a result leaves the way free"
        outages.recovered("nvme", 3)
        assert outages.state("nvme") is Breaker.CLOSED
        assert outages.choose("archive", [1]) == [1], "another tier is none of its business"

    at_virtual_times(main)


def test_work_that_was_under_way_does_not_lengthen_the_outage() -> None:
    async def main() -> None:
        outages = Outages(random.Random(1))
        for work in range(10):
            outages.failed("nvme", error(f"work {work}"), work)
        assert outages["nvme"].delay == RETRY_FIRST
        assert outages["nvme"].error == "work 9"

    at_virtual_times(main)


def test_one_file_that_always_fails_is_tried_less_and_less() -> None:
    """The others close the breaker between its tries; without a delay of its own it would fail five times a second."""

    async def main() -> None:
        outages = Outages(random.Random(1))
        tries = 0
        while trio.current_time() < 600:
            for work in outages.choose("nvme", ["bad", "good"]):
                outages.begin("nvme", work)
                if work == "bad":
                    tries += 1
                    outages.failed("nvme", error(), work)
                else:
                    outages.recovered("nvme", work)
                outages.end("nvme", work)
            await trio.sleep(0.1)
        assert 10 < tries < 25

    at_virtual_times(main)


def test_a_flapping_tier_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        outages = Outages(random.Random(1))
        for _ in range(20):
            outages.failed("nvme", error())
            await trio.sleep(5)
            outages.recovered("nvme")
        await trio.sleep(120)
        outages.failed("nvme", error())

    at_virtual_times(main)
    assert [r.levelname for r in caplog.records if r.levelname == "WARNING"] == ["WARNING", "WARNING"]


def test_who_hastens_gets_a_try_at_once() -> None:
    async def main() -> None:
        outages = Outages(random.Random(1))
        outages.failed("nvme", error(), 1)
        outages.hasten()
        assert outages.choose("nvme", [1]) == [1]
        assert outages.wake() <= 0.05

    at_virtual_times(main)


# the threads


async def answers(lane: Lane) -> None:
    while lane.hangs:  # noqa: ASYNC110 - threads tell nobody but the lane
        await trio.sleep(0.01)


def test_a_call_that_hangs_is_given_up_and_cleared_away_when_it_comes_back() -> None:
    gate, cleared = threading.Event(), threading.Event()
    seen: list[object] = []

    async def main() -> None:
        lane = Lane("nvme", patience=5)

        def hangs() -> str:
            gate.wait()
            return "late"

        with pytest.raises(NoAnswer, match="tier nvme: copy: no answer for 5 s") as raised:
            await lane.run(hangs, "copy", late=lambda result: (seen.append(result), cleared.set()))
        assert raised.value.errno == errno.ETIMEDOUT
        assert trio.current_time() == pytest.approx(5, abs=0.1)
        assert (lane.hangs, lane.given_up) == (True, 1)
        gate.set()
        await trio.to_thread.run_sync(cleared.wait)
        await answers(lane)
        assert seen == ["late"]
        assert await lane.run(lambda: "works", "copy") == "works"

    at_virtual_times(main, 0.05)


def test_a_hung_tier_holds_a_bounded_number_of_threads_and_no_other_tiers() -> None:
    gate = threading.Event()

    async def main() -> None:
        hung, other = Lane("nvme", patience=5, threads=3), Lane("archive", patience=5, threads=3)
        before = threading.active_count()
        started = trio.current_time()
        for _ in range(50):
            with pytest.raises(NoAnswer):
                await hung.run(gate.wait, "copy")
            assert await other.run(lambda: 1, "copy") == 1
        assert hung.given_up == 3
        assert trio.current_time() - started < 16, "once all places are taken there is nothing to wait for"
        assert threading.active_count() <= before + 4
        gate.set()
        await answers(hung)
        assert hung.given_up == 0
        assert await hung.run(lambda: 1, "copy") == 1

    try:
        at_virtual_times(main, 0.05)
    finally:
        gate.set()


def test_what_ends_while_it_is_given_up_is_cleared_away_once() -> None:
    """The thread is through, and who waited was told to go before the loop heard of it."""
    seen: list[object] = []
    call = lanes._Call(lambda: "made", seen.append, lambda: seen.append("back"))
    assert call() == "made"
    assert call.leave() is False
    assert seen == ["made"]
    never = lanes._Call(lambda: "made", seen.append, lambda: seen.append("back"))
    assert never.leave() is False
    with pytest.raises(SourceChanged):
        never()
    assert seen == ["made"]


def test_signs_of_life_put_the_end_off() -> None:
    async def main() -> None:
        lane, beat = Lane("nvme", patience=5), Beat()
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        token = trio.lowlevel.current_trio_token()

        def slow() -> str:
            for _ in range(5):
                beat()
                trio.from_thread.run_sync(clock.jump, 4.0, trio_token=token)
            return "done"

        assert await lane.run(slow, "copy", beat=beat) == "done"
        assert trio.current_time() == pytest.approx(20, abs=0.1)

    trio.run(main, clock=MockClock())


def test_the_event_loop_hears_of_a_few_signs_of_life_only(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    extend = Beat._extend
    monkeypatch.setattr(Beat, "_extend", lambda beat, more: (heard.append(more), extend(beat, more)))

    async def main() -> None:
        beat = Beat()
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        with trio.CancelScope(deadline=60) as scope:
            beat.begin(scope, 60)
            for _ in range(1000):
                beat()
                clock.jump(lanes.HEARD_SECONDS / 100)
            await trio.testing.wait_all_tasks_blocked()
            assert 9 <= len(heard) <= 11
            assert not beat.missed(lanes.HEARD_SECONDS * 1.1)
            beat(lanes.SLOWEST)
            beat(lanes.SLOWEST)
            await trio.testing.wait_all_tasks_blocked()
            assert heard[-2:] == [1, 1], "that a long sync begins is heard at once"

    trio.run(main, clock=MockClock())


def test_a_long_sync_is_no_hang() -> None:
    async def main() -> None:
        lane, beat = Lane("nvme", patience=5), Beat()
        gate = threading.Event()

        def sync() -> None:
            beat(100 * lanes.SLOWEST)
            gate.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: lane.run(sync, "copy", beat=beat))
            await trio.sleep(100)
            gate.set()

    at_virtual_times(main, 0.05)


def test_what_must_not_begin_again_is_waited_for_and_complained_about_once() -> None:
    gate = threading.Event()
    complaints: list[str] = []

    async def main() -> None:
        lane = Lane("archive", patience=5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.endure, gate.wait, "publish", lambda e: complaints.append(str(e)), Beat())
            await trio.sleep(600)
            assert complaints == ["tier archive: publish: no answer for 5 s"]
            assert lane.hangs
            gate.set()
        assert not lane.hangs

    at_virtual_times(main, 0.05)


def test_its_errors_come_out_as_they_are() -> None:
    async def main() -> None:
        lane = Lane("archive", patience=5)

        def fails() -> None:
            raise TierError("no")

        for call in (lane.run(fails, "x"), lane.endure(fails, "x", lambda e: None, Beat())):
            with pytest.raises(TierError, match=r"^no$"):
                await call
        with pytest.raises(TierError, match=r"^no$"):
            lane.call(fails, "x")

    trio.run(main)


def test_the_event_loop_waits_once_for_a_tier_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "STALL_SECONDS", 0.2)
    gate = threading.Event()
    seen: list[object] = []

    async def main() -> None:
        lane = Lane("nvme")
        for _ in range(3):
            with pytest.raises(TimeoutError):
                lane.call(lambda: gate.wait() and 7, "create", seen.append)
        assert lane.given_up == 1, "the second call does not even begin"
        gate.set()
        await answers(lane)
        assert seen == [7], "a descriptor that came late is closed"
        assert lane.call(lambda: 8, "create") == 8

    trio.run(main)
