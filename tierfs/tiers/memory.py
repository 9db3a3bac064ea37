"""Memory tiers: a tmpfs of tierfs's own, which outlives the daemon, or a given directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tierfs.errors import TierError
from tierfs.policy.model import TierConfig
from tierfs.tiers.base import ReplicaStore, refusal

SOURCE = "tierfs"
"""Device name of our tmpfs in the mount table."""

_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(path: Path, flags: int, options: str) -> None:
    if _libc.mount(
        SOURCE.encode(), os.fsencode(path), b"tmpfs", ctypes.c_ulong(flags | _MS_NOSUID | _MS_NODEV), options.encode()
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mounted_at(path: Path) -> tuple[str, str] | None:
    """(type, source) of the topmost filesystem mounted exactly at ``path``. Raises OSError."""
    found = None
    wanted = os.path.realpath(path)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            head, _, tail = line.rstrip("\n").partition(" - ")
            if _unescape(head.split(" ")[4]) == wanted:
                kind, source = tail.split(" ")[:2]
                found = (kind, _unescape(source))
    return found


@dataclass
class MemoryMount:
    """One tmpfs mounted by tierfs. ``size`` in bytes is its hard limit."""

    name: str
    path: Path
    size: int
    huge: str = "within_size"
    numa: tuple[int, ...] = ()
    fresh: bool = False
    """Mounted by this process: there is nothing in it that anybody could miss before files are served."""

    def mount(self) -> None:
        """Mount it, or take over the one that a former daemon left. Raises TierError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = mounted_at(self.path)
            if there == ("tmpfs", SOURCE):
                self.resize(max(self.size, self.used()))  # it may have grown
                return
            if there is not None:
                raise refusal(self.name, f"{self.path} has a {there[0]} from {there[1]} mounted on it")
            self._mount_new()
            self.fresh = True
        except PermissionError as error:
            raise refusal(
                self.name,
                f"mounting a tmpfs needs root ({error.strerror}); give the tier a path, such as /dev/shm/tierfs",
            ) from error
        except OSError as error:
            raise TierError.of(self.name, f"mount tmpfs on {self.path}", error) from error

    def _mount_new(self) -> None:
        options = f"size={self.size},mode=0700"
        if self.numa:
            options += f",mpol=bind:{','.join(map(str, self.numa))}"
        try:
            _mount(self.path, 0, f"huge={self.huge},{options}")
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        try:
            _mount(self.path, 0, options)
        except OSError as error:
            if error.errno == errno.EINVAL and self.numa:
                raise refusal(self.name, f"this machine has no memory on NUMA node(s) {list(self.numa)}") from error
            raise

    def resize(self, size: int) -> None:
        """Change the hard limit, in bytes. Raises TierError: EINVAL when more is in use."""
        try:
            _mount(self.path, _MS_REMOUNT, f"size={size}")
        except OSError as error:
            raise TierError.of(self.name, f"resize {self.path} to {size} bytes", error) from error
        self.size = size

    def used(self) -> int:
        """Bytes in it. Raises OSError."""
        found = os.statvfs(self.path)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def unmount(self) -> None:
        """Unmount: what is in it is gone. Open descriptors keep the memory until they are closed. Raises TierError."""
        try:
            if mounted_at(self.path) != ("tmpfs", SOURCE):
                return
            if _libc.umount2(os.fsencode(self.path), _UMOUNT_NOFOLLOW | _MNT_DETACH):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(self.path))
        except OSError as error:
            raise TierError.of(self.name, f"unmount {self.path}", error) from error
        with contextlib.suppress(OSError):
            self.path.rmdir()


def open_store(config: TierConfig, default_root: Path) -> tuple[ReplicaStore, MemoryMount | None]:
    """The store of a tier that is not the archive, and the tmpfs mounted for it at ``default_root``, if any.
    Not prepared yet. Raises TierError."""
    mount = None
    root = config.path
    if root is None:
        if config.size is None:
            raise refusal(config.name, "a memory tier without a path needs a size")
        mount = MemoryMount(config.name, default_root, config.size, config.huge, config.numa)
        mount.mount()
        root = default_root
    return ReplicaStore(config.name, root, persistent=config.persistent, size=config.size), mount
