"""What the migrator does for those who wait for room: drain in a hurry, evict, and let the memory tier grow."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import trio

from tierfs.errors import TierError
from tierfs.fs.open_files import OpenFiles
from tierfs.migrator.evict import Evictor
from tierfs.migrator.queue import DrainQueue
from tierfs.migrator.removal import Remover
from tierfs.migrator.throttle import Throttle
from tierfs.migrator.transfer import Transfer
from tierfs.plan.room import hard_limit
from tierfs.policy.model import Policy
from tierfs.tiers.memory import MemoryMount

SPARED = 20
"""A memory tier does not grow into the last one of so many parts of the machine's memory."""


class Host(Protocol):
    """What this module needs of the migrator."""

    paused: bool
    hurry: int
    running: dict[tuple[int, int, str], Transfer]
    remover: Remover
    evictor: Evictor
    queue: DrainQueue
    throttle: Throttle

    def kick(self) -> None: ...
    def progress(self) -> trio.Event: ...
    async def remove_discarded(self) -> None: ...


class Relief:
    """fs.admission.Relief."""

    def __init__(self, host: Host, growth: Growth) -> None:
        self._host = host
        self._growth = growth

    def expected(self) -> bool:
        host = self._host
        return not host.paused and bool(host.running or host.queue.pending())

    def copied(self) -> int:
        return self._host.throttle.total

    async def progress(self) -> None:
        await self._host.progress().wait()

    def drop(self, tier: str, size: int) -> bool:
        with contextlib.suppress(OSError):
            return self._host.evictor.make_room(tier, size)
        return False

    async def evict(self, tier: str, size: int) -> bool:
        if self.drop(tier, size) or any(name == tier for name, _ in self._host.remover.doomed):
            await self._host.remove_discarded()
            return True
        return False

    async def grow(self, tier: str, size: int) -> bool:
        return await self._growth.look(tier, size)

    def press(self, more: int) -> None:
        self._host.hurry += more
        self._host.kick()


class Growth:
    """The limits of the tmpfs mounts of tierfs's own, which follow what open files need (plan.room)."""

    def __init__(self, mounts: Sequence[MemoryMount], policy: Policy, files: OpenFiles) -> None:
        self._mounts = {mount.name: mount for mount in mounts}
        self._policy = policy
        self._files = files

    async def look(self, tier: str | None = None, size: int = 0) -> bool:
        """Set every limit anew; ``size`` more bytes are needed on ``tier`` now. Whether that one's limit was raised."""
        raised = False
        for name, mount in self._mounts.items():
            config = self._policy.tier(name)
            assert config.size is not None  # an own tmpfs has one
            with contextlib.suppress(OSError, TierError):  # the tier that fails says so where it is used
                used = mount.used()
                coming = self._files.space.coming(name) + (size if name == tier else 0)
                limit = hard_limit(config.size, config.hard_limit, used, coming, spare(mount.numa))
                if limit != mount.size:
                    raised |= name == tier and limit > mount.size
                    await trio.to_thread.run_sync(mount.resize, limit)
        return raised


def spare(numa: Sequence[int] = ()) -> int:
    """Bytes of memory, of these nodes, that may be taken without harm to what runs on the machine."""
    if not numa:
        found = meminfo(Path("/proc/meminfo"))
        return found.get("MemAvailable", 0) - found.get("MemTotal", 0) // SPARED
    total = 0
    for node in numa:
        found = meminfo(Path(f"/sys/devices/system/node/node{node}/meminfo"))
        cached = found.get("Active(file)", 0) + found.get("Inactive(file)", 0)
        total += found.get("MemFree", 0) + cached - found.get("MemTotal", 0) // SPARED
    return total


def meminfo(path: Path) -> Mapping[str, int]:
    """The kernel's figures in bytes by name; none where it has none."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), open(path, encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.rpartition(":")
            fields = rest.split()
            if len(fields) == 2 and fields[1] == "kB":
                found[name.split()[-1]] = int(fields[0]) << 10
    return found

