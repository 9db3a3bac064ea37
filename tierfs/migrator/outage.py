"""Tiers that fail: a circuit breaker for each, and what they said.

A tier is *closed* (work goes through) until a call fails. Then it is *open*: nothing is tried until a time that doubles
with each failure, give or take some jitter, so that the daemons of many machines do not all return to a server at once.
After that it is *half open*: one piece of work at a time may try; a success closes the breaker, a failure opens it for
longer. Work that was under way when it opened may end either way; only its success counts.

A piece of work that failed has a delay of its own, too: a tier that works for all files but one is not down.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import trio

from tierfs.errors import NoAnswer, TierError

log = logging.getLogger("tierfs.migrator")

RETRY_FIRST, RETRY_LAST = 0.2, 60.0
"""Seconds until the first and between later tries."""
REMEMBERED = 4096
"""Pieces of work that failed."""
JITTER = 0.2
"""Part of such a time by which it is longer or shorter."""
CALM = 60.0
"""Seconds without a failure after which the next one is news: before, a line in the log for each would be noise."""


W = TypeVar("W", bound=Hashable)


class Breaker(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass
class Outage:
    """What a tier said, and when to try it again, on trio's clock."""

    error: str
    silent: bool
    """It did not say anything at all."""
    retry_at: float
    delay: float
    probe: Hashable | None = None
    """The work that tries whether it is over."""
    failed: set[Hashable] = field(default_factory=set)
    """Work that tried in vain; others have their turn first, for one file may be the only one that fails."""


class Outages(dict[str, Outage]):
    """By tier, those that fail at present."""

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__()
        self.last_errors: dict[str, str] = {}
        """What each tier said last, also if it works again."""
        self._rng = rng or random.Random()
        self._last_failure: dict[str, float] = {}
        self._later: dict[Hashable, tuple[float, float]] = {}
        """Work that failed: when it may be tried again, and the delay until then."""

    def state(self, tier: str) -> Breaker:
        outage = self.get(tier)
        if outage is None:
            return Breaker.CLOSED
        return Breaker.OPEN if trio.current_time() < outage.retry_at else Breaker.HALF_OPEN

    def silent(self, tier: str) -> bool:
        """Whether the tier fails by not answering."""
        outage = self.get(tier)
        return outage is not None and outage.silent

    def wait(self, tier: str) -> bool:
        """Whether nothing may be begun on the tier now."""
        outage = self.get(tier)
        return outage is not None and (trio.current_time() < outage.retry_at or outage.probe is not None)

    @property
    def quiet(self) -> bool:
        """Nothing has failed that has not worked since."""
        return not self and not self._later

    def _postponed(self, work: Hashable) -> bool:
        return work in self._later and trio.current_time() < self._later[work][0]

    def choose(self, tier: str, candidates: list[W]) -> list[W]:
        """Those of the pieces of work that may be begun now: all, one, or none."""
        outage = self.get(tier)
        candidates = [work for work in candidates if not self._postponed(work)]
        if outage is None:
            return candidates
        if self.wait(tier) or not candidates:
            return []
        fresh = [work for work in candidates if work not in outage.failed]
        if not fresh:
            outage.failed.clear()
        return [(fresh or candidates)[0]]

    def begin(self, tier: str, work: Hashable) -> None:
        """``work`` begins on the tier. It must `end`."""
        outage = self.get(tier)
        if outage is not None and outage.probe is None:
            outage.probe = work

    def end(self, tier: str, work: Hashable) -> None:
        """``work`` is over, whatever came of it."""
        outage = self.get(tier)
        if outage is not None and outage.probe == work:
            outage.probe = None

    def failed(self, tier: str, error: TierError, work: Hashable | None = None) -> None:
        """Open the breaker; logged when an outage begins, not at each try."""
        now = trio.current_time()
        known = self.get(tier)
        self.last_errors[tier] = str(error)
        news = now - self._last_failure.get(tier, -CALM) >= CALM
        self._last_failure[tier] = now
        if known is None:
            log.log(logging.WARNING if news else logging.INFO, "%s; trying again until it works", error)
            known = self[tier] = Outage(str(error), False, now, 0.0)
        known.error, known.silent = str(error), isinstance(error, NoAnswer)
        if work is not None:
            known.failed.add(work)
            if len(self._later) >= REMEMBERED:
                self._later.clear()
            _, delay = self._later.get(work, (0.0, 0.0))
            self._later[work] = self._after(delay)
        if now >= known.retry_at:
            known.retry_at, known.delay = self._after(known.delay)

    def _after(self, delay: float) -> tuple[float, float]:
        """(time of the next try, its delay), given the delay of the last one."""
        longer = min(RETRY_LAST, delay * 2) or RETRY_FIRST
        return trio.current_time() + longer * self._rng.uniform(1 - JITTER, 1 + JITTER), longer

    def recovered(self, tier: str, work: Hashable | None = None) -> None:
        """``work`` succeeded on the tier."""
        self._later.pop(work, None)
        if self.pop(tier, None) is not None:
            log.info("tier %s works again", tier)

    def hasten(self) -> None:
        """Try at once: whoever asks may just have repaired something."""
        self._later.clear()
        for outage in self.values():
            outage.retry_at = min(outage.retry_at, trio.current_time())

    def wake(self) -> float:
        """Seconds until a tier may be tried again."""
        now = trio.current_time()
        times = [outage.retry_at for outage in self.values() if outage.probe is None]
        times += [at for at, _ in self._later.values() if at > now]
        return max(0.05, min(times) - now) if times else float("inf")
