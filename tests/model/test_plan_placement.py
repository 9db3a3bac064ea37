"""place and LearnedSizes for every state of the tiers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierfs.plan.placement import LearnedSizes, Room, place
from tierfs.types import Usage


@st.composite
def rooms(draw: st.DrawFn) -> list[Room]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        capacity = draw(st.integers(0, 1000))
        used = draw(st.integers(0, capacity))
        available = draw(st.integers(0, capacity - used))  # others may use the same disk
        found.append(Room(f"t{number}", Usage(capacity, used, available), draw(st.floats(0.01, 1.0))))
    return found


EXPECTED = st.integers(0, 1200)


def fits_below_the_watermark(room: Room, expected: int) -> bool:
    usage = room.usage
    return usage.used + expected <= usage.capacity * room.high and expected <= usage.available


@given(rooms(), EXPECTED)
def test_the_fastest_tier_that_fits_gets_the_file(rooms: list[Room], expected: int) -> None:
    chosen = [room.tier for room in rooms].index(place(rooms, expected))
    below = [i for i, room in enumerate(rooms) if fits_below_the_watermark(room, expected)]
    at_all = [i for i, room in enumerate(rooms) if expected < room.usage.available]
    most = max(room.usage.available for room in rooms)
    if below:
        assert chosen == below[0]
    elif at_all:
        assert chosen == at_all[0]
    else:
        assert rooms[chosen].usage.available == most


@given(rooms(), EXPECTED, st.integers(0, 1000))
def test_a_smaller_file_never_goes_to_a_slower_tier_while_one_fits(
    rooms: list[Room], expected: int, less: int
) -> None:
    if any(fits_below_the_watermark(room, expected) for room in rooms):
        names = [room.tier for room in rooms]
        assert names.index(place(rooms, max(0, expected - less))) <= names.index(place(rooms, expected))


ROLES = st.tuples(st.integers(0, 2), st.sampled_from([b"pt", b"json", b""]))
SIZES = st.integers(0, 1 << 40)


@given(st.lists(st.tuples(ROLES, SIZES), max_size=30))
def test_learned_sizes_stay_between_the_last_and_the_largest(history: list[tuple[tuple[int, bytes], int]]) -> None:
    learned = LearnedSizes()
    largest: dict[tuple[int, bytes], int] = {}
    for role, size in history:
        before = learned.expect(role) if role in largest else 0
        learned.learn(role, size)
        largest[role] = max(size, largest.get(role, 0))
        assert size <= learned.expect(role) <= largest[role]
        if size < before:
            assert learned.expect(role) >= before * 3 // 4, "one small file undid what was known"
    assert learned.expect((9, b"unknown")) == 0


@given(st.lists(SIZES, min_size=1, max_size=20))
def test_learned_sizes_grow_at_once(sizes: list[int]) -> None:
    learned = LearnedSizes()
    for size in sorted(sizes):
        learned.learn((0, b"pt"), size)
        assert learned.expect((0, b"pt")) == size


@given(SIZES, SIZES)
def test_learned_sizes_come_down_in_the_end(large: int, small: int) -> None:
    learned = LearnedSizes()
    learned.learn((0, b"pt"), large)
    for _ in range(200):
        learned.learn((0, b"pt"), small)
    assert learned.expect((0, b"pt")) <= max(small + 3, small)


@given(st.lists(st.integers(0, 50), max_size=100), st.integers(1, 8))
def test_learned_sizes_forget_the_role_seen_longest_ago(roles: list[int], limit: int) -> None:
    learned = LearnedSizes(limit)
    for number in roles:
        learned.learn((number, b""), 1 + number)
    recent = list(dict.fromkeys(reversed(roles)))[:limit]
    assert {number for number in range(51) if learned.expect((number, b""))} == set(recent)
