"""The memory tier: a tmpfs that tierfs mounts itself, or a directory given as ``path``."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from tierfs.errors import TierError
from tierfs.policy.model import TierConfig
from tierfs.tiers.base import ReplicaStore

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def is_mountpoint(path: Path) -> bool:
    """Whether a filesystem is mounted exactly there."""
    wanted = os.fsencode(path.resolve())
    with open("/proc/self/mountinfo", "rb") as mounts:
        return any(line.split()[4].replace(b"\\040", b" ") == wanted for line in mounts)


@dataclass
class MemoryMount:
    """A tmpfs of tierfs's own. It outlives the daemon; a complete umount removes it."""

    name: str
    path: Path
    size: int
    huge: str
    numa: tuple[int, ...]

    def mount(self) -> None:
        """Mount it unless it is. TierError says what the kernel refused."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_mountpoint(self.path):
            return
        options = [f"size={self.size}", "mode=0700"]
        if self.numa:
            options.append("mpol=bind:" + ",".join(map(str, self.numa)))
        code = self._mount([*options, f"huge={self.huge}"])
        if code == errno.EINVAL:
            code = self._mount(options)
        if code:
            hint = f" (numa: {list(self.numa)}: is there such a node?)" if self.numa else ""
            raise TierError(f"tier {self.name}: mounting tmpfs: {os.strerror(code)}{hint}", errno=code, temporary=False)

    def _mount(self, options: list[str]) -> int:
        libc = _libc()
        flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
        done = libc.mount(b"tierfs-memory", os.fsencode(self.path), b"tmpfs", flags, ",".join(options).encode())
        return ctypes.get_errno() if done else 0

    def unmount(self) -> None:
        """Give the memory back. TierError when something still uses it."""
        if is_mountpoint(self.path) and _libc().umount2(os.fsencode(self.path), 0):
            raise TierError(f"tier {self.name}: unmounting {self.path}: {os.strerror(ctypes.get_errno())}")


def open_store(config: TierConfig, default_root: Path) -> tuple[ReplicaStore, MemoryMount | None]:
    """The store of a local tier, and its mount when tierfs owns one. Raises TierError."""
    if config.kind == "memory" and config.path is None:
        assert config.size is not None, "the loader demands a size"
        if os.geteuid() != 0:
            raise TierError(
                f"tier {config.name}: only root can mount a tmpfs; give it a path (for example below /dev/shm)",
                errno=errno.EPERM,
                temporary=False,
            )
        mount = MemoryMount(config.name, default_root, config.size, config.huge, config.numa)
        mount.mount()
        return ReplicaStore(config.name, default_root, persistent=False), mount
    assert config.path is not None, "the loader demands a path"
    return ReplicaStore(config.name, config.path, persistent=config.persistent, size=config.size), None
