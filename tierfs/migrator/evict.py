"""Eviction: clean replicas leave a tier that fills up, or at once where a rule says so."""

from __future__ import annotations

import contextlib
from typing import Protocol

from tierfs.catalog import Catalog
from tierfs.fs.open_files import OpenFiles
from tierfs.plan.evict import Candidate, plan_evict
from tierfs.points import At, reach
from tierfs.policy.model import Keep, Policy
from tierfs.types import Usage

WINDOW = 4096
"""Candidates looked at in one go."""


SLACK = 0.05
"""Part of a tier that its filesystem needs for itself, when room is made for one file."""


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    policy: Policy
    files: OpenFiles

    def durable(self, ino: int, version: int, tier: str, *, below: bool = False) -> bool: ...


class Evictor:
    def __init__(self, host: Host) -> None:
        self._host = host

    def run(self) -> list[tuple[str, OSError]]:
        """Evict what the policy wants to go: the tiers that did not answer, each with its error."""
        failed = []
        self._host.files.measure()
        for config in self._host.policy.tiers[:-1]:
            try:
                usage = self._host.files.space.outlook(config.name)
            except OSError as error:
                failed.append((config.name, error))
                continue
            eager = any(rule.keep.get(config.name) is Keep.NONE for rule in self._host.policy.rules)
            if eager or self._above_high(config.name, usage):
                for chosen in plan_evict(usage, config.high, config.low, self._clean(config.name)):
                    self.evict(chosen.ino, chosen.version, config.name)
        return failed

    def make_room(self, tier: str, size: int) -> bool:
        """Evict clean replicas, oldest first and whatever the watermarks say, until ``size`` bytes fit: whether any
        went. Raises OSError when the tier does not answer."""
        usage = self._host.files.space.outlook(tier)
        aim = 0.0
        if usage.capacity:
            missing = size + SLACK * usage.capacity - usage.available  # others may have files there, too
            left = min(usage.capacity - size - SLACK * usage.capacity, usage.used - missing)
            aim = max(0.0, left / usage.capacity)
        chosen = plan_evict(usage, -1.0, min(aim, self._host.policy.tier(tier).low), self._clean(tier))
        return any([self.evict(c.ino, c.version, tier) for c in chosen])

    def could_make_room(self, tier: str, size: int) -> bool:
        """Whether `make_room` could make as much as that. Raises OSError when the tier does not answer."""
        usage = self._host.files.space.outlook(tier)
        return size - usage.available <= sum(chosen.size for chosen in plan_evict(usage, -1.0, -1.0, self._clean(tier)))

    def wanted(self) -> bool:
        """Whether a growing file has filled a tier to its high watermark, long before its close tells."""
        for tier in {growth.tier for growth in self._host.files.space.growing.values()}:
            with contextlib.suppress(OSError):
                if self._above_high(tier, self._host.files.space.outlook(tier)):
                    return True
        return False

    def _above_high(self, tier: str, usage: Usage) -> bool:
        return usage.used > usage.capacity * self._host.policy.tier(tier).high

    def _clean(self, tier: str) -> list[Candidate]:
        host = self._host
        clean = []
        for replica in host.catalog.evictable(tier, self._below(tier), WINDOW):
            if replica.ino in host.files.inodes:
                continue
            _, rule = host.files.rule_of(host.catalog.path_of(replica.ino))
            attributes = host.catalog.attributes(replica.ino)
            age = attributes.ctime_ns if attributes else 0
            keep = rule.keep.get(tier, Keep.WATERMARK)
            clean.append(Candidate(replica.ino, replica.version, replica.size, age, keep))
        return clean

    def _below(self, tier: str) -> list[str]:
        names = [t.name for t in self._host.policy.tiers]
        return [t.name for t in self._host.policy.tiers[names.index(tier) + 1 :] if t.persistent]

    def evict(self, ino: int, version: int, tier: str) -> bool:
        """Drop a clean replica if it still is one: closed, not open, durable further down."""
        host = self._host
        replica = host.catalog.replica(ino, version, tier)
        if replica is None or ino in host.files.inodes or not host.durable(ino, version, tier, below=True):
            return False
        with host.catalog.transaction():
            host.files.forget_replica(replica)
        reach(At.EVICT_RECORDED)
        return True
