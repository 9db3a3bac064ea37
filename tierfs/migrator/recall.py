"""Recall: bytes of a cold file come up to a local tier, as a whole (`Recaller.recall`) before an open returns, or while
the file is open already (`Recaller.fill`, see `gradual`). Where no tier has room for them they are read where they
stand (see `direct`). In no way does anybody see a byte that was not checked.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.errors import DigestMismatch, FsError, TierError
from tierfs.fs.lanes import Lanes
from tierfs.fs.mover import FULL
from tierfs.fs.open_files import GRADUAL, OpenFiles
from tierfs.fs.ports import Filling
from tierfs.migrator.archive import Archive
from tierfs.migrator.describe import beside
from tierfs.migrator.direct import Direct, Kept, placeholder
from tierfs.migrator.evict import Evictor
from tierfs.migrator.gradual import Recall
from tierfs.migrator.outage import Outages
from tierfs.migrator.scrub import Scrubber
from tierfs.migrator.steps import Path
from tierfs.migrator.transfer import recall_file
from tierfs.migrator.tries import Tries
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.beside import Describe, describer
from tierfs.tiers.content import Content, opened
from tierfs.tiers.copy import CHUNK, DIGEST_SIZE, tree_digest
from tierfs.tiers.kinds import Tree
from tierfs.types import Attributes, Replica, ReplicaState

log = logging.getLogger("tierfs.recall")

THREADS = 24
"""All recalls from one tier; threads of their own, because a tier that hangs keeps them."""
CHUNKS_LIMIT = 1 << 20
"""Longer lists of chunk digests (files above 256 GiB) are not kept: a transaction must fit the catalog's journal."""


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    policy: Policy
    stores: dict[str, ReplicaStore]
    tree: Tree
    files: OpenFiles
    archive: Archive
    archive_name: str
    outages: Outages
    lanes: Lanes
    evictor: Evictor
    scrubber: Scrubber

    async def remove_discarded(self) -> None: ...


