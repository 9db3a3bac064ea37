"""What the keeper hands to each daemon it starts, and to the program that replaces it."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import asdict, dataclass, field


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


@dataclass(frozen=True, slots=True)
class KeeperState:
    """All that a keeper knows, for the same process to go on after it executed another version of the program."""

    device_fd: int
    """/dev/fuse; stays open over the execution."""
    init_request: bytes
    """The kernel's INIT request."""
    restarts: int
    handles: list[OpenHandle]
    highest_backing_id: int
    undelivered: list[bytes]
    """Packets that no daemon has taken yet."""

    def store(self) -> int:
        """Write it to a file without a name, whose descriptor stays open over an execution. Raises OSError."""
        fields = asdict(self) | {
            "init_request": base64.b64encode(self.init_request).decode(),
            "undelivered": [base64.b64encode(packet).decode() for packet in self.undelivered],
        }
        fd = os.memfd_create("tierfs-keeper")
        os.set_inheritable(fd, True)
        with os.fdopen(os.dup(fd), "w") as file:
            json.dump(fields, file)
        return fd

    @classmethod
    def load(cls, fd: int) -> KeeperState:
        """Read what `store` wrote and close ``fd``. Raises OSError, ValueError."""
        os.set_inheritable(fd, False)
        with os.fdopen(fd) as file:
            file.seek(0)
            fields = json.load(file)
        fields["init_request"] = base64.b64decode(fields["init_request"])
        fields["undelivered"] = [base64.b64decode(packet) for packet in fields["undelivered"]]
        fields["handles"] = [OpenHandle(**handle) for handle in fields["handles"]]
        os.set_inheritable(fields["device_fd"], False)
        return cls(**fields)
