"""Who may write where: admission of files that are created or opened for writing.

A file goes to the first tier of its rule that has room for what it is expected to become, and whose share of bytes that
a reboot would take (`limits.unsynced`) is not used up. Where drains could change the answer soon, the caller waits for
them, bounded by their progress; then the file goes one tier down. Nobody waits while drains are paused or their tiers
fail, and never for an error: that comes only when every tier is full.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.errors import FsError
from tierfs.fs.space import Space
from tierfs.policy.model import Policy
from tierfs.types import ReplicaState

PATIENCE, STALL = 10.0, 2.0
"""Seconds that an open waits for room at most, and without any progress. A create holds its directory's lock in the
kernel meanwhile."""
LOOK = 0.1
"""Seconds between two looks while nothing ends."""
WAITING = 32
"""Opens that wait at the same time; any more go one tier down at once."""
DROP_FOR, DROP_PAUSE = 1 << 20, 0.5
"""Files expected to be smaller than this are not worth a look at what could leave a tier for them, nor is a tier that
had nothing to give so many seconds ago."""
FRESH = 0.05
"""Seconds for which the clean bytes of a tier are not counted again; longer where counting takes long."""


class MustWait(Exception):
    """Room may come soon: `Admission.wait`, then try again with the same ticket."""

    def __init__(self, tiers: Sequence[str], expected: int) -> None:
        super().__init__()
        self.tiers = tiers
        self.expected = expected


@dataclass
class Ticket:
    """One create or open on its way in."""

    over: bool = False
    """It has waited for as long as that made sense."""


class Relief(Protocol):
    """What makes room: the migrator."""

    def expected(self) -> bool:
        """Whether copies run or could start that make bytes safe."""

    def copied(self) -> int:
        """Bytes copied so far."""

    async def progress(self) -> None:
        """Returns when a copy ended."""

    def drop(self, tier: str, size: int) -> bool:
        """Whether clean copies leave the tier to make room for so many bytes: they do not count any more."""

    async def evict(self, tier: str, size: int) -> bool:
        """The same, and they are gone."""

    async def grow(self, tier: str, size: int) -> bool:
        """Whether the tier itself takes so many bytes more than before, above what the policy calls its size."""

    def press(self, more: int) -> None:
        """One more (or less) waits: drains hurry."""


class NoRelief:
    """Nothing drains."""

    def expected(self) -> bool:
        return False

    def copied(self) -> int:
        return 0

    async def progress(self) -> None:
        await trio.sleep_forever()

    def drop(self, tier: str, size: int) -> bool:
        return False

    async def evict(self, tier: str, size: int) -> bool:
        return False

    async def grow(self, tier: str, size: int) -> bool:
        return False

    def press(self, more: int) -> None:
        pass


@dataclass
class Admission:
    policy: Policy
    space: Space
    catalog: Catalog
    relief: Relief = field(default_factory=NoRelief)
    waiting: int = 0
    spilled: int = 0
    """Files that went one tier down because of `limits.unsynced`."""
    _clean: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By volatile tier: bytes that a persistent tier has, too, and until when that counts."""

    _no_drop_before: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._limit = self.policy.limits.unsynced
        self._volatile = [tier.name for tier in self.policy.tiers if not tier.persistent]

    # what a reboot would take

    def unsynced(self) -> int:
        """Bytes on no persistent tier: closed, open, and expected of what is open."""
        return sum(self._held(tier) - self._clean_bytes(tier) for tier in self._volatile)

    def _held(self, tier: str) -> int:
        return self.catalog.tier_bytes(tier) + self.space.grown(tier) + self.space.coming(tier)

    def _clean_bytes(self, tier: str) -> int:
        known = self._clean.get(tier)
        began = trio.current_time()
        if known is None or began >= known[1]:
            unsafe = self.catalog.unsynced_bytes([tier]) + self.catalog.tier_sums(tier).get(ReplicaState.OPEN, 0)
            clean = max(0, self.catalog.tier_bytes(tier) - unsafe)
            took = trio.current_time() - began
            self._clean[tier] = known = clean, began + max(FRESH, 20 * took)
        return known[0]

    def removed(self, tier: str, size: int) -> None:
        """A replica left the tier: it may have been a clean one, and must not count for two."""
        known = self._clean.get(tier)
        if known is not None:
            self._clean[tier] = max(0, known[0] - size), known[1]

    def allows(self, tier: str, size: int) -> bool:
        """Whether so many bytes more may be on this tier."""
        if self._limit is None or tier not in self._volatile:
            return True
        if sum(map(self._held, self._volatile)) + size <= self._limit:
            return True
        return self.unsynced() + size <= self._limit

    # the decision

    def place(
        self, tiers: Sequence[str], expected: int, ticket: Ticket, *, freed: int = 0, precious: bool = False
    ) -> str:
        """The tier out of ``tiers``, fastest first, for a new file that may get ``expected`` bytes. Raises MustWait.

        ``precious``: the file replaces content that is lost with this, so FsError ENOSPC when not a byte of the new one
        could be written anywhere, ``freed`` bytes by that loss not counted.
        """
        chosen = list(tiers)
        if not self.allows(chosen[0], expected):
            if not ticket.over and self._limit is not None and expected <= self._limit and self._can_wait():
                raise MustWait(tiers, expected)
            if len(chosen) > 1:
                self.spilled += 1
                chosen = chosen[1:]
        if self.space.takes(chosen[0], expected):
            return chosen[0]
        if not self.space.fits(chosen, expected):
            if not ticket.over and self._can_wait():
                raise MustWait(tiers, expected)
            if precious and freed == 0 and not self.space.fits(tiers, 0):
                raise FsError(errno.ENOSPC, "every tier is full")
        tier = self.space.choose(chosen, expected)
        if tier != chosen[0] and self._drop(chosen[0], expected):
            tier = self.space.choose(chosen, expected)
            if tier != chosen[0] and not ticket.over and self.waiting < WAITING:
                raise MustWait(chosen[:1], expected)  # their bytes are about to go
        return tier

    def _drop(self, tier: str, size: int) -> bool:
        """Clean copies leave the tier at once where they are all that keeps a file of some size out."""
        now = trio.current_time()
        if size < DROP_FOR or now < self._no_drop_before.get(tier, 0.0):
            return False
        if self.relief.drop(tier, size):
            return True
        self._no_drop_before[tier] = now + DROP_PAUSE
        return False

    def may_stay(self, tier: str, tiers: Sequence[str], size: int, expected: int, fresh: int, ticket: Ticket) -> bool:
        """Whether a file of ``size`` bytes on ``tier`` may be written to in place; else it moves to one of ``tiers``
        below. ``fresh``: bytes of it that a reboot would take then, and would not now. MustWait: see there."""
        growth = max(0, expected - size)
        if self.allows(tier, fresh + growth) and self.space.fits([tier], growth):
            return True
        if not ticket.over and self._can_wait():
            raise MustWait([tier], growth)
        return not self.space.fits(tiers, size + growth)

    def _can_wait(self) -> bool:
        return self.waiting < WAITING and self.relief.expected()

    async def wait(self, wanted: MustWait, ticket: Ticket) -> None:
        """Returns when there is room, or when no more is to be expected soon: then the ticket is over."""
        self.waiting += 1
        self.relief.press(1)
        began = moved = trio.current_time()
        best = self._state(wanted)
        try:
            while True:
                await self._evict(wanted)
                if self._has_room(wanted):
                    return
                now = trio.current_time()
                if not self.relief.expected() or now - moved >= STALL or now - began >= PATIENCE:
                    ticket.over = True
                    return
                with trio.move_on_after(LOOK):
                    await self.relief.progress()
                state = self._state(wanted)
                if any(new > old for new, old in zip(state, best, strict=True)):
                    moved = trio.current_time()
                best = tuple(map(max, state, best))
        finally:
            self.waiting -= 1
            self.relief.press(-1)

    async def _evict(self, wanted: MustWait) -> None:
        if not self.space.fits(wanted.tiers, wanted.expected):
            for tier in wanted.tiers:
                if await self.relief.evict(tier, wanted.expected):
                    return

    def _has_room(self, wanted: MustWait) -> bool:
        return self.allows(wanted.tiers[0], wanted.expected) and self.space.fits(wanted.tiers, wanted.expected)

    def _state(self, wanted: MustWait) -> tuple[int, ...]:
        """Numbers that grow with progress. Room only where that is what is waited for: others use the disks, too."""
        short = not self.space.fits(wanted.tiers, wanted.expected)
        room = sum(self.space.available(tier) for tier in wanted.tiers) if short else 0
        return self.relief.copied(), room, -self.unsynced() if self._limit is not None else 0
