"""plan_evict for every tier: who leaves, who never does, and when it stops."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierfs.plan.evict import Candidate, plan_evict
from tierfs.policy.model import Keep
from tierfs.types import Usage

CANDIDATES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 9), st.sampled_from(Keep)), max_size=12
).map(lambda drawn: [Candidate(ino, 1, size, age, keep) for ino, (size, age, keep) in enumerate(drawn)])


@st.composite
def tiers(draw: st.DrawFn) -> tuple[Usage, float, float, list[Candidate]]:
    """A tier that holds its candidates and possibly more (open and undrained files)."""
    candidates = draw(CANDIDATES)
    used = sum(c.size for c in candidates) + draw(st.integers(0, 100))
    capacity = draw(st.integers(1, 500))
    high = draw(st.floats(0.1, 1.0))
    low = draw(st.floats(0.01, high, exclude_max=True))
    return Usage(capacity, used, max(0, capacity - used)), high, low, candidates


@given(tiers())
def test_only_candidates_leave_and_each_once(tier: tuple[Usage, float, float, list[Candidate]]) -> None:
    *_, candidates = tier
    chosen = plan_evict(*tier)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(candidates)


@given(tiers())
def test_keep_all_never_leaves_and_keep_none_always_does(tier: tuple[Usage, float, float, list[Candidate]]) -> None:
    *_, candidates = tier
    chosen = plan_evict(*tier)
    assert not [c for c in chosen if c.keep is Keep.ALL]
    assert {c for c in candidates if c.keep is Keep.NONE} <= set(chosen)


@given(tiers())
def test_below_the_high_watermark_nothing_leaves_for_room(tier: tuple[Usage, float, float, list[Candidate]]) -> None:
    usage, high, _, _ = tier
    if usage.used <= usage.capacity * high:
        assert all(c.keep is Keep.NONE for c in plan_evict(*tier))


@given(tiers())
def test_the_oldest_leave_first_until_the_low_watermark(tier: tuple[Usage, float, float, list[Candidate]]) -> None:
    usage, high, low, candidates = tier
    chosen = plan_evict(*tier)
    for_room = [c for c in chosen if c.keep is Keep.WATERMARK]
    stay = [c for c in candidates if c.keep is Keep.WATERMARK and c not in chosen]
    assert [c.age for c in for_room] == sorted(c.age for c in for_room)
    assert all(gone.age <= kept.age for gone in for_room for kept in stay)
    left = usage.used - sum(c.size for c in chosen)
    if for_room:
        assert left + for_room[-1].size > usage.capacity * low, "the last one need not have left"
    if stay and usage.used > usage.capacity * high:
        assert left <= usage.capacity * low, "stopped too early"


@given(tiers())
def test_a_second_look_finds_nothing_left_to_do(tier: tuple[Usage, float, float, list[Candidate]]) -> None:
    usage, high, low, candidates = tier
    chosen = plan_evict(*tier)
    used = usage.used - sum(c.size for c in chosen)
    after = Usage(usage.capacity, used, max(0, usage.capacity - used))
    assert plan_evict(after, high, low, [c for c in candidates if c not in chosen]) == []
