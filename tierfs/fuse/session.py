"""What the keeper hands to each daemon it starts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OpenHandle:
    """A handle that the kernel holds: made by a former daemon, valid for the next one."""

    fh: int
    ino: int
    flags: int
    backing_id: int
    is_dir: bool = False


@dataclass(frozen=True, slots=True)
class KeeperSession:
    device_fd: int
    """/dev/fuse, for registering backing files; never read or written by the daemon."""
    channel_fd: int
    """The daemon's end of the socket pair; pyfuse3 mounts ``/dev/fd/N``."""
    keeper_pid: int
    restarts: int = 0
    """How many daemons of this mount there were before; 0 is the first."""
    handles: list[OpenHandle] = field(default_factory=list)
    """Open files."""
    directories: list[OpenHandle] = field(default_factory=list)
    """Open directories (from OPENDIR)."""
    highest_backing_id: int = 0
