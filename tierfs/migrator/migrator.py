"""The migrator: drains files down, follows on the archive; `evict` drops clean replicas, `recall` brings cold ones up.

One task decides (`run`), from pure plans; copies run in threads under a limit. Nothing here is on the
path of a write or close.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field

import trio

from tierfs.catalog import Catalog
from tierfs.errors import CatalogError, ContentMissing, DigestMismatch, SourceChanged, TierError
from tierfs.fs.open_files import OpenFiles
from tierfs.migrator.archive import Archive, Ready
from tierfs.migrator.evict import Evictor
from tierfs.migrator.flush import Flusher
from tierfs.migrator.mapped import MappedFiles
from tierfs.migrator.outage import Outages
from tierfs.migrator.pace import Pace
from tierfs.migrator.queue import DrainQueue
from tierfs.migrator.recall import Recaller
from tierfs.migrator.throttle import Throttle
from tierfs.migrator.transfer import Copied, Early, Transfer, copy_to_store, remove_files
from tierfs.plan.drain import SMALL, plan_drain
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.tree import TreeStore
from tierfs.types import Replica, ReplicaState

log = logging.getLogger("tierfs.migrator")

BATCH = 512
BREATH = 0.02
"""Seconds between two looks at the queues, so that a burst of closes is planned once, not once each."""
SYNC_SECONDS = 2.0
EARLY = 64 << 20
"""A file is copied while it is still being written once it has this many bytes: smaller ones are closed soon."""
EARLY_STEP = 16 << 20
"""New bytes that make another step of such a copy worth a thread's while."""
WATCH_SECONDS, WATCH_WRITERS_SECONDS = 0.25, 0.1
"""Between two looks at the files open for writing; with passthrough nobody tells the daemon that they grow."""
REPLAY_SECONDS = 0.2
"""Between two batches of the archive, so that they grow large; a flush does not wait for it."""


