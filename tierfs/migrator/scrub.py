"""Integrity: every durable replica is read now and then and compared with its digest; a bad one is replaced.

A pass reads the replicas of one tier in the catalog's order, a file at a time, at a bounded rate, from the storage and
not from the page cache. Where it stands is in the catalog, so that the next daemon goes on there. What differs is read
again before it counts: bytes may be flipped on the way.

A bad replica whose bytes stand elsewhere is forgotten, and its copy queued again as if the file had just been closed;
so until then nothing counts as durable because of it, and nothing is evicted for its sake. When no other replica has
the right bytes, it stays, as the best there is: it is listed as damaged, reads of the file give EIO, and the entry goes
when the file is rewritten or deleted, or when the replica is found to be right again (somebody put it back).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.catalog.damage import Scrub
from tierfs.errors import NoAnswer, SourceChanged, TierError
from tierfs.fs.lanes import Beat, Lanes
from tierfs.fs.open_files import OpenFiles
from tierfs.migrator.archive import Archive
from tierfs.migrator.outage import Outages
from tierfs.migrator.throttle import Throttle
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.content import Content
from tierfs.tiers.kinds import Tree
from tierfs.types import OpKind, Replica, ReplicaState

log = logging.getLogger("tierfs.scrub")

WINDOW = 64
"""Replicas looked up at a time."""
TRIES = 3
"""Readings that must all be wrong until a replica counts as bad."""
LOOK_SECONDS = 60.0
"""The longest between two looks at the schedule."""
REMEMBER_SECONDS = 10.0
"""Between two notes in the catalog of how far a pass is."""

ProgressCallback = Callable[[int, int], object]


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    policy: Policy
    stores: dict[str, ReplicaStore]
    tree: Tree
    files: OpenFiles
    archive: Archive
    archive_name: str
    lanes: Lanes
    outages: Outages

    def kick(self) -> None: ...
    def target(self, tier: str) -> ReplicaStore | Tree: ...
    def read_opener(self, replica: Replica) -> Callable[[], Content]: ...


@dataclass
class Report:
    """What one scrub found."""

    files: int = 0
    bytes: int = 0
    replaced: list[str] = field(default_factory=list)
    """Paths of files of which a bad replica was replaced, or was not needed."""
    damaged: list[str] = field(default_factory=list)
    """Paths of files of which a bad replica could not be replaced: no other has the right bytes, or it is open."""
    skipped: list[str] = field(default_factory=list)
    """Tiers that did not answer, with what they said."""


class Scrubber:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._one = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._suspects: set[tuple[int, int, str]] = set()
        self.running: dict[str, tuple[int, int]] = {}
        """By tier: bytes read and to be read of the pass under way."""

    # the schedule

    async def run(self) -> None:
        """Scrub each persistent tier when it is due, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await trio.sleep(min(LOOK_SECONDS, self._next()))
                for tier in self._due():
                    await self._pass(tier, Throttle(self._host.policy.scrub.rate), Report(), lambda done, total: None)

    def _tiers(self) -> list[str]:
        return [tier.name for tier in self._host.policy.tiers if tier.persistent]

    def _wait_of(self, tier: str) -> float:
        """Seconds until a tier is due; a pass that was begun goes on at once."""
        every = self._host.policy.scrub.every
        if every is None:
            return float("inf")
        known = self._host.catalog.scrub_of(tier)
        if known is None:
            # From the first mount on: a new tier has nothing that could have decayed.
            known = Scrub(tier, 0, 0, 0, time.time_ns())
            with self._host.catalog.transaction():
                self._host.catalog.put_scrub(known)
        if known.began_ns > known.finished_ns:
            return 0.0
        return max(0.0, every - (time.time_ns() - known.finished_ns) / 1e9)

    def _next(self) -> float:
        return max(1.0, min(self._wait_of(tier) for tier in self._tiers()))

    def _due(self) -> list[str]:
        return [tier for tier in self._tiers() if self._wait_of(tier) == 0.0 and not self._host.outages.wait(tier)]

    # passes

    async def scrub(self, tiers: list[str], rate: int | None, progress: ProgressCallback) -> Report:
        """Read all durable replicas of these tiers now. A scheduled pass waits meanwhile."""
        report = Report()
        throttle = Throttle(rate)
        async with self._one:
            for tier in tiers:
                await self._read_all(tier, throttle, report, progress, held=True)
        return report

    async def _pass(self, tier: str, throttle: Throttle, report: Report, progress: ProgressCallback) -> None:
        await self._read_all(tier, throttle, report, progress, held=False)

    async def _read_all(
        self, tier: str, throttle: Throttle, report: Report, progress: ProgressCallback, *, held: bool
    ) -> None:
        """One pass over a tier: from where an earlier scheduled one stopped, or, ``held``, from the start."""
        catalog = self._host.catalog
        known = catalog.scrub_of(tier)
        goes_on = not held and known is not None and known.began_ns > known.finished_ns
        last = known.finished_ns if known is not None else 0
        began = known.began_ns if goes_on and known is not None else time.time_ns()
        at = (known.ino, known.version) if goes_on and known is not None else (0, 0)
        _, total = catalog.durable_total(tier, *at)
        done, noted = 0, trio.current_time()
        try:
            while found := catalog.durable_after(tier, *at, WINDOW):
                for replica in found:
                    self.running[tier] = (done, total)
                    if held:
                        await self._check(replica, throttle, report)
                    else:
                        async with self._one:
                            await self._check(replica, throttle, report)
                    at = (replica.ino, replica.version)
                    done += replica.size
                    progress(done, max(done, total))
                    if not held and trio.current_time() - noted > REMEMBER_SECONDS:
                        noted = trio.current_time()
                        self._note(Scrub(tier, *at, began, last))
        except NoAnswer as error:
            report.skipped.append(str(error))
            self._host.outages.failed(tier, error)
            if not held:
                self._note(Scrub(tier, *at, began, last))
            return
        finally:
            self.running.pop(tier, None)
        self._note(Scrub(tier, 0, 0, began, time.time_ns()))
        with catalog.transaction():
            catalog.forget_stale_damage()
        log.info("tier %s: scrubbed, %d bytes", tier, done)

    def _note(self, scrub: Scrub) -> None:
        with self._host.catalog.transaction():
            self._host.catalog.put_scrub(scrub)

    async def _check(self, replica: Replica, throttle: Throttle, report: Report) -> None:
        """Read one replica and see to it. Raises NoAnswer when its tier does not answer."""
        if not self._stands(replica):
            return
        expected = self._expected(replica)
        what = await self._wrong(replica, expected, throttle)
        report.files += 1
        report.bytes += replica.size
        if what is None:
            if self._host.catalog.is_damaged(replica):
                self.right_again(replica)
        elif self._stands(replica):
            path = self._path(replica)
            (report.replaced if await self._replace(replica, what) else report.damaged).append(path)

    def suspect(self, replica: Replica) -> bool:
        """Whoever read this replica found it to be wrong: look at it soon, and say in the log what comes of it.
        False when nobody looks yet."""
        key = (replica.ino, replica.version, replica.tier)
        if self._nursery is None:
            return False
        if key not in self._suspects and not self._host.catalog.is_damaged(replica):
            self._suspects.add(key)
            self._nursery.start_soon(self._look, replica)
        return True

    async def _look(self, replica: Replica) -> None:
        try:
            await self._check(replica, Throttle(None), Report())
        except NoAnswer as error:
            self._host.outages.failed(replica.tier, error)
        finally:
            self._suspects.discard((replica.ino, replica.version, replica.tier))

    async def unfit(self, replica: Replica, fd: int | None) -> bool:
        """Whether a replica that was just opened must not be served: it has not the size that it should have, or is
        listed as damaged and still is; None: it could not even be opened."""
        if replica.state is not ReplicaState.DURABLE or not self._host.policy.tier(replica.tier).persistent:
            return False
        if fd is None or os.fstat(fd).st_size != replica.size:
            self.suspect(replica)
            return True
        if not self._host.catalog.is_damaged(replica):
            return False
        try:
            right = await self._wrong(replica, self._expected(replica), Throttle(None)) is None
        except NoAnswer:
            return True
        if right and self._stands(replica):
            self.right_again(replica)
        return not right

    def right_again(self, replica: Replica) -> None:
        """A replica that is listed as damaged was found to have its bytes."""
        log.info("tier %s: %s has the right bytes again", replica.tier, self._path(replica))
        with self._host.catalog.transaction():
            self._host.catalog.drop_damage(replica.ino, replica.version, replica.tier)

    def _stands(self, replica: Replica) -> bool:
        """Whether the catalog still says the same of it."""
        now = self._host.catalog.replica(replica.ino, replica.version, replica.tier)
        return now is not None and (now.key, now.state) == (replica.key, replica.state)

    def _expected(self, replica: Replica) -> bytes | None:
        """The digest that it should have: its own, or that of a copy of it; an ack tier's own replica has none."""
        if replica.digest is not None:
            return replica.digest
        same = (r for r in self._host.catalog.replicas(replica.ino) if r.version == replica.version)
        return next((r.digest for r in same if r.digest is not None), None)

    async def _wrong(self, replica: Replica, expected: bytes | None, throttle: Throttle) -> str | None:
        """What is wrong with a replica, after several readings; None: nothing. Raises NoAnswer."""
        what: str | None = None
        for _ in range(TRIES):
            beat, cancel = Beat(), threading.Event()
            work = partial(_read, self._host.read_opener(replica), replica.size, throttle, beat, cancel)
            try:
                digest = await self._host.lanes[replica.tier].run(work, "scrub", beat=beat)
            except NoAnswer:
                cancel.set()
                raise
            except SourceChanged as error:
                what = str(error)
            except (OSError, TierError) as error:
                await self._require(replica.tier)
                what = f"cannot be read: {error}"
            except trio.Cancelled:
                cancel.set()
                raise
            else:
                if digest == expected:
                    return None
                if expected is None:
                    self._learn(replica, digest)
                    return None
                what = "does not have the bytes written to it"
            if not self._stands(replica):
                return None
        return what

    async def _require(self, tier: str) -> None:
        """NoAnswer when it is the whole tier that fails: that says nothing about one replica."""
        try:
            await self._host.lanes[tier].run(self._host.target(tier).probe, "try to write")
        except TierError as error:
            raise NoAnswer(str(error)) from error

    def _learn(self, replica: Replica, digest: bytes) -> None:
        """The digest of a replica that was never copied is what its first reading gives."""
        if self._stands(replica) and replica.ino not in self._host.files.inodes:
            with self._host.catalog.transaction():
                self._host.catalog.put_replica(replica._replace(digest=digest))

    # replacing

    async def _replace(self, bad: Replica, what: str) -> bool:
        """Forget a bad replica and have it copied again, if its bytes stand elsewhere; else list it as damaged."""
        host = self._host
        good = [other for other in await self._good(bad) if self._stands(other)]
        attributes = host.catalog.attributes(bad.ino)
        if not self._stands(bad) or attributes is None or attributes.nlink == 0:
            return True
        inode = host.files.inodes.get(bad.ino)
        in_use = inode is not None and inode.replica.key == bad.key and bad.tier != host.archive_name
        path = self._path(bad)
        known = host.catalog.is_damaged(bad)
        if not good or in_use:
            if not known:
                why = "it is open, and replaced later" if good else "no other tier has them: reading it gives EIO"
                log.error("tier %s: %s %s; %s", bad.tier, path, what, why)
            with host.catalog.transaction():
                host.catalog.put_damage(bad, what, time.time_ns())
            return False
        log.warning("tier %s: %s %s; replaced from tier %s", bad.tier, path, what, good[0].tier)
        with host.catalog.transaction():
            host.catalog.drop_damage(bad.ino, bad.version, bad.tier)
            host.files.forget_replica(bad)
            if any(other.tier in host.stores for other in good):
                if bad.tier == host.archive_name:
                    host.catalog.log(OpKind.CONTENT, bad.ino, time.time_ns(), arg=bad.version)
                elif not any(host.policy.tier(other.tier).persistent for other in good):
                    host.catalog.queue_drain(bad.ino, bad.version, bad.tier)
        host.kick()
        return True

    async def _good(self, bad: Replica) -> list[Replica]:
        """Other replicas of this version that have the right bytes, local ones first; on the archive at least one must
        be local to be of use for a bad one there."""
        expected = self._expected(bad)
        found = []
        order = [tier.name for tier in self._host.policy.tiers]
        others = [
            other
            for other in self._host.catalog.replicas(bad.ino)
            if other.version == bad.version and other.tier != bad.tier and other.state is not ReplicaState.OPEN
        ]
        for other in sorted(others, key=lambda r: order.index(r.tier)):
            try:
                if expected is not None and await self._wrong(other, expected, Throttle(None)) is None:
                    found.append(other)
            except NoAnswer as error:
                log.info("%s", error)
        return found

    def _path(self, replica: Replica) -> str:
        path = b"/".join(self._host.catalog.path_of(replica.ino) or ()).decode(errors="replace")
        return path or f"inode {replica.ino}"


def _read(opener: Callable[[], Content], size: int, throttle: Throttle, beat: Beat, cancel: threading.Event) -> bytes:
    """The digest of a replica as its storage has it. Raises OSError, TierError; SourceChanged: it has another size."""
    content = opener()
    try:
        there = content.size
        if there != size:
            raise SourceChanged(f"has {there} bytes, not {size}")
        content.forget()  # else the page cache would be what is read

        def turn(length: int) -> None:
            beat()
            throttle(length, cancel, beat)

        try:
            return content.digest(size, streams=1, throttle=turn, cancelled=cancel.is_set)
        finally:
            content.forget()
    finally:
        content.close()
