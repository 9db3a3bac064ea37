"""Which copies to start next. Pure: queue and limits in, copies out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

SMALL = 1 << 20
"""Files below this many bytes wait `SETTLE_NS` after their close: most are replaced or deleted at once."""

SETTLE_NS = 1_500_000_000


@dataclass(frozen=True, slots=True)
class Pending:
    """A closed version that ``tier`` does not have yet. ``size`` in bytes; ``closed_ns`` and ``due_ns``, its deadline
    or None, on the caller's clock."""

    ino: int
    version: int
    tier: str
    size: int
    closed_ns: int
    due_ns: int | None = None


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


URGENT_NS = SETTLE_NS + PATIENCE_NS + 3_500_000_000
"""A deadline nearer than this lets a small file neither settle nor give way."""


def plan_drain(
    queue: Sequence[Pending],
    running: Collection[tuple[int, int, str]],
    slots: int,
    small_running: int,
    now_ns: int,
    *,
    hurry: bool,
    busy: bool = False,
    archive: str | None = None,
    emergency: bool = False,
) -> DrainPlan:
    """Fill ``slots``: the earliest deadline first, and in the queue's order (order of close) what has none.

    ``busy``: requests need the time that small files would take. ``hurry`` (a flush waits) ignores that, settling and
    the limit on small files. ``archive`` names the last tier when there are persistent ones above it: a server that is
    slow or hangs does not get the last slot, which those need. ``emergency``: the process is about to end, and the
    nearest persistent tier is the one that is reached in time, so what goes to the archive comes after all else.
    """
    start: list[Pending] = []
    wake: int | None = None
    small_left = SMALL_AT_ONCE - small_running
    far_left = slots
    if archive is not None:
        far = sum(tier == archive for _, _, tier in running)
        far_left = max(1, slots + len(running) - 1) - far
    for pending in sorted(queue, key=lambda p: (emergency and p.tier == archive, _due(p))):
        if (pending.ino, pending.version, pending.tier) in running:
            continue
        urgent = hurry or emergency or _due(pending) - URGENT_NS <= now_ns
        settled = pending.closed_ns + SETTLE_NS
        if not urgent and pending.size < SMALL and settled > now_ns:
            wake = settled if wake is None else min(wake, settled)
            continue
        if len(start) >= slots:
            break
        if pending.tier == archive and far_left <= 0:
            continue
        if pending.size < SMALL and not urgent:
            if busy and now_ns < settled + PATIENCE_NS:
                look = now_ns + BREATH_NS
                wake = look if wake is None else min(wake, look)
                continue
            if small_left <= 0:
                continue
            small_left -= 1
        far_left -= pending.tier == archive
        start.append(pending)
    return DrainPlan(tuple(start), wake)


def _due(pending: Pending) -> float:
    return math.inf if pending.due_ns is None else pending.due_ns
