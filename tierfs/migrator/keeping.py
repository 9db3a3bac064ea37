"""A copy of the catalog goes to the archive every few minutes in which something changed, and at each clean umount."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from tierfs.catalog import Catalog, discard_snapshot, take_snapshot
from tierfs.errors import CatalogDamaged, CatalogError, TierError
from tierfs.fs.lanes import Beat, Lane
from tierfs.points import At, reach
from tierfs.tiers.copies import LOG_BYTES
from tierfs.tiers.kinds import Copies

log = logging.getLogger("tierfs.catalog")

COPY_SECONDS = 300.0
"""Between two copies."""
LOOK_SECONDS = 10.0
SHARE = 20
"""A copy that takes a second is made every SHARE seconds at most."""


class CatalogCopier:
    def __init__(self, catalog: Catalog, copies: Copies, lane: Lane) -> None:
        """``lane``: the archive's."""
        self._catalog = catalog
        self._copies = copies
        self._lane = lane
        self._copied_seq = -1
        self._failing = False

    async def run(self, paused: Callable[[], bool]) -> None:
        """Copy until cancelled; ``paused`` says that the archive is to be left alone."""
        due = trio.current_time() + COPY_SECONDS
        while True:
            await trio.sleep(LOOK_SECONDS)
            began = trio.current_time()
            if paused() or not (began >= due or self._copies.log_bytes > LOG_BYTES):
                continue
            if self._catalog.seq != self._copied_seq:
                await self.copy()
            due = trio.current_time() + max(COPY_SECONDS, SHARE * (trio.current_time() - began))

    async def copy(self) -> bool:
        """Make a copy now; False when it failed, which is logged once until it works again."""
        try:
            await self._lane.run(self._copies.begin, "look for copies of the catalog")
            frozen = self._catalog.freeze()
            number = self._copies.advance()
            try:
                with trio.CancelScope(shield=True):  # the thread reads what a fold would change
                    file = await trio.to_thread.run_sync(take_snapshot, frozen, frozen.path.parent)
            finally:
                self._catalog.thaw()
            beat = Beat()
            put = partial(
                self._copies.put, file, number, self._catalog.uuid, frozen.seq, time.time_ns(), lambda size: beat(size)
            )
            try:
                await self._lane.run(put, "copy the catalog", beat=beat)
            finally:
                discard_snapshot(frozen.path.parent)
        except CatalogDamaged as error:
            if not self._failing:
                log.error("%s: not copied to the archive; umount and run tierfs fsck", error)
            self._failing = True
        except (CatalogError, TierError, OSError) as error:
            if not self._failing:
                log.info("%s; the catalog is copied to the archive later", error)
            self._failing = True
        else:
            self._failing = False
            self._copied_seq = frozen.seq
        return not self._failing


def keep_closed(path: Path, uuid: str, seq: int, copies: Copies) -> bool:
    """The catalog at ``path`` was just closed, with nothing left to do: copy it and say that this copy is the catalog.
    Blocks. False when the archive fails, which is logged."""
    try:
        copies.begin()
        manifest = copies.put(path, copies.advance(), uuid, seq, time.time_ns())
        reach(At.COPY_UNDECLARED)
        copies.declare_clean(manifest)
    except (OSError, TierError) as error:
        log.info("%s; the archive keeps the copy of the catalog from before", error)
        return False
    return True
