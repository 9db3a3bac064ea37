"""How full each tier is, and which one takes the next file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tierfs.plan.placement import LearnedSizes, Room, place
from tierfs.policy.model import Policy
from tierfs.types import Usage

Probe = Callable[[int], Usage]
"""Given the bytes that tierfs itself holds on the tier, its usage."""


@dataclass
class Space:
    policy: Policy
    probes: Mapping[str, Probe]
    held: Callable[[str], int]
    """Bytes of a tier's replicas, as the catalog has them."""
    learned: LearnedSizes = field(default_factory=LearnedSizes)
    reserved: dict[str, int] = field(default_factory=dict)
    """Bytes per tier that files on their way up will take, and that the catalog does not know yet."""

    def reserve(self, tier: str, size: int) -> None:
        """``size`` is negative to take it back."""
        self.reserved[tier] = self.reserved.get(tier, 0) + size

    def usage(self, tier: str) -> Usage:
        """OSError when the tier does not answer."""
        return self.probes[tier](self.held(tier) + self.reserved.get(tier, 0))

    def choose(self, candidates: Sequence[str], expected: int) -> str:
        """The tier for a new file out of ``candidates``, fastest first."""
        if len(candidates) == 1:
            return candidates[0]
        return place((Room(name, self.usage(name), self.policy.tier(name).high) for name in candidates), expected)