class Recaller:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._limiters = {tier.name: trio.CapacityLimiter(THREADS) for tier in host.policy.tiers}
        self._patience = host.policy.limits.read_timeout
        self._nursery: trio.Nursery | None = None
        self._waiting: list[Recall] = []
        self._kept = Kept()
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Serve `fill` until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for recall in self._waiting:
                nursery.start_soon(recall.run)
            self._waiting.clear()
            await trio.sleep_forever()

    # whole

    async def recall(
        self, attributes: Attributes, tier: str, avoid: Collection[str] = (), *, modest: bool = False
    ) -> Replica:
        """Bring the current version to ``tier``, or a slower local one when that is full; from and to tiers other than
        those to ``avoid``. FsError: ENOENT when the file is deleted meanwhile, EIO when no replica of it can be read,
        ENOSPC when there is no room for it, with ``modest`` not even below what the policy plans for the tiers.
        """
        tries = Tries(self._patience, f"inode {attributes.ino}: no replica of version {attributes.version}")
        candidates = self._candidates(tier, avoid)
        while True:
            while sources := [r for r in self._sources(attributes) if r.tier not in avoid and tries.may(r)]:
                found = await self._try(sources, candidates, attributes, tries, modest=modest)
                if found is not None:
                    return found
                if self._deleted(attributes.ino):
                    raise FsError(errno.ENOENT)
            if self._deleted(attributes.ino):
                raise FsError(errno.ENOENT)
            if not await tries.again():
                break
        if tries.passing:
            log.error("%s; given up", tries.why)
        raise FsError(tries.code, tries.why)

    async def _try(
        self, sources: list[Replica], candidates: list[str], attributes: Attributes, tries: Tries, *, modest: bool
    ) -> Replica | None:
        """Recall from the first of ``sources``. None when that failed, which ``tries`` knows, or when it is elsewhere
        by now. FsError: ENOSPC, or ENOENT when the file is deleted."""
        host, space = self._host, self._host.files.space
        source, paths = sources[0], host.archive.paths(attributes.ino)
        chosen = space.choose(candidates, source.size)
        if here := [r for r in sources if r.tier == chosen]:
            return here[0]
        if modest and not self._fits(chosen, source.size):
            if not await self._make_room(candidates, source.size):
                raise FsError(errno.ENOSPC)
            chosen = space.choose(candidates, source.size)
        try:
            try:
                replica = self._enter(await self._recall_from(source, attributes.mtime_ns, chosen))
            except TierError as error:
                if error.errno not in FULL or not await self._make_room(candidates, source.size):
                    raise
                chosen = space.choose(candidates, source.size)
                replica = self._enter(await self._recall_from(source, attributes.mtime_ns, chosen))
        except TierError as error:
            if not self._deleted(attributes.ino) and not self._moved(source, paths):
                full = error.errno in FULL and (modest or not self._fits(chosen, source.size))
                passes = tries.failed(source, error, full=full)
                if not full:
                    self._blame(source, error, passes=passes)
            return None
        if host.catalog.is_damaged(source):
            host.scrubber.right_again(source)
        return replica

    def _blame(self, source: Replica, error: TierError, *, passes: bool) -> None:
        host = self._host
        if not host.catalog.is_damaged(source):
            verdict = isinstance(error, DigestMismatch) and host.scrubber.suspect(source)
            log.log(logging.INFO if verdict or passes else logging.ERROR, "%s", error)
            host.outages.last_errors[source.tier] = str(error)

    def _deleted(self, ino: int) -> bool:
        """Whether the file lost its last name: what the tiers held of it is going, or gone."""
        attributes = self._host.catalog.attributes(ino)
        return attributes is None or attributes.nlink == 0

    def _moved(self, source: Replica, paths: list[Path]) -> bool:
        """Whether the file that a recall did not find, or found to be another, is elsewhere by now: evicted, or on the
        archive no longer at ``paths``. Then nothing is wrong with its tier."""
        host = self._host
        now = host.catalog.replica(source.ino, source.version, source.tier)
        if now is None or now.key != source.key:
            return True
        return source.tier == host.archive_name and host.archive.paths(source.ino) != paths

    def _fits(self, tier: str, size: int) -> bool:
        return self._host.files.space.fits([tier], size)

    async def _make_room(self, tiers: list[str], size: int) -> bool:
        """Evict on the first tier where that makes enough room. A read must not fail while clean copies fill a tier."""
        for tier in tiers:
            if self._evict_for(tier, size):
                await self._host.remove_discarded()
                return True
        return False

    def _evict_for(self, tier: str, size: int) -> bool:
        """Whether there is room on the tier once what was evicted is removed."""
        with contextlib.suppress(OSError):
            return self._host.evictor.could_make_room(tier, size) and self._host.evictor.make_room(tier, size)
        return False

    def _sources(self, attributes: Attributes) -> list[Replica]:
        """Replicas of the current version, fastest first; last those on tiers that fail."""
        order = [t.name for t in self._host.policy.tiers]
        host = self._host
        found = [
            r
            for r in self._host.catalog.replicas(attributes.ino)
            if r.version == attributes.version and r.state is not ReplicaState.OPEN
        ]
        return sorted(found, key=lambda r: (host.lanes[r.tier].hangs, r.tier in host.outages, order.index(r.tier)))

    def _candidates(self, tier: str, avoid: Collection[str] = ()) -> list[str]:
        """Local tiers that may take it: from ``tier`` down, none that fails unless there is no other."""
        order = [t.name for t in self._host.policy.tiers]
        usable = [name for name in self._host.stores if name not in avoid and not self._host.lanes[name].hangs]
        below = [name for name in usable if order.index(name) >= order.index(tier)]
        return below or usable or list(self._host.stores)

    async def preserve(self, replica: Replica) -> Replica:
        """A durable copy of ``replica`` in another file of its tier. Raises FsError."""
        attributes = self._host.catalog.attributes(replica.ino)
        try:
            copy = await self._recall_from(replica, attributes.mtime_ns if attributes else 0, replica.tier)
        except (TierError, DigestMismatch) as error:
            log.error("%s", error)
            raise FsError(error.errno, str(error)) from error
        return copy._replace(state=ReplicaState.DURABLE)

    async def _recall_from(self, source: Replica, mtime_ns: int, tier: str) -> Replica:
        """Copy to ``tier``; the catalog is not told."""
        host = self._host
        key = host.files.new_key(source.ino)
        cancel = threading.Event()
        token = trio.lowlevel.current_trio_token()
        scope = trio.CancelScope(deadline=trio.current_time() + self._patience)

        def extend() -> None:
            scope.deadline = trio.current_time() + self._patience

        def copy() -> bytes:
            return recall_file(
                opener,
                source,
                host.stores[tier],
                key,
                mtime_ns,
                lambda size: token.run_sync_soon(extend),
                cancel,
                describe,
            )

        describe = self._describe(source, tier)
        opener = self.opener(source)
        digest = None
        try:
            with scope:
                limiter = self._limiters[source.tier]
                digest = await trio.to_thread.run_sync(copy, abandon_on_cancel=True, limiter=limiter)
        finally:
            if digest is None:
                # The thread may be about to publish, or just have: either it or this removes the file.
                cancel.set()
                host.files.discard(tier, key)
        if digest is None:
            raise TierError(f"tier {source.tier}: inode {source.ino}: nothing came for {self._patience:g} s")
        return Replica(source.ino, source.version, tier, ReplicaState.WRITTEN, key, source.size, digest)

    def _describe(self, source: Replica, tier: str) -> Describe | None:
        """What to keep beside a replica that is made on ``tier``."""
        if not self._host.policy.tier(tier).persistent:
            return None
        return describer(beside(self._host.catalog, source.ino, source.version))

    def _enter(self, replica: Replica) -> Replica:
        """These bytes are complete, verified and, on a persistent tier, synced: say so in the catalog. FsError ENOENT,
        and the bytes go again, when the file is another version, or deleted and nobody can open it any more (its row
        may be there still: its delete is held)."""
        attributes = self._host.catalog.attributes(replica.ino)
        forgotten = self._deleted(replica.ino) and replica.ino not in self._host.files.orphans
        if attributes is None or attributes.version != replica.version or forgotten:
            self._host.files.discard(replica.tier, replica.key)
            raise FsError(errno.ENOENT)
        reach(At.RECALL_NAMED)
        if self._host.policy.tier(replica.tier).persistent:
            replica = replica._replace(state=ReplicaState.DURABLE)
        with self._host.catalog.transaction():
            self._host.catalog.put_replica(replica)
        reach(At.RECALL_RECORDED)
        return replica

    def opener(self, source: Replica) -> Callable[[], Content]:
        """Opens the replica for reading, in a thread, where the catalog has it now. Raises OSError, TierError."""
        if source.tier != self._host.archive_name:
            return opened(partial(self._host.stores[source.tier].open, source.key, write=False))
        return partial(self._host.tree.content_first, self._host.archive.paths(source.ino), source.size)

    async def warmup(self, attributes: Attributes) -> bool:
        """Recall ahead of need; False when the bytes are on a local tier already, the file is open, or it is deleted
        before they are here."""
        files, ino = self._host.files, attributes.ino
        if ino in files.inodes or files.local_replica(attributes) is not None:
            return False
        async with files.locked(ino):
            now = self._host.catalog.attributes(ino)
            if now is None or now.nlink == 0 or ino in files.inodes or files.local_replica(now) is not None:
                return False
            _, rule = files.rule_of(self._host.catalog.path_of(ino))
            try:
                await self.recall(now, rule.ack)
            except FsError:
                if not self._deleted(ino):
                    raise
        return not self._deleted(ino)

    # gradual

    def remember(self, source: Replica, chunks: list[bytes]) -> None:
        """Keep the digests of the chunks of what goes to the archive, so that it can come back bit by bit."""
        digests = b"".join(chunks)
        if source.size > GRADUAL and len(digests) <= CHUNKS_LIMIT:
            with self._host.catalog.transaction():
                self._host.catalog.put_chunks(source.ino, source.version, digests)

    def fill(self, attributes: Attributes, tier: str) -> Filling:
        """Begin to recall the current version, or, where it has no room, to read it where it stands. Raises OSError,
        TierError when there is no file to be filled."""
        host = self._host
        sources = self._sources(attributes)
        source = sources[0] if sources else None
        candidates, size = self._candidates(tier), attributes.size
        chosen = host.files.space.choose(candidates, size)
        if not self._fits(chosen, size):
            chosen = next((name for name in candidates if self._evict_for(name, size)), "")
        wanted = Replica(
            attributes.ino,
            attributes.version,
            chosen or candidates[0],
            ReplicaState.WRITTEN,
            host.files.new_key(attributes.ino),
            size,
            None,
        )
        if chosen or source is None:
            try:
                return self._fill(source, wanted, attributes.mtime_ns)
            except (OSError, TierError) as error:
                if source is None or error.errno not in FULL:
                    raise
        return self._direct(source, wanted, placeholder(size))

    def _fill(self, source: Replica | None, replica: Replica, mtime_ns: int) -> Recall:
        host, store = self._host, self._host.stores[replica.tier]
        temp = store.temporary(replica.key)
        try:
            os.ftruncate(temp.fd, replica.size)
        except BaseException:
            temp.discard()
            raise
        host.files.space.reserve(replica.tier, replica.size)
        reach(At.FILL_BEGUN)
        recall = Recall(
            source=source,
            replica=replica,
            mtime_ns=mtime_ns,
            store=store,
            temp=temp,
            chunks=self._chunks(source) if source else None,
            describe=self._describe(source, replica.tier) if source else None,
            host=self,
            limiter=self._limiters[source.tier if source else replica.tier],
            patience=self._patience,
        )
        if self._nursery is None:
            self._waiting.append(recall)
        else:
            self._nursery.start_soon(recall.run)
        return recall

    def _direct(self, source: Replica, replica: Replica, fd: int) -> Direct:
        log.info("no tier has room for inode %d: it is read from tier %s", source.ino, source.tier)
        return Direct(
            source=source,
            replica=replica,
            fd=fd,
            chunks=self._chunks(source),
            host=self,
            limiter=self._limiters[source.tier],
            patience=self._patience,
            kept=self._kept,
            number=next(self._numbers),
        )

    def crowded(self, recall: Recall, source: Replica) -> Filling:
        empty = placeholder(source.size)
        os.dup2(empty, recall.fd, inheritable=False)
        os.close(empty)
        direct = self._direct(source, recall.replica, recall.fd)
        self._host.files.refilled(recall, direct)
        return direct

    async def whole(self, replica: Replica) -> tuple[Replica, int]:
        attributes = self._host.catalog.attributes(replica.ino)
        if attributes is None:
            raise FsError(errno.ENOENT)
        found = await self.recall(attributes, replica.tier)
        return found, await self._host.files.local.open(found, elsewhere=False)

    def empty(self, replica: Replica) -> int:
        return self._host.files.local.create(replica.tier, replica.key)

    def brought(self, direct: Direct, replica: Replica) -> None:
        self._host.files.filled(direct, replica)

    def locate(self, source: Replica) -> Callable[[], Content]:
        return self.opener(source)

    def arrived(self, recall: Recall, replica: Replica) -> None:
        with contextlib.suppress(FsError):
            self._host.files.filled(recall, self._enter(replica))
        if recall.source is not None and self._host.catalog.is_damaged(recall.source):
            self._host.scrubber.right_again(recall.source)

    def settled(self, replica: Replica) -> None:
        self._host.files.space.reserve(replica.tier, -replica.size)

    def superfluous(self, replica: Replica) -> None:
        self._host.files.discard(replica.tier, replica.key)

    def complain(self, replica: Replica, tier: str, what: str, *, damaged: bool = False) -> None:
        source = self._host.catalog.replica(replica.ino, replica.version, tier) if damaged else None
        if source is not None:
            if self._host.catalog.is_damaged(source):
                return
            self._host.scrubber.suspect(source)
        path = b"/".join(self._host.catalog.path_of(replica.ino) or ()).decode(errors="replace")
        text = f"tier {tier}: {path or f'inode {replica.ino}'}: {what}"
        log.error("%s", text)
        self._host.outages.last_errors[tier] = text

    def _chunks(self, source: Replica) -> list[bytes] | None:
        """The chunks' digests, if there are those that make the file's."""
        joined = self._host.catalog.chunks(source.ino, source.version)
        if joined is None:
            return None
        chunks = [joined[at : at + DIGEST_SIZE] for at in range(0, len(joined), DIGEST_SIZE)]
        return chunks if len(chunks) == -(-source.size // CHUNK) and tree_digest(chunks) == source.digest else None
