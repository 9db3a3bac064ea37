"""How full each tier is, and which one takes the next file."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from tierfs.plan.placement import LearnedSizes, Room, place
from tierfs.policy.model import Policy
from tierfs.types import Usage

Probe = Callable[[int], Usage]
"""Given the bytes that tierfs itself holds on the tier, its usage."""

REFRESH_SECONDS, PATIENCE_SECONDS = 2.0, 10.0
LEAST = 64 << 10
"""A tier with fewer bytes available is full."""
AMPLE, AMPLE_SECONDS = 256 << 20, 0.005
"""A tier with so many bytes to spare is not asked again for so many seconds: nothing writes 50 GB a second."""


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
        self._asked_at: float | None = None
        """Since when it owes an answer. Not when the last one came: a machine that slept in between proves nothing."""
        self._limiter = trio.CapacityLimiter(1)

    def __call__(self, held: int) -> Usage:
        """Its usage as of the last answer. OSError: that answer was one; DoesNotAnswer: none came for a while."""
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror)
        owes = self._asked_at is not None and trio.current_time() - self._asked_at > PATIENCE_SECONDS
        if self._free is None or owes:
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
                self._asked_at = trio.current_time()
                try:
                    self._free = await trio.to_thread.run_sync(
                        self._probe, 0, abandon_on_cancel=True, limiter=self._limiter
                    )
                    self._error = None
                except OSError as error:
                    self._error = error
                self._asked_at = None
                started()
                await trio.sleep(REFRESH_SECONDS)


@dataclass(frozen=True, slots=True)
class Growth:
    """An inode that is open for writing: bytes that it outgrew what the catalog has of it, and that are still to come
    if it becomes as large as files of its role are."""

    tier: str
    grown: int
    coming: int


@dataclass
class Space:
    policy: Policy
    probes: Mapping[str, Probe]
    held: Callable[[str], int]
    """Bytes of a tier's replicas, as the catalog has them."""
    learned: LearnedSizes = field(default_factory=LearnedSizes)
    clock: Callable[[], float] = time.monotonic
    reserved: dict[str, int] = field(default_factory=dict)
    """Bytes per tier that files on their way up will take, and that the catalog does not know yet."""
    growing: dict[int, Growth] = field(default_factory=dict)
    """By inode; as of the open, or of the last look at the file."""
    _ample: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By tier: bytes that files may still be placed with, and until when."""
    _grown: Counter[str] = field(default_factory=Counter)
    _coming: Counter[str] = field(default_factory=Counter)

    def reserve(self, tier: str, size: int) -> None:
        """``size`` is negative to take it back."""
        self.reserved[tier] = self.reserved.get(tier, 0) + size

    def grow(self, ino: int, tier: str, grown: int, coming: int) -> None:
        """An inode is open for writing. From now on its bytes count, those that have not come yet for placing others:
        of many files that are created at once not each may count on the same room."""
        self.settle(ino)
        self.growing[ino] = Growth(tier, grown, coming)
        self._grown[tier] += grown
        self._coming[tier] += coming

    def settle(self, ino: int) -> None:
        """The catalog has what became of it."""
        former = self.growing.pop(ino, None)
        if former is not None:
            self._grown[former.tier] -= former.grown
            self._coming[former.tier] -= former.coming

    def coming(self, tier: str) -> int:
        return self._coming[tier]

    def grown(self, tier: str) -> int:
        return self._grown[tier]

    def usage(self, tier: str) -> Usage:
        """As of now. OSError when the tier does not answer."""
        return self.probes[tier](self.held(tier) + self._grown[tier] + self.reserved.get(tier, 0))

    def outlook(self, tier: str) -> Usage:
        """Once the open files are as large as they are expected to become. OSError when the tier does not answer."""
        usage, coming = self.usage(tier), self._coming[tier]
        return Usage(usage.capacity, usage.used + coming, max(0, usage.available - coming)) if coming else usage

    def choose(self, candidates: Sequence[str], expected: int) -> str:
        """The tier for a new file out of ``candidates``, fastest first; not one that does not answer, if it can be
        helped."""
        if len(candidates) == 1:
            return candidates[0]
        return place(self._rooms(candidates), expected) or candidates[0]

    def _rooms(self, tiers: Sequence[str]) -> Iterator[Room]:
        for name in tiers:
            try:
                usage = self.outlook(name)
            except OSError:
                continue
            yield Room(name, usage, self.policy.tier(name).high)

    def takes(self, tier: str, expected: int) -> bool:
        """Whether a file of this size is placed there without a look at any other tier."""
        need, now = max(expected, LEAST), self.clock()
        left, until = self._ample.get(tier, (0, 0.0))
        if need <= left and now < until:
            self._ample[tier] = left - need, until
            return True
        for room in self._rooms([tier]):
            self._ample[tier] = room.spare - need - AMPLE, now + AMPLE_SECONDS
            return room.takes(need)
        return False

    def fits(self, candidates: Iterable[str], expected: int) -> bool:
        """Whether any of them has room for a file of this size, and for any file at all."""
        return any(max(expected, LEAST) <= self.available(name) for name in candidates)

    def available(self, tier: str) -> int:
        """Bytes that a new file can get there; none when the tier does not answer."""
        try:
            return self.outlook(tier).available
        except OSError:
            return 0
