"""plan_drain for every queue: what it may never start, what it must start, and that a queue always empties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierfs.plan.drain import PATIENCE_NS, SETTLE_NS, SMALL, SMALL_AT_ONCE, Pending, plan_drain

NOW = 1_000_000 * SETTLE_NS
SIZES = st.sampled_from([0, 1, SMALL - 1, SMALL, SMALL + 1, 1 << 33])
AGES = st.integers(0, 3 * SETTLE_NS) | st.sampled_from([0, SETTLE_NS - 1, SETTLE_NS, SETTLE_NS + 1])


@st.composite
def queues(draw: st.DrawFn) -> list[Pending]:
    files = draw(st.lists(st.tuples(SIZES, AGES, st.sampled_from(["nvme", "archive"])), max_size=12))
    return [Pending(ino, 1, tier, size, NOW - age) for ino, (size, age, tier) in enumerate(files)]


def key(pending: Pending) -> tuple[int, int, str]:
    return pending.ino, pending.version, pending.tier


SITUATIONS = {
    "queue": queues(),
    "running": st.sets(st.integers(0, 12)),
    "slots": st.integers(-1, 6),
    "small_running": st.integers(0, 3),
    "hurry": st.booleans(),
}


@given(**SITUATIONS)
def test_starts_only_what_waits_in_order_of_close_and_within_the_slots(
    queue: list[Pending], running: set[int], slots: int, small_running: int, hurry: bool
) -> None:
    busy = {key(p) for p in queue if p.ino in running}
    start = plan_drain(queue, busy, slots, small_running, NOW, hurry=hurry).start
    assert len(start) <= max(0, slots)
    assert not busy & {key(p) for p in start}
    positions = [queue.index(pending) for pending in start]
    assert positions == sorted(set(positions))


@given(**SITUATIONS)
def test_small_files_settle_and_leave_requests_their_time(
    queue: list[Pending], running: set[int], slots: int, small_running: int, hurry: bool
) -> None:
    busy = {key(p) for p in queue if p.ino in running}
    small = [p for p in plan_drain(queue, busy, slots, small_running, NOW, hurry=hurry).start if p.size < SMALL]
    if not hurry:
        assert all(pending.closed_ns + SETTLE_NS <= NOW for pending in small)
        assert len(small) <= max(0, SMALL_AT_ONCE - small_running)


@given(**SITUATIONS)
def test_free_slots_mean_that_nothing_else_could_start(
    queue: list[Pending], running: set[int], slots: int, small_running: int, hurry: bool
) -> None:
    busy = {key(p) for p in queue if p.ino in running}
    plan = plan_drain(queue, busy, slots, small_running, NOW, hurry=hurry)
    if len(plan.start) >= slots:
        return
    left = [p for p in queue if p not in plan.start and key(p) not in busy]
    if hurry:
        assert left == []
    assert all(pending.size < SMALL for pending in left)
    settling = [p.closed_ns + SETTLE_NS for p in left if p.closed_ns + SETTLE_NS > NOW]
    assert plan.wake_ns == min(settling, default=None)
    if len(settling) < len(left):
        assert small_running + sum(p.size < SMALL for p in plan.start) >= SMALL_AT_ONCE


@given(queues(), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_a_queue_empties_whatever_finishes_first(queue: list[Pending], slots: int, hurry: bool, rng: object) -> None:
    """Planning again and again, at the times it asks for, copies everything exactly once."""
    waiting, running, done, now = list(queue), [], [], NOW
    while waiting or running:
        small = sum(pending.size < SMALL for pending in running)
        plan = plan_drain(waiting, {key(p) for p in running}, slots - len(running), small, now, hurry=hurry)
        running += plan.start
        assert len(running) <= slots
        if running:
            finished = running.pop(rng.randrange(len(running)))  # type: ignore[attr-defined]
            waiting.remove(finished)
            done.append(finished)
        else:
            assert plan.wake_ns is not None
            assert plan.wake_ns > now
            now = plan.wake_ns
    assert sorted(done, key=lambda p: p.ino) == queue


@given(queues(), st.integers(0, 2 * PATIENCE_NS))
def test_small_files_wait_for_busy_programs_but_not_for_ever(queue: list[Pending], later: int) -> None:
    now = NOW + later
    plan = plan_drain(queue, (), 99, 0, now, hurry=False, busy=True)
    overdue = {key(p) for p in queue if p.size < SMALL and p.closed_ns + SETTLE_NS + PATIENCE_NS <= now}
    small = {key(p) for p in plan.start if p.size < SMALL}
    assert small <= overdue
    assert bool(small) == bool(overdue)
    assert {key(p) for p in plan.start if p.size >= SMALL} == {key(p) for p in queue if p.size >= SMALL}
    if any(p.size < SMALL and key(p) not in overdue for p in queue):
        assert plan.wake_ns is not None
        assert plan.wake_ns > now
