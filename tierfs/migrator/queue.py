"""What waits to be copied, with its deadlines, and who is told when a deadline passes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.migrator.archive import Archive, Ready
from tierfs.migrator.outage import Outages
from tierfs.plan.deadline import inherited
from tierfs.plan.drain import Pending

log = logging.getLogger("tierfs.migrator")

WINDOW = 128
"""Copies looked at in one go, of those that were closed first and of those with the earliest deadlines."""
LATE_SECONDS = 1.0
"""Between two looks at the deadlines."""
NAMED = 5
"""Late files that the log names; status counts all of them."""


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    archive: Archive
    archive_name: str
    outages: Outages

    @property
    def ready(self) -> Mapping[tuple[int, int], Ready]: ...


class DrainQueue:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._told = False
        """Files are late, and the log says so."""
        self.awaited: Counter[int] = Counter()
        """Inodes of which somebody waits for a copy (fsync, close): theirs to the tiers above the archive go first. On
        the archive nothing can: it gets everything in order of close."""

    def pending(self) -> list[Pending]:
        """Copies that could start now, contents of the archive first, each in order of close."""
        return [*self._contents(), *self._drains()]

    def _contents(self) -> list[Pending]:
        host = self._host
        if host.outages.wait(host.archive_name):
            return []
        found = host.catalog.wanted_contents(WINDOW)
        dues = inherited([row[4] for row in found], host.catalog.content_deadlines(WINDOW))
        return [
            Pending(ino, version, host.archive_name, size, closed, due)
            for (ino, version, size, closed, _), due in zip(found, dues, strict=True)
            if (ino, version) not in host.ready and not host.archive.storing(ino, version)
        ]

    def _drains(self) -> list[Pending]:
        """A copy on the way has the deadline of its file: it is what makes it safe until the last tier has it."""
        host = self._host
        rows = dict.fromkeys(row for ino in self.awaited for row in host.catalog.wanted_drains_of(ino))
        rows |= dict.fromkeys(host.catalog.urgent_drains(WINDOW))
        rows |= dict.fromkeys(host.catalog.wanted_drains(WINDOW))
        return [
            Pending(
                ino, version, tier, size, closed, 0 if ino in self.awaited else host.catalog.deadline(ino, version)
            )
            for ino, version, tier, size, closed in rows
            if not host.outages.wait(tier)
        ]

    async def watch(self) -> None:
        """Say it once when files miss their deadline, and when none does any more; until cancelled."""
        while True:
            self._look()
            await trio.sleep(LATE_SECONDS)

    def _look(self) -> None:
        catalog = self._host.catalog
        late = catalog.late_files(time.time_ns(), NAMED)
        if late and not self._told:
            files, size = catalog.late(time.time_ns())
            shown = ", ".join(b"/".join(catalog.path_of(ino) or ()).decode(errors="replace") for ino in late)
            more = f" and {files - len(late)} more" if files > len(late) else ""
            log.warning(
                "past their deadline (durable_within) for tier %s: %s%s, %d bytes; `tierfs status` counts them",
                self._host.archive_name,
                shown,
                more,
                size,
            )
        elif self._told and not late:
            log.info("no file is past its deadline any more")
        self._told = bool(late)
