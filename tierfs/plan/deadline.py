"""What deadlines mean where things are published in order. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


def inherited(seqs: Iterable[int], deadlines: Sequence[tuple[int, int]]) -> list[int | None]:
    """The deadline in ns of each content at these places of the oplog, given the (place, deadline) of some.

    The archive shows contents in the order of their closes, so whatever stands before a file with a deadline has to be
    there by then, too: it inherits the deadline. Then earliest deadline first misses none that another order meets.
    """
    places = sorted(deadlines)
    earliest: list[int] = []
    for _, due in reversed(places):
        earliest.append(min(due, earliest[-1]) if earliest else due)
    earliest.reverse()
    starts = [seq for seq, _ in places]
    found: list[int | None] = []
    for seq in seqs:
        at = bisect_left(starts, seq)
        found.append(earliest[at] if at < len(earliest) else None)
    return found
