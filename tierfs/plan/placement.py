"""Where a new file's bytes go. Pure: usage in, tier name out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tierfs.types import Usage


@dataclass(frozen=True, slots=True)
class Room:
    """One tier that could take the file. ``high`` is its watermark as a fraction of the capacity."""

    tier: str
    usage: Usage
    high: float

    def takes(self, expected: int) -> bool:
        """Whether ``expected`` more bytes fit below the high watermark."""
        return expected <= self.spare

    @property
    def spare(self) -> int:
        """Bytes that fit below the high watermark."""
        return min(int(self.usage.capacity * self.high) - self.usage.used, self.usage.available)


def place(rooms: Iterable[Room], expected: int) -> str | None:
    """The first tier (fastest first) that holds ``expected`` more bytes below its high watermark;
    else the first with any room for them at all; else the one with the most space available. None without rooms.

    Takes no more of ``rooms`` than it needs: asking a tier for its usage has a price.
    """
    asked: list[Room] = []
    for room in rooms:
        asked.append(room)
        if room.takes(expected):
            return room.tier
    for room in asked:
        if expected < room.usage.available:
            return room.tier
    return max(asked, key=lambda room: room.usage.available).tier if asked else None


Role = tuple[int, bytes]
"""Files that are alike in size: number of the rule, and the name and its directory's with what counts them left out."""


class LearnedSizes:
    """Largest size in bytes among the last files of the same role, or else of the same rule and suffix."""

    def __init__(self, limit: int = 1024) -> None:
        self._sizes: dict[Role, int] = {}
        self._kinds: dict[Role, int] = {}
        self._limit = limit

    def expect(self, role: Role) -> int:
        found = self._sizes.get(role)
        return self._kinds.get(kind_of(role), 0) if found is None else found

    def learn(self, role: Role, size: int) -> None:
        """Grow at once, shrink slowly, so that one small file does not undo what is known."""
        for sizes, key in ((self._sizes, role), (self._kinds, kind_of(role))):
            known = sizes.pop(key, 0)
            sizes[key] = size if size >= known else known - (known - size) // 4
            if len(sizes) > self._limit:
                del sizes[next(iter(sizes))]


_COUNTED = re.compile(rb"[0-9]+")
_TEMPORARY = re.compile(rb"\.?tmp[A-Za-z0-9_-]{4,}\Z")


def role_of(rule: int, path: tuple[bytes, ...] | None) -> Role:
    """checkpoint-100/optimizer.pt and checkpoint-200/optimizer.pt are alike, and so are all temporary names."""
    names = path[-2:] if path else ()
    return rule, b"/".join(_COUNTED.sub(b"0", _TEMPORARY.sub(b".tmp", name)) for name in names)


def kind_of(role: Role) -> Role:
    """Rule and suffix of the name."""
    rule, name = role
    name = name.rpartition(b"/")[2]
    return rule, name.rpartition(b".")[2] if b"." in name else b""
