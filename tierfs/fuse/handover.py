"""What outlives a daemon: the table of open handles, and what the keeper hands to each daemon and to its successor.

The kernel keeps its handles when a daemon dies, and names them by ``fh`` alone in everything it asks next. So the table
of what they are lies in memory that the keeper holds, too (a memfd mapped by both), and each handle is entered before
the kernel learns of it and taken out before the kernel learns that its release was done. Between the two the kernel
still awaits an answer and will ask again: the entry's ``unique`` tells which request it was made for.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tierfs.errors import MountError


@dataclass(frozen=True, slots=True)
class OpenHandle:
    """A handle that the kernel holds: made by a former daemon, valid for the next one."""

    fh: int
    ino: int
    flags: int
    backing_id: int
    """0: no passthrough"""
    unique: int
    """The request that opened it."""


class HandleTable:
    """Entries of fixed size behind a header, in a memfd of its own.

    A process can be killed between any two stores: an entry counts from the moment its last byte, stored alone and
    last, is set, until that byte is cleared.
    """

    _HEADER = struct.Struct("<8sIIQQ")
    """magic, version, size of an entry; pid of the daemon that serves (0: none does yet); the backing id given last"""
    _ENTRY = struct.Struct("<QQQIIB7x")
    """fh, unique, ino, flags, backing_id, whether the entry counts"""
    _MAGIC, _VERSION = b"tierfs-h", 1
    _SERVING_AT, _BACKING_AT, _USED_AT = 16, 24, 32
    _WORD = struct.Struct("<Q")
    _GROW = 1024

    def __init__(self, fd: int) -> None:
        """Map the table in ``fd``, or begin one when it is empty. Raises MountError when another version wrote it."""
        self.fd = fd
        self._map: mmap.mmap
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._resize(os.fstat(fd).st_size or self._size(0))
        found = self._HEADER.unpack_from(self._map)[:3]
        expected = (self._MAGIC, self._VERSION, self._ENTRY.size)
        if found == (bytes(8), 0, 0):
            self._HEADER.pack_into(self._map, 0, *expected, 0, 0)
        elif found != expected:
            raise MountError("this version cannot take over the open files of the running one; umount and mount again")
        for slot, handle in self._scan():
            if handle is None:
                self._free.append(slot)
            else:
                self._slots[handle.fh] = slot

    @classmethod
    def create(cls) -> HandleTable:
        return cls(os.memfd_create("tierfs-handles", os.MFD_CLOEXEC))

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def _size(self, slots: int) -> int:
        return self._HEADER.size + slots * self._ENTRY.size

    def _resize(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)

    def _scan(self) -> Iterator[tuple[int, OpenHandle | None]]:
        for slot in range((len(self._map) - self._HEADER.size) // self._ENTRY.size):
            fh, unique, ino, flags, backing_id, used = self._ENTRY.unpack_from(self._map, self._size(slot))
            yield slot, OpenHandle(fh, ino, flags, backing_id, unique) if used else None

    def handles(self) -> list[OpenHandle]:
        return [handle for _, handle in self._scan() if handle is not None]

    def add(self, handle: OpenHandle) -> None:
        """Enter a handle; one that is there already, taken over, stays as it is."""
        if handle.fh in self._slots:
            return
        if not self._free:
            slots = (len(self._map) - self._HEADER.size) // self._ENTRY.size
            former = self._map
            self._resize(self._size(slots + self._GROW))
            former.close()
            self._free.extend(range(slots + self._GROW - 1, slots - 1, -1))
        slot = self._free.pop()
        at = self._size(slot)
        self._ENTRY.pack_into(
            self._map, at, handle.fh, handle.unique, handle.ino, handle.flags, handle.backing_id, 0
        )
        self._map[at + self._USED_AT] = 1
        self._slots[handle.fh] = slot
        if handle.backing_id:
            self._WORD.pack_into(self._map, self._BACKING_AT, handle.backing_id)

    def remove(self, fh: int) -> None:
        """Unknown handles are ignored: a release that is asked for again was done before."""
        slot = self._slots.pop(fh, None)
        if slot is not None:
            self._map[self._size(slot) + self._USED_AT] = 0
            self._free.append(slot)

    @property
    def last_backing_id(self) -> int:
        """The kernel gives them out upwards, and begins anew when they are used up."""
        return int(self._WORD.unpack_from(self._map, self._BACKING_AT)[0])

    @property
    def serving(self) -> int:
        """Pid of the daemon that answers the kernel, 0 before the present one does."""
        return int(self._WORD.unpack_from(self._map, self._SERVING_AT)[0])

    @serving.setter
    def serving(self, pid: int) -> None:
        self._WORD.pack_into(self._map, self._SERVING_AT, pid)


@dataclass(frozen=True, slots=True)
class KeeperSession:
    """What a daemon gets from its keeper."""

    device_fd: int
    """/dev/fuse: the daemon reads requests from it, the keeper only holds it open."""
    handles: HandleTable
    keeper_pid: int
    restarts: int = 0
    """How many daemons of this mount there were before; 0 is the first."""

    @property
    def keeper_is_gone(self) -> bool:
        return os.getppid() != self.keeper_pid


@dataclass(frozen=True, slots=True)
class KeeperState:
    """All that a keeper knows, for the same process to go on after it executed another version of the program."""

    device_fd: int
    handles_fd: int
    restarts: int

    def store(self) -> int:
        """Write it to a file without a name, whose descriptor stays open over an execution. Raises OSError."""
        fd = os.memfd_create("tierfs-keeper")
        os.set_inheritable(fd, True)
        with os.fdopen(os.dup(fd), "w") as file:
            json.dump(asdict(self), file)
        return fd

    @classmethod
    def load(cls, fd: int) -> KeeperState:
        """Read what `store` wrote and close ``fd``. Raises OSError, ValueError."""
        os.set_inheritable(fd, False)
        with os.fdopen(fd) as file:
            file.seek(0)
            state = cls(**json.load(file))
        os.set_inheritable(state.device_fd, False)
        os.set_inheritable(state.handles_fd, False)
        return state
