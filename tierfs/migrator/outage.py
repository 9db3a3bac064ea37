"""Tiers that fail: when to try again, and what they said."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import trio

from tierfs.errors import TierError

log = logging.getLogger("tierfs.migrator")

RETRY_FIRST, RETRY_LAST = 0.2, 60.0
"""Seconds until the first and between later tries."""


@dataclass
class Outage:
    """What a tier said, and when to try it again, on trio's clock."""

    error: str
    retry_at: float
    delay: float


class Outages(dict[str, Outage]):
    """By tier, those that fail at present."""

    def __init__(self) -> None:
        super().__init__()
        self.last_errors: dict[str, str] = {}
        """What each tier said last, also if it works again."""

    def wait(self, tier: str) -> bool:
        """Whether it is too early to try the tier again."""
        outage = self.get(tier)
        return outage is not None and trio.current_time() < outage.retry_at

    def failed(self, tier: str, error: TierError) -> None:
        """Back off with jitter; logged when an outage begins, not at each try."""
        known = self.get(tier)
        delay = min(RETRY_LAST, known.delay * 2) if known else RETRY_FIRST
        if known is None:
            log.warning("%s; trying again until it works", error)
        self[tier] = Outage(str(error), trio.current_time() + delay * random.uniform(0.8, 1.2), delay)
        self.last_errors[tier] = str(error)

    def recovered(self, tier: str) -> None:
        if self.pop(tier, None) is not None:
            log.info("tier %s works again", tier)
