"""An assembled mount whose drains are started by hand and whose memory tier can be lost."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import trio
from assembled import Parts, assemble

from tierfs.fs.caller import Caller
from tierfs.fs.filesystem import Change
from tierfs.fs.settle import settle
from tierfs.fsck import check_queued, check_tiers
from tierfs.migrator.recovery import reclaim_orphans
from tierfs.migrator.rollback import recover_lost_memory
from tierfs.migrator.transfer import Transfer
from tierfs.report import Report
from tierfs.types import ROOT_INO, Attributes

CALLER = Caller(0, 0)
T = TypeVar("T")


def inside(call: Callable[..., T], *args: object) -> T:
    """Call something that wants to be called from the event loop."""

    async def run() -> T:
        return call(*args)

    return trio.run(run)


class World:
    """Paths are strings relative to the mount."""

    def __init__(self, top: Path, disks: Sequence[str] = ("nvme",), rules: str = "") -> None:
        self.top, self.disks, self.rules = top, disks, rules
        self.report = Report()
        self.start()

    @property
    def persistent(self) -> list[str]:
        return [*self.disks, "archive"]

    def start(self) -> None:
        self.parts: Parts = assemble(self.top, disks=self.disks, rules=self.rules)
        parts = self.parts
        parts.migrator.hurry = 1  # no pause between two batches of the archive
        trio.run(self._finish)
        parts.files.orphans.update(parts.catalog.orphans())
        self.report = recover_lost_memory(
            parts.catalog, parts.files.policy, parts.stores, parts.files, parts.migrator.archive.storing
        )
        parts.files.orphans.clear()
        parts.files.orphans.update(parts.catalog.orphans())
        inside(settle, parts.files)
        inside(parts.names.forget, list(parts.files.orphans))
        trio.run(parts.migrator.remove_discarded)
        trio.run(reclaim_orphans, parts.catalog, parts.stores, parts.files.former_key)

    async def _finish(self) -> None:
        await trio.to_thread.run_sync(self.parts.migrator.archive.finish)

    def close(self) -> None:
        self.parts.close()

    def restart(self) -> None:
        """The mount ends and begins again; memory stays."""
        self.close()
        self.start()

    def reboot(self) -> Report:
        """The memory tier is gone."""
        self.close()
        shutil.rmtree(self.top / "memory")
        self.start()
        return self.report

    # the mount

    def find(self, path: str) -> Attributes | None:
        return self.parts.catalog.resolve(tuple(os.fsencode(part) for part in path.split("/") if part))

    def ino(self, path: str) -> int:
        found = self.find(path)
        assert found is not None, path
        return found.ino

    def _place(self, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        return self.ino(above), os.fsencode(name)

    def write(self, path: str, data: bytes, *, truncate: bool = True) -> None:
        found = self.find(path)
        flags = os.O_WRONLY | (os.O_TRUNC if truncate else 0)
        if found is None:
            fh, _ = inside(self.parts.names.create, *self._place(path), 0o644, os.O_WRONLY, CALLER)
        else:
            fh = trio.run(self.parts.files.open, found.ino, flags)
        self.parts.write(fh, 0, data)
        inside(self.parts.files.release, fh)

    def save(self, path: str, data: bytes) -> None:
        """As programs do that care: a temporary name, then a rename over the old file."""
        self.write(path + ".tmp", data)
        self.rename(path + ".tmp", path)

    def mkdir(self, path: str) -> None:
        self.parts.names.make(*self._place(path), stat.S_IFDIR | 0o755, CALLER)

    def unlink(self, path: str) -> None:
        ino = self.ino(path)
        inside(self.parts.names.unlink, *self._place(path), CALLER)
        inside(self.parts.names.forget, [ino])

    def rmdir(self, path: str) -> None:
        ino = self.ino(path)
        inside(self.parts.names.rmdir, *self._place(path), CALLER)
        inside(self.parts.names.forget, [ino])

    def rename(self, path: str, to: str) -> None:
        over = self.find(to)
        self.parts.names.rename(*self._place(path), *self._place(to), 0, CALLER)
        if over is not None:
            inside(self.parts.names.forget, [over.ino])

    def change(self, path: str, *, mode: int, mtime_ns: int, xattr: bytes) -> None:
        ino = self.ino(path)
        trio.run(self.parts.filesystem.set_attributes, ino, Change(mode=mode, mtime_ns=mtime_ns), CALLER)
        trio.run(self.parts.filesystem.set_xattr, ino, b"user.x", xattr, CALLER)

    def read(self, path: str) -> bytes:
        handle = trio.run(self.parts.files.open, self.ino(path), os.O_RDONLY)
        try:
            return trio.run(self.parts.filesystem.read, handle, 0, 1 << 20)
        finally:
            inside(self.parts.files.release, handle)

    def shown(self, path: str) -> tuple[bytes, int, int, int, dict[bytes, bytes]]:
        """(content, size, mode, mtime in ns, xattrs)."""
        content = self.read(path)
        found = self.find(path)
        assert found is not None
        xattrs = dict(self.parts.catalog.xattrs(found.ino))
        return content, found.size, stat.S_IMODE(found.mode), found.mtime_ns, xattrs

    def files(self) -> list[str]:
        found, directories = [], [(int(ROOT_INO), "")]
        for ino, above in directories:
            for entry in self.parts.catalog.entries(ino, 0, 1000):
                path = above + os.fsdecode(entry.name)
                if stat.S_ISDIR(entry.attributes.mode):
                    directories.append((entry.attributes.ino, path + "/"))
                else:
                    found.append(path)
        return sorted(found)

    # draining

    def drain(self, path: str, *tiers: str) -> None:
        """Make a file durable on some tiers; for the archive: have its content ready there."""
        found = self.find(path)
        assert found is not None, path
        for tier in tiers or self.disks:
            self.drain_inode(found, tier)

    def drain_inode(self, found: Attributes, tier: str) -> None:
        transfer = Transfer(found.ino, found.version, tier, found.size)
        self.parts.migrator.running[found.ino, found.version, tier] = transfer
        trio.run(self.parts.migrator._drain, transfer)

    def replay(self) -> None:
        """The archive goes on as far as it can."""
        trio.run(self.parts.migrator._replay)
        self.settle()

    def durable(self, *paths: str) -> None:
        """On every persistent tier."""
        for path in paths:
            self.drain(path, *self.persistent)
        self.replay()

    def settle(self) -> None:
        """What is held no longer goes."""
        inside(self.parts.migrator.held.release)
        trio.run(self.parts.migrator.remove_discarded)

    def drain_all(self) -> None:
        """Everything durable everywhere, the archive as the mount is."""
        catalog = self.parts.catalog
        while True:
            for ino, _, tier, *_ in catalog.wanted_drains(1000):
                found = catalog.attributes(ino)
                assert found is not None
                self.drain_inode(found, tier)
            for ino, version, *_ in catalog.wanted_contents(1000):
                found = catalog.attributes(ino)
                if found is not None and (ino, version) not in self.parts.migrator.ready:
                    self.drain_inode(found, "archive")
            self.replay()
            if not catalog.operations(1):
                return

    # the disks

    def on(self, tier: str) -> list[bytes]:
        """Contents of the files on a tier."""
        if tier == "archive":
            return sorted(content for content in self.archived().values())
        store = self.parts.stores[tier]
        found = []
        for key in store.keys():  # noqa: SIM118
            fd = store.open(key)
            found.append(os.pread(fd, 1 << 20, 0))
            os.close(fd)
        return sorted(found)

    def archived(self) -> dict[str, bytes]:
        root = self.top / "archive"
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and ".tierfs" not in path.parts
        }

    def held(self) -> tuple[int, int]:
        return self.parts.migrator.held.sums()

    def problems(self) -> list[dict[str, Any]]:
        """What fsck says of a mount on which nothing is lost."""
        trio.run(self.parts.migrator.remove_discarded)
        tree = self.parts.tree
        catalog, policy = self.parts.catalog, self.parts.files.policy
        problems = check_tiers(catalog, self.parts.stores, tree, lambda done, total, what: None)
        return [*problems, *check_queued(catalog, policy)]

    def check(self) -> None:
        """Nothing contradicts itself, and drained it is the same everywhere."""
        problems = self.problems()
        assert problems == []
        self.drain_all()
        problems = self.problems()
        assert problems == []
        assert self.archived() == {path: self.read(path) for path in self.files()}
        assert self.held() == (0, 0)
        assert not self.parts.catalog.orphans()
