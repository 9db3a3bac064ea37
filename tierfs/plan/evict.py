"""Which clean replicas leave a tier. Pure: usage and candidates in, evictions out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierfs.policy.model import Keep
from tierfs.types import Usage


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that is closed, not open, and durable on a tier further down. ``age`` orders: oldest smallest."""

    ino: int
    version: int
    size: int
    age: int
    keep: Keep


def plan_evict(usage: Usage, high: float, low: float, candidates: Iterable[Candidate]) -> list[Candidate]:
    """KEEP NONE goes at once; above the high watermark WATERMARK goes, oldest first, down to the low one;
    ALL never goes. Only what is a candidate is ever named, so undrained data cannot be chosen."""
    chosen: list[Candidate] = []
    used = usage.used
    waiting: list[Candidate] = []
    for candidate in candidates:
        if candidate.keep is Keep.NONE:
            chosen.append(candidate)
            used -= candidate.size
        elif candidate.keep is Keep.WATERMARK:
            waiting.append(candidate)
    if usage.used > usage.capacity * high:
        for candidate in sorted(waiting, key=lambda c: c.age):
            if used <= usage.capacity * low:
                break
            chosen.append(candidate)
            used -= candidate.size
    return chosen
