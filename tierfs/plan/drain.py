"""Which copies to start next. Pure: queue and limits in, copies out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

SMALL = 1 << 20
"""Files below this many bytes wait `SETTLE_NS` after their close: most are replaced or deleted at once."""

SETTLE_NS = 1_500_000_000


@dataclass(frozen=True, slots=True)
class Pending:
    """A closed version that ``tier`` does not have yet. ``size`` in bytes, ``closed_ns`` on the caller's clock."""

    ino: int
    version: int
    tier: str
    size: int
    closed_ns: int


@dataclass(frozen=True, slots=True)
class DrainPlan:
    start: tuple[Pending, ...]
    wake_ns: int | None
    """When a settling file becomes due; None when nothing waits for time alone."""


SMALL_AT_ONCE = 1
"""Small files copied at the same time while nobody waits: each costs Python time that requests need."""

PATIENCE_NS, BREATH_NS = 15_000_000_000, 500_000_000
"""How long small files that are due still wait while programs make and remove files at a high rate, which may well
remove these, too; and when to look again."""


def plan_drain(
    queue: Sequence[Pending],
    running: Collection[tuple[int, int, str]],
    slots: int,
    small_running: int,
    now_ns: int,
    *,
    hurry: bool,
    busy: bool = False,
) -> DrainPlan:
    """Fill ``slots`` in the queue's order (order of close). ``busy``: requests need the time that small files would
    take. ``hurry`` (a flush waits) ignores that, settling and the limit on small files."""
    start: list[Pending] = []
    wake: int | None = None
    for pending in queue:
        if (pending.ino, pending.version, pending.tier) in running:
            continue
        due = pending.closed_ns + SETTLE_NS
        if not hurry and pending.size < SMALL and due > now_ns:
            wake = due if wake is None else min(wake, due)
            continue
        if len(start) >= slots:
            break
        if pending.size < SMALL and not hurry:
            if busy and now_ns < due + PATIENCE_NS:
                look = now_ns + BREATH_NS
                wake = look if wake is None else min(wake, look)
                continue
            if small_running >= SMALL_AT_ONCE:
                continue
            small_running += 1
        start.append(pending)
    return DrainPlan(tuple(start), wake)