@dataclass
class Migrator:
    catalog: Catalog
    policy: Policy
    stores: dict[str, ReplicaStore]
    tree: TreeStore
    files: OpenFiles = field(init=False)
    paused: bool = False
    hurry: int = 0
    """How many flushes wait; while any does, small files do not settle first."""
    emergency: int = 0
    """How many of them cannot wait for the archive: the nearest persistent tier comes first."""
    running: dict[tuple[int, int, str], Transfer] = field(default_factory=dict)
    early: dict[tuple[int, int, str], Early] = field(default_factory=dict)
    """Copies of versions that are, or a moment ago were, open for writing; no thread is in them unless ``running``
    says so."""
    ready: dict[tuple[int, int], Ready] = field(default_factory=dict)
    doomed: list[tuple[str, str]] = field(default_factory=list)
    _kick: trio.Event = field(default_factory=trio.Event)
    _progress: trio.Event = field(default_factory=trio.Event)
    _quiet: list[int] = field(default_factory=list)
    """Inodes of which no copy may start: somebody waits in `quiesce` until none runs."""
    _replaying: bool = False
    _swept: bool = False
    """What former daemons left in the archive's temporary area is gone."""
    _removing: bool = False

    def __post_init__(self) -> None:
        self.archive_name = self.policy.tiers[-1].name
        self.archive = Archive(self.catalog, self.tree, self.archive_name)
        self.outages = Outages()
        self.last_errors = self.outages.last_errors
        self.mapped = MappedFiles(self)
        self.throttle = Throttle(self.policy.limits.drain)
        self.pace = Pace(self.throttle)
        self.queue = DrainQueue(self)
        self.flusher = Flusher(self)
        self.durable, self.flush = self.flusher.durable, self.flusher.flush
        self.wait_durable = self.flusher.wait_durable
        self._way_stations = any(tier.persistent for tier in self.policy.tiers[:-1])
        """Persistent tiers above the archive."""
        self.recaller = Recaller(self)
        self.evictor = Evictor(self)

    # signals from the filesystem

    def changed(self) -> None:
        """Something was closed, renamed or removed."""
        self.pace.changes += 1
        self._kick.set()

    def discard(self, tier: str, key: str) -> None:
        """These bytes are no longer in the catalog: remove them soon."""
        self.doomed.append((tier, key))
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
        self._progress.set()
        self._progress = trio.Event()
        self._kick.set()

    async def quiesce(self, ino: int) -> None:
        """Stop every copy that reads from ``ino`` and wait until its threads are out of the file.

        A copy maps its source only while the file has no writer, and SIGBUS needs a file that is cut off: so whoever
        is about to truncate or to let a writer in calls this first and goes on to do it without giving way to other
        tasks. That every truncation comes as a request, also with passthrough, makes this enough in both modes."""
        self._quiet.append(ino)
        try:
            while mine := [transfer for key, transfer in self.running.items() if key[0] == ino]:
                for transfer in mine:
                    transfer.cancel.set()
                await self._progress.wait()
        finally:
            self._quiet.remove(ino)

    # the loop

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.recaller.run)
            nursery.start_soon(self.pace.run)
            nursery.start_soon(self._sync_now_and_then)
            nursery.start_soon(self.queue.watch)
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
        while True:
            await trio.sleep(SYNC_SECONDS)
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
        if self.doomed and not self._removing:
            self._removing = True
            nursery.start_soon(self.remove_discarded)
        wake = 1.0 if self.mapped.any else 5.0
        self.mapped.renew()
        if not self.paused:
            wake = min(wake, self._start_drains(nursery))
            if not self._replaying and not self.outages.wait(self.archive_name):
                self._replaying = True
                nursery.start_soon(self._replay)
        self._drop_early(nursery)
        for tier, error in self.evictor.run():
            self.outages.failed(tier, TierError.of(tier, "statfs", error))
        now = trio.current_time()
        for outage in self.outages.values():
            wake = min(wake, max(0.05, outage.retry_at - now))
        return wake

    # draining

    def _start_drains(self, nursery: trio.Nursery) -> float:
        slots = self.policy.limits.transfers - len(self.running)
        if slots <= 0:
            return 5.0
        now = time.time_ns()
        small = sum(transfer.size < SMALL for transfer in self.running.values())
        queue = [
            p
            for p in self.queue.pending()
            if p.ino not in self._quiet and (self.hurry or not self.mapped.waits(p.ino))
        ]
        plan = plan_drain(
            queue,
            self.running.keys(),
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
            self.running[pending.ino, pending.version, pending.tier] = transfer
            nursery.start_soon(self._drain, transfer)
        return 5.0 if plan.wake_ns is None else max(0.01, (plan.wake_ns - now) / 1e9)

    async def _drain(self, transfer: Transfer) -> None:
        source = self._source(transfer.ino, transfer.version)
        try:
            await self._copy_down(transfer, source)
        except SourceChanged:
            pass
        except DigestMismatch as error:
            log.info("%s; copying again", error)
        except TierError as error:
            if source is not None and self._stands(source):
                self.outages.failed(transfer.tier, error)
        except (CatalogError, OSError) as error:
            unrecorded = TierError(f"a copy on tier {transfer.tier} could not be recorded: {error}")
            self.outages.failed(transfer.tier, unrecorded)
        finally:
            del self.running[transfer.ino, transfer.version, transfer.tier]
            self._advanced()

    def _source(self, ino: int, version: int) -> Replica | None:
        """The fastest local replica of a closed version; None when it is gone or superseded."""
        found = {r.tier: r for r in self.catalog.replicas(ino) if r.version == version}
        for tier in self.stores:
            if tier in found and found[tier].state is not ReplicaState.OPEN:
                return found[tier]
        return None

    def _stands(self, source: Replica) -> bool:
        """Whether the catalog still names this file. A file that was evicted, superseded or deleted meanwhile is
        removed: that a step does not find it is no fault of its tier, and what is still wanted comes from another
        replica."""
        now = self.catalog.replica(source.ino, source.version, source.tier)
        return now is not None and now.key == source.key

    async def _copy_down(self, transfer: Transfer, source: Replica | None) -> None:
        early = self.early.pop((transfer.ino, transfer.version, transfer.tier), None)
        if early is not None and (source is None or early.key != source.key):
            await trio.to_thread.run_sync(early.discard)
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
                    await trio.to_thread.run_sync(early.discard)
                return
            stable = False
            self.mapped.copied(source)
        to_archive = transfer.tier == self.archive_name
        target = self._target(transfer.tier)
        key = self.files.new_key(transfer.ino)

        def copy() -> Copied:
            store = self.stores[source.tier]
            done = copy_to_store(source, store, target, key, transfer, self.throttle, stable=stable, early=early)
            if to_archive:
                done.temp.close()
            return done

        copied = await trio.to_thread.run_sync(copy)
        self.outages.recovered(transfer.tier)
        attributes = self.catalog.attributes(transfer.ino)
        if attributes is None or attributes.version != transfer.version:
            await trio.to_thread.run_sync(copied.temp.discard)
            return
        if to_archive:
            self.recaller.remember(source, copied.chunks)
            self.ready[transfer.ino, transfer.version] = Ready(copied.temp.name, source.size, copied.digest)
        else:
            store = self.stores[transfer.tier]
            await trio.to_thread.run_sync(store.publish, copied.temp, key)
            self._landed(source, transfer.tier, key, copied.digest)

    def _target(self, tier: str) -> ReplicaStore | TreeStore:
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
            if not self.paused:
                self._start_early(nursery)
            pause = WATCH_WRITERS_SECONDS if writers else WATCH_SECONDS
            await trio.sleep(max(pause, 100 * (time.perf_counter() - began)))

    def _start_early(self, nursery: trio.Nursery) -> None:
        """Copy from large files open for writing, with the slots that closed ones leave."""
        for inode in self.files.inodes.values():
            source = inode.replica
            if not inode.writers or source.state is not ReplicaState.OPEN:
                continue
            status = os.fstat(inode.fd)
            size = min(status.st_size, 512 * status.st_blocks)
            if size < EARLY or source.ino in self.files.orphans or source.ino in self._quiet:
                continue
            for tier in self.files.copy_targets(source.tier, inode.rule):
                key = (source.ino, source.version, tier)
                early = self.early.get(key)
                due = size - (early.copy.front if early else 0) >= EARLY_STEP
                if not due or tier == source.tier or key in self.running or self.outages.wait(tier):
                    continue
                if len(self.running) >= self.policy.limits.transfers:
                    return
                if tier == self.archive_name and not self._archive_may():
                    continue
                transfer = Transfer(source.ino, source.version, tier, size)
                self.running[key] = transfer
                nursery.start_soon(self._advance_early, transfer, source)

    def _archive_may(self) -> bool:
        """Whether another copy may go to the archive: the last slot is for the tiers above, see `plan_drain`."""
        far = sum(tier == self.archive_name for _, _, tier in self.running)
        return not self._way_stations or far < max(1, self.policy.limits.transfers - 1)

    async def _advance_early(self, transfer: Transfer, source: Replica) -> None:
        """One step of a copy ahead of the close. Cancelled, it leaves what it has for the next step."""
        key = (transfer.ino, transfer.version, transfer.tier)
        try:
            early = self.early.get(key)
            if early is None:
                temporary = self.files.new_key(transfer.ino)
                early = await trio.to_thread.run_sync(Early.begin, source, self._target(transfer.tier), temporary)
                self.early[key] = early
            store, tier, advance = self.stores[source.tier], transfer.tier, early.advance
            if not await trio.to_thread.run_sync(advance, source, store, tier, transfer, self.throttle):
                await self._discard_early(key)
            self.outages.recovered(tier)
        except SourceChanged:
            pass
        except TierError as error:
            await self._discard_early(key)
            if self._stands(source):
                self.outages.failed(transfer.tier, error)
        finally:
            del self.running[key]
            self._advanced()

    def _is_current(self, ino: int, version: int, _tier: str) -> bool:
        """Whether this version is, or once closed will be, wanted anywhere."""
        attributes = self.catalog.attributes(ino)
        return attributes is not None and attributes.nlink > 0 and attributes.version == version

    async def _discard_early(self, key: tuple[int, int, str]) -> None:
        early = self.early.pop(key, None)
        if early is not None:
            await trio.to_thread.run_sync(early.discard)

    def _drop_early(self, nursery: trio.Nursery) -> None:
        """Copies of what was deleted or replaced before it was closed, before its turn came, or during it."""
        for key, transfer in self.running.items():
            if key not in self.early and not self._is_current(*key):
                transfer.cancel.set()
        for key in [key for key in self.early if not self._is_current(*key)]:
            if key in self.running:
                self.running[key].cancel.set()
            else:
                nursery.start_soon(trio.to_thread.run_sync, self.early.pop(key).discard)

    def _landed(self, source: Replica, tier: str, key: str, digest: bytes) -> None:
        """A copy on a local tier is durable: one commit says so, and older versions there go."""
        replica = Replica(source.ino, source.version, tier, ReplicaState.DURABLE, key, source.size, digest)
        with self.catalog.transaction():
            attributes = self.catalog.attributes(source.ino)
            if attributes is None or attributes.version != source.version:
                self.files.discard(tier, key)
                return
            for old in self.catalog.replicas(source.ino):
                if old.tier == tier:
                    self.files.forget_replica(old)
            self.catalog.put_replica(replica)
            self.catalog.unqueue_drain(source.ino, source.version, tier)

    async def _settle_in_place(self, source: Replica) -> None:
        """The ack tier itself is persistent: durable after one fsync of the replica."""
        store = self.stores[source.tier]

        def sync() -> None:
            fd = store.open(source.key, write=False)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

        try:
            await trio.to_thread.run_sync(sync)
        except OSError as error:
            raise TierError.of(source.tier, "fsync", error) from error
        now = self.catalog.replica(source.ino, source.version, source.tier)
        if now == source:
            with self.catalog.transaction():
                self.catalog.put_replica(
                    Replica(
                        source.ino,
                        source.version,
                        source.tier,
                        ReplicaState.DURABLE,
                        source.key,
                        source.size,
                        source.digest,
                    )
                )
                self.catalog.unqueue_drain(source.ino, source.version, source.tier)
            inode = self.files.inodes.get(source.ino)
            if inode is not None and inode.replica == source:
                inode.replica = self.catalog.replica(source.ino, source.version, source.tier) or inode.replica

    async def _replay(self) -> None:
        try:
            if not self._swept:
                self.catalog.commit()
                await trio.to_thread.run_sync(self.archive.sweep)
                self._swept = True
            while not self.paused and not self.outages.wait(self.archive_name):
                batch = self.archive.next_batch(BATCH, self.ready)
                if batch is None:
                    break
                try:
                    await trio.to_thread.run_sync(self.archive.execute, batch)
                except ContentMissing as error:
                    self.archive.abandon(batch)
                    await self._discard_ready([key for key in self.ready if key[0] in batch.stored])
                    raise error
                self.archive.commit(batch)
                for replica in batch.stored.values():
                    self.ready.pop((replica.ino, replica.version), None)
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
            self._replaying = False

    def _awaited(self, ino: int, version: int) -> bool:
        """Whether content that was copied to the archive still has its turn before it."""
        attributes = self.catalog.attributes(ino)
        return attributes is not None and attributes.version == version

    async def _discard_ready(self, keys: list[tuple[int, int]]) -> None:
        """Content that was copied to the archive and is not wanted there any more."""
        dropped = [self.ready.pop(key).temp for key in keys]

        def discard() -> None:
            for temp in dropped:
                self.tree.discard(temp)

        if dropped:
            await trio.to_thread.run_sync(discard)

    # removing

    async def remove_discarded(self) -> None:
        """Remove the bytes that were discarded. Not to be cancelled: the catalog has forgotten these files already.
        Called once more at the very end, when nothing discards any more."""
        with trio.CancelScope(shield=True):
            await self._remove()

    async def _remove(self) -> None:
        try:
            while self.doomed:
                batch, self.doomed = self.doomed, []
                kept = [entry for entry in batch if self.policy.tier(entry[0]).persistent]
                await self._remove_files([entry for entry in batch if entry not in kept])
                if not kept:
                    continue
                # After a power cut the catalog must not name bytes of which only the removal came through.
                try:
                    await self.sync()
                except (CatalogError, OSError):  # said by `_sync_now_and_then`
                    self.doomed += kept
                    await trio.sleep(SYNC_SECONDS)
                    break
                await self._remove_files(kept)
        finally:
            self._removing = False
            self._advanced()

    async def _remove_files(self, files: list[tuple[str, str]]) -> None:
        if files:
            for tier, key, error in await trio.to_thread.run_sync(remove_files, self.stores, files):
                log.info("tier %s: %s stays behind until the next mount: %s", tier, key, error)
