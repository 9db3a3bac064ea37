"""The migrator: drains files down, follows on the archive; `evict` drops clean replicas, `recall` brings cold ones up.

One task decides (`run`), from pure plans; copies run in threads under a limit. Nothing here is on the
path of a write or close.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import trio

from tierfs.catalog import Catalog
from tierfs.errors import CatalogError, ContentMissing, DigestMismatch, NoAnswer, PartsLost, SourceChanged, TierError
from tierfs.fs.lanes import SLOWEST, Beat, Lanes
from tierfs.fs.mover import FULL
from tierfs.fs.open_files import OpenFiles
from tierfs.fs.space import DoesNotAnswer
from tierfs.migrator.archive import Archive, Ready
from tierfs.migrator.describe import beside
from tierfs.migrator.early import EarlyCopies
from tierfs.migrator.evict import Evictor
from tierfs.migrator.flush import Flusher
from tierfs.migrator.held import HeldDeletes
from tierfs.migrator.keeping import CatalogCopier
from tierfs.migrator.mapped import MappedFiles
from tierfs.migrator.outage import Outages
from tierfs.migrator.pace import Pace
from tierfs.migrator.queue import DrainQueue
from tierfs.migrator.recall import Recaller
from tierfs.migrator.relief import Growth, Relief
from tierfs.migrator.removal import Remover
from tierfs.migrator.scrub import Scrubber
from tierfs.migrator.throttle import Throttle
from tierfs.migrator.transfer import (
    Copied,
    Encoding,
    Transfer,
    copy_to_store,
    discard_copy,
    publish_copy,
    unpublish,
)
from tierfs.plan.drain import SMALL, Pending, plan_drain
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.beside import describer
from tierfs.tiers.blobs import PART
from tierfs.tiers.content import Content
from tierfs.tiers.kinds import Tree, copies_on
from tierfs.tiers.memory import MemoryMount
from tierfs.tiers.object_names import Path
from tierfs.types import Replica, ReplicaState

log = logging.getLogger("tierfs.migrator")

T = TypeVar("T")

BATCH = 512
BREATH = 0.02
"""Seconds between two looks at the queues, so that a burst of closes is planned once, not once each."""
SYNC_SECONDS = 2.0
WATCH_SECONDS, WATCH_WRITERS_SECONDS = 0.25, 0.1
"""Between two looks at the files open for writing; with passthrough nobody tells the daemon that they grow."""
STALLED = 10.0
"""Seconds without a sign of life after which a copy leaves its slot to those of other tiers."""
REPLAY, PROBE = "replay", "probe"
"""Work on a tier that is no copy of a file."""
QUIESCE_SECONDS = 1.0
"""A copy that was told to stop and has not come back by then hangs in its target."""
REPLAY_SECONDS = 0.2
"""Between two batches of the archive, so that they grow large; a flush does not wait for it."""


@dataclass
class Migrator:
    catalog: Catalog
    policy: Policy
    stores: dict[str, ReplicaStore]
    tree: Tree
    files: OpenFiles = field(init=False)
    growth: Growth | None = None
    paused: bool = False
    hurry: int = 0
    """How many flushes wait; while any does, small files do not settle first."""
    emergency: int = 0
    """How many of them cannot wait for the archive: the nearest persistent tier comes first."""
    running: dict[tuple[int, int, str], Transfer] = field(default_factory=dict)
    ready: dict[tuple[int, int], Ready] = field(default_factory=dict)
    _kick: trio.Event = field(default_factory=trio.Event)
    _progress: trio.Event = field(default_factory=trio.Event)
    _quiet: list[int] = field(default_factory=list)
    """Inodes of which no copy may start: somebody waits in `quiesce` until none runs."""
    _replaying: bool = False
    _archive_full: bool = False
    """The last copy to the archive found no room: deletes may go first."""
    _deleted: bool = False
    """Something changed since the archive was last looked at for such deletes."""
    _release_at: float = 0.0
    """When the held deletes are looked at again, at the earliest; of time.perf_counter."""
    _swept: bool = False
    """What former daemons left in the archive's temporary area is gone."""

    def __post_init__(self) -> None:
        self.archive_name = self.policy.tiers[-1].name
        self.held = HeldDeletes(self)
        self.copies = copies_on(self.tree)
        self.archive = Archive(
            self.catalog,
            self.tree,
            self.archive_name,
            self.held.barrier,
            self.held.safe,
            self.held.given_up,
            self.copies,
        )
        self.outages = Outages()
        self.lanes = Lanes((tier.name for tier in self.policy.tiers), self.policy.limits.tier_timeout)
        for tier, lane in self.lanes.items():
            lane.silent = partial(self.outages.silent, tier)
        self.copier = CatalogCopier(self.catalog, self.copies, self.lanes[self.archive_name])
        self.early = EarlyCopies(self, self._advanced)
        self.remover = Remover(self, self._advanced)
        self.mapped = MappedFiles(self)
        self.throttle = Throttle(self.policy.limits.drain)
        self.pace = Pace(self.throttle)
        self.queue = DrainQueue(self)
        self.flusher = Flusher(self)
        self.durable, self.flush = self.flusher.durable, self.flusher.flush
        self.wait_durable = self.flusher.wait_durable
        self._way_stations = any(tier.persistent for tier in self.policy.tiers[:-1])
        """Persistent tiers above the archive."""
        self.scrubber = Scrubber(self)
        self.recaller = Recaller(self)
        self.evictor = Evictor(self)

    async def remove_discarded(self) -> None:
        """Remove the bytes that were discarded. Called once more at the very end, when nothing discards any more."""
        await self.remover.remove_all()

    def serve(self, files: OpenFiles, mounts: Sequence[MemoryMount] = ()) -> None:
        """Work for these files, with these memory tiers of tierfs's own."""
        self.files = files
        self.growth = Growth(mounts, self.policy, files)
        files.admission.relief = Relief(self, self.growth)

    # signals from the filesystem

    def changed(self) -> None:
        """Something was closed, renamed or removed."""
        self.pace.changes += 1
        self._deleted = True
        self._kick.set()

    def discard(self, tier: str, key: str) -> None:
        """These bytes are no longer in the catalog: remove them soon."""
        self.remover.discard(tier, key)
        self._kick.set()

    def kick(self) -> None:
        """Look again at what could start."""
        self._kick.set()

    def give_up(self) -> None:
        """The process ends: copies under way are of no use any more."""
        self.paused = True
        for transfer in self.running.values():
            transfer.cancel.set()

    def progress(self) -> trio.Event:
        """Set when the next copy ends, one way or another."""
        return self._progress

    def _advanced(self) -> None:
        self._deleted = True  # more deletes may be safe now
        self._progress.set()
        self._progress = trio.Event()
        self._kick.set()

    async def quiesce(self, ino: int) -> None:
        """Stop every copy that reads from ``ino`` and wait until its threads are out of the file.

        A copy maps its source only while the file has no writer, and SIGBUS needs a file that is cut off: so whoever
        is about to truncate or to let a writer in calls this first and goes on to do it without giving way to other
        tasks. That every truncation comes as a request, also with passthrough, makes this enough in both modes.

        A thread that hangs in the target is not waited for: see `tiers.copy.Reading`."""
        self._quiet.append(ino)
        try:
            deadline = trio.current_time() + QUIESCE_SECONDS
            while mine := [transfer for key, transfer in self.running.items() if key[0] == ino]:
                left = [transfer.leaves() for transfer in mine]
                if all(left) and trio.current_time() >= deadline:
                    break
                with trio.move_on_at(max(deadline, trio.current_time() + QUIESCE_SECONDS / 10)):
                    await self._progress.wait()
        finally:
            self._quiet.remove(ino)

    # the loop

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.recaller.run)
            nursery.start_soon(self.scrubber.run)
            nursery.start_soon(self.pace.run)
            nursery.start_soon(self._sync_now_and_then)
            nursery.start_soon(self.queue.watch)
            nursery.start_soon(self.copier.run, lambda: self.paused or bool(self.outages.wait(self.archive_name)))
            nursery.start_soon(self._watch_writers, nursery)
            while True:
                began = time.perf_counter()
                wake = await self._cycle(nursery)
                if not self.hurry:
                    await trio.sleep(max(BREATH, 8 * (time.perf_counter() - began)))
                with trio.move_on_after(wake):
                    await self._kick.wait()
                self._kick = trio.Event()

    async def _sync_now_and_then(self) -> None:
        failing = False
        # Daemons that are killed again and again within the first seconds would let the WAL grow without end.
        pause = 0.0 if self.catalog.overgrown else SYNC_SECONDS
        while True:
            await trio.sleep(pause)
            pause = SYNC_SECONDS
            try:
                await self.sync()
                self.catalog.checkpoint()
            except (CatalogError, OSError) as error:
                if not failing:
                    log.error("%s; nothing is lost yet, trying again until it works", error)
                failing = True
            else:
                failing = False

    async def sync(self) -> None:
        """What the catalog says now is on stable storage: called before anything is claimed to be durable."""
        self.catalog.commit()
        await trio.to_thread.run_sync(self.catalog.sync)

    async def _cycle(self, nursery: trio.Nursery) -> float:
        """Start what can be started; seconds until the next look."""
        wake = min(1.0 if self.mapped.any else 5.0, self._release_held())
        self.remover.start(nursery)
        self.mapped.renew()
        if not self.paused:
            wake = min(wake, self._start_drains(nursery))
            emptied = self._archive_full and self._deleted
            if not self._replaying and (emptied or not self.outages.wait(self.archive_name)):
                self._replaying = True
                self._deleted = False  # what is deleted from now on is worth another try; a try that fails is not
                nursery.start_soon(self._replay)
        self.early.drop(nursery)
        for tier, error in self.evictor.run():
            silent = isinstance(error, DoesNotAnswer)
            self.outages.failed(
                tier, NoAnswer(f"tier {tier} does not answer") if silent else TierError.of(tier, "statfs", error)
            )
        for tier in list(self.outages):
            if not self.outages.wait(tier):
                self.outages.begin(tier, PROBE)
                nursery.start_soon(self._probe, tier)
        return min(wake, self.outages.wake())

    def _release_held(self) -> float:
        """A look at the held deletes takes time by their number, and while a flush waits there is one after the other:
        seconds until one that was left out is due."""
        began = time.perf_counter()
        if began < self._release_at:
            return self._release_at - began
        self.held.hasten()
        self.held.release()
        now = time.perf_counter()
        self._release_at = now + 8 * (now - began)
        return math.inf

    async def _probe(self, tier: str) -> None:
        """Ask a tier that failed, and for which there is nothing to do, whether it works again."""
        try:
            await self.lanes[tier].run(self.target(tier).probe, "try again")
            self.outages.recovered(tier)
        except TierError as error:
            self.outages.failed(tier, error)
        finally:
            self.outages.end(tier, PROBE)
            self._kick.set()

    # draining

    def _start_drains(self, nursery: trio.Nursery) -> float:
        stalled = {transfer.tier for transfer in self.running.values() if transfer.beat.missed(STALLED)}
        moving = [transfer for transfer in self.running.values() if transfer.tier not in stalled]
        slots = self.policy.limits.transfers - len(moving)
        if slots <= 0:
            return 5.0
        now = time.time_ns()
        small = sum(transfer.size < SMALL for transfer in moving)
        urgent = self.held.urgent()
        queue = [
            replace(p, due_ns=0) if (p.ino, p.version) in urgent else p
            for p in self.queue.pending()
            if p.ino not in self._quiet and p.tier not in stalled and (self.hurry or not self.mapped.waits(p.ino))
        ]
        plan = plan_drain(
            self._admitted(queue),
            [transfer.key for transfer in moving],
            slots,
            small,
            now,
            hurry=self.hurry > 0,
            busy=self.pace.busy(),
            archive=self.archive_name if self._way_stations else None,
            emergency=self.emergency > 0,
        )
        for pending in plan.start:
            transfer = Transfer(pending.ino, pending.version, pending.tier, pending.size)
            self.running[transfer.key] = transfer
            self.outages.begin(transfer.tier, transfer.key)
            nursery.start_soon(self._drain, transfer)
        return 5.0 if plan.wake_ns is None else max(0.01, (plan.wake_ns - now) / 1e9)

    def _admitted(self, queue: list[Pending]) -> list[Pending]:
        """What the tiers' circuit breakers let through: one file on a tier that is on trial."""
        if self.outages.quiet:
            return queue
        found = []
        for tier in self._tiers_below():
            mine = {(p.ino, p.version, p.tier): p for p in queue if p.tier == tier}
            found += [mine[key] for key in self.outages.choose(tier, list(mine)) if key not in self.running]
        return sorted(found, key=queue.index)

    async def _drain(self, transfer: Transfer) -> None:
        source = self._source(transfer.ino, transfer.version)
        try:
            await self._copy_down(transfer, source)
        except SourceChanged:
            pass
        except DigestMismatch as error:
            log.info("%s; copying again", error)
        except TierError as error:
            if source is not None and self.stands(source):
                self.outages.failed(transfer.tier, error, transfer.key)
                if error.errno in FULL:
                    self._make_room(transfer)
        except (CatalogError, OSError) as error:
            unrecorded = TierError(f"a copy on tier {transfer.tier} could not be recorded: {error}")
            self.outages.failed(transfer.tier, unrecorded, transfer.key)
        finally:
            transfer.cancel.set()
            self.outages.end(transfer.tier, transfer.key)
            del self.running[transfer.key]
            self._advanced()

    def _make_room(self, transfer: Transfer) -> None:
        """A tier had no room for a copy, whatever its watermarks say: others may use the disk, too."""
        if transfer.tier == self.archive_name:
            self._archive_full = self._deleted = True
        else:
            with contextlib.suppress(OSError):
                self.evictor.make_room(transfer.tier, transfer.size)

    def _source(self, ino: int, version: int) -> Replica | None:
        """The fastest local replica of a closed version; None when it is gone or superseded."""
        found = {r.tier: r for r in self.catalog.replicas(ino) if r.version == version}
        for tier in self.stores:
            if tier in found and found[tier].state is not ReplicaState.OPEN:
                return found[tier]
        return None

    def stands(self, source: Replica) -> bool:
        """Whether the catalog still names this file. A file that was evicted, superseded or deleted meanwhile is
        removed: that a step does not find it is no fault of its tier, and what is still wanted comes from another
        replica."""
        now = self.catalog.replica(source.ino, source.version, source.tier)
        return now is not None and now.key == source.key

    async def _copy_down(self, transfer: Transfer, source: Replica | None) -> None:
        early = self.early.pop((transfer.ino, transfer.version, transfer.tier), None)
        lane = self.lanes[transfer.tier]
        if early is not None and (source is None or early.key != source.key):
            await lane.run(early.discard, "remove a file")
            early = None
        if source is None:
            return
        if source.tier == transfer.tier:
            await self._settle_in_place(source)
            return
        inode = self.files.inodes.get(transfer.ino)
        stable = inode is None or not inode.writers
        if inode is None and await self.mapped.writes_go_on(source):
            if not self.hurry:
                self.mapped.postpone(transfer.ino)
                if early is not None:
                    await lane.run(early.discard, "remove a file")
                return
            stable = False
            self.mapped.copied(source)
        to_archive = transfer.tier == self.archive_name
        target = self.target(transfer.tier)
        key = self.files.new_key(transfer.ino)
        encoding = self._encoding(transfer.ino)
        towards = self._towards(source) if to_archive else None

        def copy() -> Copied:
            store = self.stores[source.tier]
            done = copy_to_store(
                source,
                store,
                target,
                key,
                transfer,
                self.throttle,
                stable=stable,
                encoding=encoding,
                early=early,
                towards=towards,
            )
            if to_archive:
                done.temp.close()
            return done

        copied = await lane.run(copy, "copy", beat=transfer.beat, late=discard_copy)
        attributes = self.catalog.attributes(transfer.ino)
        if attributes is None or attributes.version != transfer.version:
            await lane.run(copied.temp.discard, "remove a file")
            self.outages.recovered(transfer.tier, transfer.key)
            return
        if to_archive:
            self._archive_full = False
            self.recaller.remember(source, copied.chunks)
            self.ready[transfer.ino, transfer.version] = Ready(copied.temp.name, source.size, copied.digest)
            reach(At.PUBLISH_COPIED)
        else:
            store = self.stores[transfer.tier]
            describe = describer(beside(self.catalog, transfer.ino, transfer.version))
            publish = partial(publish_copy, store, copied, key, describe)
            await lane.run(publish, "publish", late=partial(unpublish, store, key))
            reach(At.DRAIN_NAMED)
            self._landed(source, transfer.tier, key, copied.digest)
            reach(At.DRAIN_RECORDED)
        self.outages.recovered(transfer.tier, transfer.key)

    def _encoding(self, ino: int) -> Encoding:
        """How the archive stores the file, by its rule."""
        _, rule = self.files.rule_of(self.catalog.path_of(ino))
        limits = self.policy.limits
        return Encoding(rule.codec or self.policy.tiers[-1].codec, limits.encode_threads, limits.encode_nice)

    def _tiers_below(self) -> list[str]:
        """Those that copies go to."""
        return [tier.name for tier in self.policy.tiers if tier.persistent]

    def read_opener(self, replica: Replica) -> Callable[[], Content]:
        """Opens a replica for reading, in a thread, where the catalog has it now. Raises OSError, TierError."""
        return self.recaller.opener(replica)

    def _towards(self, source: Replica) -> Path | None:
        """Where a large file will be published, as it seems; None when that is not worth a guess."""
        attributes = self.catalog.attributes(source.ino)
        if source.size <= PART or attributes is None or attributes.nlink != 1:
            return None
        return self.catalog.path_of(source.ino)

    def target(self, tier: str) -> ReplicaStore | Tree:
        return self.tree if tier == self.archive_name else self.stores[tier]

    # draining what is still being written

    async def _watch_writers(self, nursery: trio.Nursery) -> None:
        while True:
            began = time.perf_counter()
            writers = bool(self.files.measure())
            full = writers and self.evictor.wanted()
            if full:
                self._kick.set()
            self.pace.written(self.files.grown, room=not full and not self.hurry)
            if self.growth is not None:
                await self.growth.look()
            if not self.paused:
                self.early.start(nursery, self._quiet)
            pause = WATCH_WRITERS_SECONDS if writers else WATCH_SECONDS
            await trio.sleep(max(pause, 100 * (time.perf_counter() - began)))

    def archive_may(self) -> bool:
        """Whether another copy may go to the archive: the last slot is for the tiers above, see `plan_drain`."""
        far = sum(tier == self.archive_name for _, _, tier in self.running)
        return not self._way_stations or far < max(1, self.policy.limits.transfers - 1)

    async def tidy(self, tier: str, work: Callable[[], object]) -> None:
        """Remove something from a tier; what fails is left for the next start."""
        try:
            await self.lanes[tier].run(work, "remove a file")
        except TierError as error:
            self.outages.failed(tier, error)

    def _landed(self, source: Replica, tier: str, key: str, digest: bytes) -> None:
        """A copy on a local tier is durable: one commit says so, and older versions there go."""
        replica = Replica(source.ino, source.version, tier, ReplicaState.DURABLE, key, source.size, digest)
        with self.catalog.transaction():
            attributes = self.catalog.attributes(source.ino)
            if attributes is None or attributes.version != source.version:
                self.files.discard(tier, key)
                return
            for old in self.catalog.replicas(source.ino):
                if old.tier == tier and old.version == source.version:
                    self.files.forget_replica(old)
            closed = self.catalog.queued_at(source.ino, source.version, tier)
            self.catalog.put_replica(replica)
            self.catalog.unqueue_drain(source.ino, source.version, tier)
            self.held.supersede(replica, closed)

    async def _settle_in_place(self, source: Replica) -> None:
        """The ack tier itself is persistent: durable after one fsync of the replica."""
        store = self.stores[source.tier]
        describe = describer(beside(self.catalog, source.ino, source.version))

        def sync() -> None:
            fd = store.open(source.key, write=False)
            try:
                if describe is not None:
                    store.describe(fd, source.key, describe, source.digest)
                os.fsync(fd)
            finally:
                os.close(fd)

        try:
            patience = self.lanes[source.tier].patience + source.size / SLOWEST
            await self.lanes[source.tier].run(sync, "fsync", patience=patience)
        except OSError as error:
            raise TierError.of(source.tier, "fsync", error) from error
        reach(At.SETTLE_SYNCED)
        now = self.catalog.replica(source.ino, source.version, source.tier)
        if now == source:
            durable = source._replace(state=ReplicaState.DURABLE)
            with self.catalog.transaction():
                closed = self.catalog.queued_at(source.ino, source.version, source.tier)
                self.catalog.put_replica(durable)
                self.catalog.unqueue_drain(source.ino, source.version, source.tier)
                self.held.supersede(durable, closed)
            reach(At.SETTLE_RECORDED)
            inode = self.files.inodes.get(source.ino)
            if inode is not None and inode.replica == source:
                inode.replica = self.catalog.replica(source.ino, source.version, source.tier) or inode.replica

    async def _on_archive(self, work: Callable[[], T], beat: Beat | None = None) -> T:
        """What changes names there: never begun again while an earlier try may still come through, however long that
        takes, and so never given up."""
        complain = partial(self.outages.failed, self.archive_name)
        return await self.lanes[self.archive_name].endure(work, "publish", complain, beat or Beat())

    async def _replay(self) -> None:
        first = True
        self.outages.begin(self.archive_name, REPLAY)
        try:
            if not self._swept:
                self.catalog.commit()
                await self._on_archive(self.archive.sweep)
                self._swept = True
            if self._archive_full:
                await self._discard_ready([key for key in self.ready if not self._awaited(*key)])
            while not self.paused and (first or not self.outages.wait(self.archive_name)):
                first = False
                self._deleted = False
                batch = self.archive.next_batch(BATCH, self.ready, full=self._archive_full)
                if batch is None:
                    break
                try:
                    beat = Beat()
                    await self._on_archive(partial(self.archive.execute, batch, beat), beat)
                except ContentMissing as error:
                    self.archive.abandon(batch)
                    await self._discard_ready([key for key in self.ready if key[0] in batch.stored])
                    if not isinstance(error, PartsLost):
                        raise error
                    log.info("%s", error)
                    continue
                self.archive.commit(batch)
                for replica in batch.stored.values():
                    self.ready.pop((replica.ino, replica.version), None)
                if batch.ahead:
                    self.outages.hasten()  # there is room now
                else:
                    self.outages.recovered(self.archive_name)
                self._advanced()
                await self._discard_ready([key for key in self.ready if not self._awaited(*key)])
                if not self.hurry and not batch.split:
                    await trio.sleep(REPLAY_SECONDS)
        except TierError as error:
            self.outages.failed(self.archive_name, error)
        except OSError as error:
            self.outages.failed(self.archive_name, TierError.of(self.archive_name, "publish", error))
        except CatalogError as error:
            self.outages.failed(
                self.archive_name, TierError(f"tier {self.archive_name} waits for the catalog: {error}")
            )
        finally:
            self.outages.end(self.archive_name, REPLAY)
            self._replaying = False
            if self.archive_name in self.outages:
                self._kick.set()

    def _awaited(self, ino: int, version: int) -> bool:
        """Whether content that was copied to the archive still has its turn before it."""
        attributes = self.catalog.attributes(ino)
        return attributes is not None and attributes.nlink > 0 and attributes.version == version

    async def _discard_ready(self, keys: list[tuple[int, int]]) -> None:
        """Content that was copied to the archive and is not wanted there any more."""
        dropped = [self.ready.pop(key).temp for key in keys]

        def discard() -> None:
            for temp in dropped:
                self.tree.discard(temp)

        if dropped:
            await self.tidy(self.archive_name, discard)
