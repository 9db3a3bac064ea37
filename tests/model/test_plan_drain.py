"""plan_drain for every queue: what it may never start, what it must start, and that a queue always empties."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tierfs.plan.deadline import inherited
from tierfs.plan.drain import PATIENCE_NS, SETTLE_NS, SMALL, SMALL_AT_ONCE, URGENT_NS, Pending, plan_drain

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


DUES = st.none() | st.integers(-100, 100).map(lambda n: NOW + n * SETTLE_NS)


@st.composite
def queues_with_deadlines(draw: st.DrawFn) -> list[Pending]:
    return [replace(pending, due_ns=draw(DUES)) for pending in draw(queues())]


@given(queues_with_deadlines(), st.integers(0, 6))
def test_the_earliest_deadline_goes_first_and_close_order_holds_without(queue: list[Pending], slots: int) -> None:
    start = list(plan_drain(queue, (), slots, 0, NOW, hurry=True).start)
    order = sorted(queue, key=lambda p: (p.due_ns is None, p.due_ns or 0, queue.index(p)))
    assert start == order[:slots]


@given(queues_with_deadlines())
def test_a_near_deadline_neither_settles_nor_gives_way(queue: list[Pending]) -> None:
    start = plan_drain(queue, (), 99, SMALL_AT_ONCE, NOW, hurry=False, busy=True).start
    urgent = {key(p) for p in queue if p.due_ns is not None and p.due_ns - URGENT_NS <= NOW}
    assert urgent <= {key(p) for p in start}
    assert all(p.size >= SMALL for p in start if key(p) not in urgent)


@given(queues_with_deadlines(), st.sets(st.integers(0, 12)), st.integers(-1, 6), st.booleans())
def test_the_archive_never_has_the_last_slot_of_several(
    queue: list[Pending], running: set[int], slots: int, emergency: bool
) -> None:
    busy = {key(p) for p in queue if p.ino in running}
    plan = plan_drain(queue, busy, slots, 0, NOW, hurry=True, archive="archive", emergency=emergency)
    far = [p for p in plan.start if p.tier == "archive"]
    if far:
        total = max(0, slots) + len(busy)
        assert len(far) + sum(tier == "archive" for _, _, tier in busy) <= max(1, total - 1)
    left = [p for p in queue if key(p) not in busy and p not in plan.start]
    if len(plan.start) < slots:
        assert all(p.tier == "archive" for p in left), "what goes elsewhere does not wait for the archive"


@given(queues_with_deadlines(), st.integers(0, 6))
def test_in_an_emergency_the_nearest_persistent_tier_comes_first(queue: list[Pending], slots: int) -> None:
    start = plan_drain(queue, (), slots, 0, NOW, hurry=False, archive="archive", emergency=True).start
    near = [p for p in queue if p.tier != "archive"]
    assert len([p for p in start if p.tier != "archive"]) == min(slots, len(near))


@given(st.lists(st.integers(0, 40), unique=True).map(sorted), st.dictionaries(st.integers(0, 50), st.integers(0, 99)))
def test_what_is_published_before_a_file_inherits_its_deadline(seqs: list[int], deadlines: dict[int, int]) -> None:
    expected = [min((due for at, due in deadlines.items() if at >= seq), default=None) for seq in seqs]
    assert inherited(seqs, sorted(deadlines.items(), key=lambda item: item[1])) == expected
