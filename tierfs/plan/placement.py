"""Where a new file's bytes go. Pure: usage in, tier name out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierfs.types import Usage


@dataclass(frozen=True, slots=True)
class Room:
    """One tier that could take the file. ``high`` is its watermark as a fraction of the capacity."""

    tier: str
    usage: Usage
    high: float


def place(rooms: Iterable[Room], expected: int) -> str | None:
    """The first tier (fastest first) that holds ``expected`` more bytes below its high watermark;
    else the first with any room for them at all; else the one with the most space available. None without rooms.

    Takes no more of ``rooms`` than it needs: asking a tier for its usage has a price.
    """
    asked: list[Room] = []
    for room in rooms:
        asked.append(room)
        if room.usage.used + expected <= room.usage.capacity * room.high and expected <= room.usage.available:
            return room.tier
    for room in asked:
        if expected < room.usage.available:
            return room.tier
    return max(asked, key=lambda room: room.usage.available).tier if asked else None


class LearnedSizes:
    """Largest size in bytes among the last files of the same role; a role is (rule, name suffix)."""

    def __init__(self, limit: int = 1024) -> None:
        self._sizes: dict[tuple[int, bytes], int] = {}
        self._limit = limit

    def expect(self, role: tuple[int, bytes]) -> int:
        return self._sizes.get(role, 0)

    def learn(self, role: tuple[int, bytes], size: int) -> None:
        """Grow at once, shrink slowly, so that one small file does not undo what is known."""
        known = self._sizes.pop(role, 0)
        self._sizes[role] = size if size >= known else known - (known - size) // 4
        if len(self._sizes) > self._limit:
            del self._sizes[next(iter(self._sizes))]


def role_of(rule: int, path: tuple[bytes, ...] | None) -> tuple[int, bytes]:
    """Files that are alike in size: same rule, same suffix of the name."""
    name = path[-1] if path else b""
    return rule, name.rpartition(b".")[2] if b"." in name else b""
