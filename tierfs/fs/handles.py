"""What the kernel has open: inodes with their backing file, and the handles on them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import trio

from tierfs.fs.ports import Filling
from tierfs.plan.placement import Role
from tierfs.policy.model import Rule
from tierfs.types import Ino, Replica


@dataclass
class OpenInode:
    ino: Ino
    fd: int
    replica: Replica
    backing_id: int
    rule: Rule
    role: Role
    readers: int = 0
    writers: int = 0
    anew: bool = True
    """The version that is being written began empty, not with the bytes of the one before."""
    unprivileged: bool = False
    """Opened for writing by somebody else than root, whose writes clear the setuid and setgid bits."""
    snapshot: tuple[int, int] | None = None
    """(size, mtime_ns) when fsync or close made the version durable while it stayed open for writing."""
    filling: Filling | None = None
    """Set while the bytes are on their way."""
    seen: int = 0
    """Bytes of it when `OpenFiles.measure` looked last."""
    moving: trio.Event | None = None
    """Set while the bytes move to another tier, and writes wait."""


@dataclass
class Handle:
    inode: OpenInode
    flags: int

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def waits_at_close(self) -> bool:
        """Whether close(2) has to ask."""
        return self.writes and self.inode.rule.close is not None
