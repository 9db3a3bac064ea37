"""How full each tier is, and which one takes the next file."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from tierfs.plan.placement import LearnedSizes, Room, place
from tierfs.policy.model import Policy
from tierfs.types import Usage

Probe = Callable[[int], Usage]
"""Given the bytes that tierfs itself holds on the tier, its usage."""

REFRESH_SECONDS, PATIENCE_SECONDS = 2.0, 10.0


class DoesNotAnswer(TimeoutError):
    """Not even with an error."""


class RemoteProbe:
    """The probe of a tier that may take as long to answer as its server likes: asked in a thread, now and then, so that
    a statfs or status never waits for it."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._free: Usage | None = None
        """What it said when asked with nothing of ours on it."""
        self._error: OSError | None = None
        self._answered_at = -math.inf
        self._limiter = trio.CapacityLimiter(1)

    def __call__(self, held: int) -> Usage:
        """Its usage as of the last answer. OSError: that answer was one; DoesNotAnswer: none came for a while."""
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror)
        if self._free is None or trio.current_time() - self._answered_at > PATIENCE_SECONDS:
            raise DoesNotAnswer(errno.ETIMEDOUT, "does not answer")
        return Usage(self._free.capacity, held, max(0, min(self._free.capacity - held, self._free.available)))

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask again and again; started after the first answer, or a second."""
        waiting = True
        async with trio.open_nursery() as nursery:

            async def give_up_waiting() -> None:
                await trio.sleep(1)
                started()

            def started() -> None:
                nonlocal waiting
                if waiting:
                    waiting = False
                    task_status.started()

            nursery.start_soon(give_up_waiting)
            while True:
                try:
                    self._free = await trio.to_thread.run_sync(
                        self._probe, 0, abandon_on_cancel=True, limiter=self._limiter
                    )
                    self._error = None
                except OSError as error:
                    self._error = error
                self._answered_at = trio.current_time()
                started()
                await trio.sleep(REFRESH_SECONDS)


@dataclass
class Space:
    policy: Policy
    probes: Mapping[str, Probe]
    held: Callable[[str], int]
    """Bytes of a tier's replicas, as the catalog has them."""
    learned: LearnedSizes = field(default_factory=LearnedSizes)
    growing: Mapping[str, int] = field(default_factory=dict)
    """Bytes per tier by which files open for writing outgrew what the catalog has, when somebody last looked."""
    reserved: dict[str, int] = field(default_factory=dict)
    """Bytes per tier that files on their way up will take, and that the catalog does not know yet."""

    def reserve(self, tier: str, size: int) -> None:
        """``size`` is negative to take it back."""
        self.reserved[tier] = self.reserved.get(tier, 0) + size

    def usage(self, tier: str) -> Usage:
        """OSError when the tier does not answer."""
        return self.probes[tier](self.held(tier) + self.growing.get(tier, 0) + self.reserved.get(tier, 0))

    def choose(self, candidates: Sequence[str], expected: int) -> str:
        """The tier for a new file out of ``candidates``, fastest first; not one that does not answer, if it can be
        helped."""
        if len(candidates) == 1:
            return candidates[0]
        return place(self._rooms(candidates), expected) or candidates[0]

    def _rooms(self, tiers: Sequence[str]) -> Iterator[Room]:
        for name in tiers:
            try:
                usage = self.usage(name)
            except OSError:
                continue
            yield Room(name, usage, self.policy.tier(name).high)
