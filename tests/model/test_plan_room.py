"""hard_limit for every state of a tmpfs, and what placing looks at."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tierfs.plan.placement import LearnedSizes, kind_of, role_of
from tierfs.plan.room import STEP, hard_limit

BYTES = st.integers(0, 1 << 44)
SIZES = st.integers(1, 1 << 44)
SITUATION = {
    "size": SIZES,
    "more": BYTES,
    "used": BYTES,
    "coming": BYTES,
    "spare": st.integers(-(1 << 40), 1 << 44),
    "headroom": st.integers(0, 1 << 34),
}


@given(**SITUATION)
def test_the_limit_stays_within_policy_and_memory(
    size: int, more: int, used: int, coming: int, spare: int, headroom: int
) -> None:
    limit = hard_limit(size, size + more, used, coming, spare, headroom=headroom)
    assert limit >= size, "the policy grants that much"
    assert limit >= used, "the kernel refuses less"
    assert limit <= max(size + more, used)
    assert limit <= max(size, used, used + spare)


@given(**SITUATION)
def test_what_open_files_are_expected_to_take_fits_where_it_may(
    size: int, more: int, used: int, coming: int, spare: int, headroom: int
) -> None:
    limit = hard_limit(size, size + more, used, coming, spare, headroom=headroom)
    needed = max(size, used + coming) + max(headroom, size // 8)
    assert limit >= min(needed, size + more, used + spare)
    assert limit <= max(used, needed + max(1, size // STEP)), "and no more than that is taken from the machine"


@given(**SITUATION)
def test_it_shrinks_back_as_the_tier_empties(
    size: int, more: int, used: int, coming: int, spare: int, headroom: int
) -> None:
    empty = hard_limit(size, size + more, 0, 0, spare + used, headroom=headroom)
    assert empty <= hard_limit(size, size + more, used, coming, spare, headroom=headroom)


def role(path: str) -> tuple[int, bytes]:
    return role_of(0, tuple(path.encode().split(b"/")))


def test_checkpoints_of_a_run_have_the_same_roles_and_their_files_do_not() -> None:
    learned = LearnedSizes()
    learned.learn(role("run/checkpoint-100/optimizer.pt"), 10**10)
    learned.learn(role("run/checkpoint-100/scheduler.pt"), 1000)
    assert learned.expect(role("run/checkpoint-200/optimizer.pt")) == 10**10
    assert learned.expect(role("run/checkpoint-200/scheduler.pt")) == 1000
    assert learned.expect(role("run/checkpoint-200/model.pt")) == learned.expect(role("x.pt")) > 0, "same suffix"
    assert learned.expect(role("run/checkpoint-200/model.bin")) == 0


def test_shards_and_temporary_names_are_alike() -> None:
    assert role("step-5/__0_0.distcp") == role("step-15/__13_0.distcp")
    assert role("step-5/.tmpAb3dEf") == role("step-6/.tmpzzZ_99")
    assert role("template.pt") != role("tmpl.pt")


@given(st.integers(0, 9), st.lists(st.binary(min_size=1, max_size=20).filter(lambda n: b"/" not in n), max_size=3))
@example(0, [])
def test_any_path_has_a_role(rule: int, names: list[bytes]) -> None:
    found = role_of(rule, tuple(names) or None)
    assert found == role_of(rule, tuple(names) or None)
    assert kind_of(found)[0] == rule
