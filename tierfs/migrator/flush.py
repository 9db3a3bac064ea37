"""Waiting for durability: of one version, of a subtree, of everything before the process ends."""

from __future__ import annotations

import errno
import itertools
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.errors import FsError, NotDurableInTime, UsageError
from tierfs.fs.open_files import OpenFiles
from tierfs.migrator.archive import Archive
from tierfs.migrator.held import HeldDeletes
from tierfs.migrator.outage import Outages
from tierfs.migrator.queue import DrainQueue
from tierfs.policy.model import Policy
from tierfs.types import Attributes, Ino, ReplicaState

FLUSH_LOOK, FLUSH_BREATH = 128, 0.05
"""Files, from the front of the queue, that a flush looks at to see how far the drains are, and seconds between."""
SHOWN = 100
"""Missing files that the message names; the error's details list more."""
LISTED_BYTES = 256 << 10
"""Bytes of paths in those details: they must fit a control message."""


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    policy: Policy
    files: OpenFiles
    archive: Archive
    archive_name: str
    held: HeldDeletes
    outages: Outages
    queue: DrainQueue
    paused: bool
    hurry: int
    emergency: int

    def kick(self) -> None: ...
    def progress(self) -> trio.Event: ...
    async def sync(self) -> None: ...


class Flusher:
    def __init__(self, host: Host) -> None:
        self._host = host

    def durable(self, ino: int, version: int, tier: str, *, below: bool = False) -> bool:
        """A verified, synced replica of this version (or a newer one) stands on ``tier`` or below it;
        ``below`` leaves the tier itself out."""
        tiers = self._host.policy.tiers
        names = [t.name for t in tiers]
        accepted = {t.name for t in tiers[names.index(tier) + below :] if t.persistent}
        return any(
            r.version >= version and r.state is ReplicaState.DURABLE and r.tier in accepted
            for r in self._host.catalog.replicas(ino)
        )

    async def wait_durable(self, ino: int, version: int, tier: str) -> None:
        """Returns when the version is durable at ``tier``, or when the file is gone."""
        host = self._host
        host.hurry += 1
        host.queue.awaited[ino] += 1
        host.kick()
        try:
            while not self.durable(ino, version, tier):
                attributes = host.catalog.attributes(ino)
                if attributes is None or attributes.nlink == 0:
                    return
                if self.is_lost(attributes):
                    raise FsError(errno.EIO, "its bytes are on no tier any more")
                host.held.hasten(awaited=True)
                with trio.move_on_after(1):
                    await host.progress().wait()
            host.held.vouch(ino, version)
            await host.sync()
        finally:
            host.hurry -= 1
            host.queue.awaited -= Counter([ino])

    async def wait_settled(self, tier: str) -> None:
        """Returns when nothing that was done on the mount until now can be undone by a loss above ``tier``: everything
        closed is durable there or below. On the archive it shows, too."""
        host = self._host
        last = host.catalog.last_place()
        host.hurry += 1
        host.kick()
        try:
            while host.held.frontier(tier) <= last:
                host.held.hasten(awaited=True)
                with trio.move_on_after(1):
                    await host.progress().wait()
            await host.sync()
        finally:
            host.hurry -= 1

    async def flush(
        self,
        top: Ino,
        tier: str,
        seconds: float,
        progress: Callable[[int, int], object] | None = None,
        *,
        emergency: bool = False,
    ) -> tuple[int, int, list[str]]:
        """Everything at or below ``top`` durable at ``tier``: (files, bytes, lost). NotDurableInTime lists the rest.

        ``lost`` are the paths of files whose bytes a reboot took, which nothing makes durable any more: not waited for.
        ``emergency``: whatever can be done in time, so the nearest persistent tier comes first.

        Files whose rule ends above ``tier`` count once they are durable where it ends; those that stay in memory do
        not count. UsageError when ``top`` itself is such a file.
        """
        host = self._host
        aims = {a.ino: host.files.copies.reachable(a.ino, tier) for a in host.catalog.subtree(top)}
        if aims.get(top, tier) != tier:
            raise UsageError(
                f"{self.path(top)} stays on {aims[top] or 'memory'}: its rule does not drain it to {tier}"
            )
        wanted = {ino: aim for ino, aim in aims.items() if aim is not None}
        for ino in wanted:
            inode = host.files.inodes.get(ino)
            if inode is not None and inode.writers:
                host.files.take_snapshot(inode)
        found = {a.ino: a for a in host.catalog.subtree(top) if a.ino in wanted}
        total = sum(a.size for a in found.values())
        lost: list[Ino] = []
        missing = dict(found)
        last = host.catalog.last_place()
        host.hurry += 1
        host.emergency += emergency
        host.outages.hasten()  # whoever flushes may just have made room
        host.kick()
        try:
            with trio.move_on_after(seconds) as scope:
                left = total
                while True:
                    moved = host.progress()  # that of before the look: what comes during the pause counts
                    for ino, attributes in list(itertools.islice(missing.items(), FLUSH_LOOK)):
                        if (gone := self.is_lost(attributes)) or self._flushed(attributes, wanted[ino]):
                            if gone:
                                lost.append(ino)
                            del missing[ino]
                            left -= attributes.size
                    if progress:
                        progress(total - left, total)
                    host.held.hasten(awaited=True)
                    if not missing and host.held.frontier(tier) > last:
                        await host.sync()
                        break
                    await trio.sleep(FLUSH_BREATH)
                    if len(missing) <= FLUSH_LOOK:
                        with trio.move_on_after(1):
                            await moved.wait()
            if scope.cancelled_caught:
                left_over = [a for i, a in missing.items() if not self._flushed(a, wanted[i])]
                raise self._too_late(left_over, tier, seconds)
        finally:
            host.hurry -= 1
            host.emergency -= emergency
        return len(found), total, [self.path(ino) for ino in lost]

    def _too_late(self, missing: list[Attributes], tier: str, seconds: float) -> NotDurableInTime:
        host = self._host
        reasons = ["drains are paused"] if host.paused else []
        reasons += [f"{name}: {outage.error}" for name, outage in host.outages.items()]
        why = "; ".join(reasons)
        shown = []
        for attributes in missing[:SHOWN]:
            on = self.safe_on(attributes)
            shown.append(self.path(attributes.ino) + (f" (on {on})" if on else ""))
        if len(missing) > SHOWN:
            shown.append(f"and {len(missing) - SHOWN} more")
        listed: list[dict[str, object]] = []
        size = 0
        for attributes in missing:
            path = self.path(attributes.ino)
            size += 6 * len(path) + 100
            if size > LISTED_BYTES:
                break
            listed.append({"path": path, "size": attributes.size, "durable": self.safe_on(attributes)})
        error = NotDurableInTime(
            f"not durable on {tier} after {seconds:g} s{f' ({why})' if why else ''}: "
            f"{', '.join(shown) or 'renames or deletes'}"
        )
        error.details = {
            "tier": tier,
            "why": why or None,
            "missing": listed,
            "missing_files": len(missing),
            "missing_bytes": sum(a.size for a in missing),
        }
        return error

    def unsafe(self, files: Iterable[Attributes]) -> list[Attributes]:
        """Those of ``files`` whose current content no persistent tier holds."""
        return [a for a in files if not self.is_lost(a) and self.safe_on(a) is None]

    def safe_on(self, attributes: Attributes, but: Collection[str] = ()) -> str | None:
        """The lowest tier, ``but`` for these, on which the current version is durable, if it is on any."""
        found = {
            r.tier
            for r in self._host.catalog.replicas(attributes.ino)
            if r.version == attributes.version and r.state is ReplicaState.DURABLE
        }
        found.difference_update(but)
        lowest = [tier.name for tier in self._host.policy.tiers if tier.persistent and tier.name in found]
        return lowest[-1] if lowest else None

    def is_lost(self, attributes: Attributes) -> bool:
        """Whether a file has a name and no tier anything of it: see `recover_lost_memory`."""
        ino = attributes.ino
        if not stat.S_ISREG(attributes.mode) or self._host.catalog.replicas(ino):
            return False
        now = self._host.catalog.attributes(ino)
        return now is not None and now.nlink > 0 and not self._host.archive.storing(ino, attributes.version)

    def path(self, ino: Ino) -> str:
        return b"/".join(self._host.catalog.path_of(ino) or ()).decode(errors="replace")

    def _flushed(self, wanted: Attributes, tier: str) -> bool:
        attributes = self._host.catalog.attributes(wanted.ino)
        if attributes is None or attributes.nlink == 0:
            return True
        return self.durable(wanted.ino, wanted.version, tier)
