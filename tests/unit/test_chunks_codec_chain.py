"""Chains of deltas: bounded in number and in bytes, broken where they cannot go on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.chunks.chain import Bounds, Link, extend, may_follow
from tierfs.chunks.codec import Codec

VERSIONS = st.lists(
    st.tuples(
        st.sampled_from([(1000, 2), (1000, 4), (2000, 2)]) | st.just((1000, 2)),  # length, item
        st.booleans(),  # does a delta pay?
        st.integers(0, 100),  # per cent of the length that are stored
    ),
    max_size=60,
)
BOUNDS = st.builds(Bounds, every=st.integers(1, 9), most=st.floats(0, 4))


def history(versions: list[tuple[tuple[int, int], bool, int]], bounds: Bounds) -> list[Link]:
    """The links of a chunk's versions, stored as a writer would."""
    links: list[Link] = []
    for (length, item), pays, percent in versions:
        previous = links[-1] if links else None
        used = Codec.DELTA if may_follow(previous, length, item, bounds) and pays else Codec.SHUFFLE_ZSTD
        links.append(extend(previous, used, length, item, length * percent // 100))
    return links


@given(versions=VERSIONS, bounds=BOUNDS)
def test_of_every_k_versions_in_a_row_one_is_whole(
    versions: list[tuple[tuple[int, int], bool, int]], bounds: Bounds
) -> None:
    links = history(versions, bounds)
    assert all(link.depth < bounds.every for link in links)
    for first in range(len(links) - bounds.every + 1):
        assert 0 in [link.depth for link in links[first : first + bounds.every]]


@given(versions=VERSIONS, bounds=BOUNDS)
def test_a_reader_never_fetches_more_than_the_bound_and_the_chunk_itself(
    versions: list[tuple[tuple[int, int], bool, int]], bounds: Bounds
) -> None:
    for link, ((length, _), _, percent) in zip(history(versions, bounds), versions, strict=True):
        own = length * percent // 100
        assert link.fetched < bounds.most * length + own if link.depth else link.fetched == own


@given(versions=VERSIONS, bounds=BOUNDS)
def test_a_delta_is_against_the_version_before_of_the_same_length_and_item(
    versions: list[tuple[tuple[int, int], bool, int]], bounds: Bounds
) -> None:
    links = history(versions, bounds)
    for previous, link in pairwise(links):
        if link.depth:
            assert (previous.length, previous.item) == (link.length, link.item)
            assert link.depth == previous.depth + 1
    assert [link.depth for link in links[:1]] in ([], [0])


def test_chains_are_as_long_as_they_may_when_deltas_pay() -> None:
    links = history([((1000, 2), True, 30)] * 9, Bounds(every=4, most=9))
    assert [link.depth for link in links] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [link.fetched for link in links[:5]] == [300, 600, 900, 1200, 300]


def test_a_chain_ends_where_reading_it_costs_too_much() -> None:
    links = history([((1000, 2), True, 60)] * 6, Bounds(every=9, most=1.5))
    assert [link.depth for link in links] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("bounds", [Bounds(every=1), Bounds(most=0)])
def test_deltas_can_be_switched_off(bounds: Bounds) -> None:
    assert [link.depth for link in history([((1000, 2), True, 30)] * 5, bounds)] == [0] * 5


def test_a_delta_needs_a_base() -> None:
    with pytest.raises(ValueError, match="without its base"):
        extend(None, Codec.DELTA, 1000, 2, 100)
