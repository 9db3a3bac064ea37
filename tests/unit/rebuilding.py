"""A small filesystem with everything in it that a rebuild must bring back, without a kernel; and what it looks like."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import trio

from tests.unit.assembled import Parts, assemble
from tierfs.fs.caller import Caller
from tierfs.fs.filesystem import Change
from tierfs.fsck import check_all
from tierfs.fsck.check import open_replica
from tierfs.fsck.session import catalog_path
from tierfs.policy.load import parse_policy
from tierfs.policy.model import Policy
from tierfs.tiers.content import FileContent
from tierfs.types import ROOT_INO, Attributes, Ino, ReplicaState

CALLER = Caller(0, 0)
Tree = dict[bytes, tuple[object, ...]]
"""Path → all that a program can see of it."""


def policy_of(top: Path) -> Policy:
    return parse_policy(
        f"""
state: {top}/state
tiers:
  memory: {{kind: memory, size: 64MiB, path: {top}/memory}}
  nvme: {{kind: dir, path: {top}/nvme}}
  archive: {{kind: dir, path: {top}/archive}}
""",
        "test",
    )


class World:
    """What programs do on a mount, by path."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.policy = policy_of(top)
        self.policy.state.mkdir(exist_ok=True)
        self.parts: Parts = assemble(top, catalog_at=catalog_path(self.policy))
        self.claim()

    def claim(self) -> None:
        for tier in (*self.parts.stores.values(), self.parts.tree):
            tier.check_catalog(self.parts.catalog.uuid, claim=True)

    # doing

    def _place(self, path: bytes) -> tuple[int, bytes]:
        *above, name = path.split(b"/")
        found = self.parts.catalog.resolve(tuple(above))
        assert found is not None
        return found.ino, name

    def ino(self, path: bytes) -> Ino:
        found = self.parts.catalog.resolve(tuple(path.split(b"/")))
        assert found is not None, path
        return found.ino

    def mkdir(self, path: bytes, mode: int = 0o755) -> None:
        self.parts.names.make(*self._place(path), stat.S_IFDIR | mode, CALLER)

    def symlink(self, target: bytes, path: bytes) -> None:
        self.parts.names.make(*self._place(path), stat.S_IFLNK | 0o777, CALLER, target=target)

    def fifo(self, path: bytes) -> None:
        self.parts.names.make(*self._place(path), stat.S_IFIFO | 0o620, CALLER)

    def link(self, path: bytes, other: bytes) -> None:
        self.parts.names.link(self.ino(path), *self._place(other), CALLER)

    def write(self, path: bytes, content: bytes, *, mode: int = 0o644, at: int = 0) -> None:
        parent, name = self._place(path)
        if self.parts.catalog.lookup(parent, name) is None:
            fh, _ = self.parts.names.create(parent, name, mode, os.O_WRONLY, CALLER)
        else:
            fh = trio.run(self.parts.files.open, self.ino(path), os.O_WRONLY | os.O_TRUNC)
        trio.run(self.parts.filesystem.write, fh, at, content)
        self.parts.files.release(fh)

    def set(self, path: bytes, change: Change, **xattrs: bytes) -> None:
        async def run() -> None:
            await self.parts.filesystem.set_attributes(self.ino(path), change, CALLER)
            for name, value in xattrs.items():
                await self.parts.filesystem.set_xattr(self.ino(path), b"user." + name.encode(), value, CALLER)

        trio.run(run)

    def rename(self, path: bytes, other: bytes) -> None:
        self.parts.names.rename(*self._place(path), *self._place(other), 0, CALLER)

    def unlink(self, path: bytes) -> None:
        ino = self.ino(path)
        self.parts.names.unlink(*self._place(path), CALLER)
        self.parts.names.forget([ino])

    def fill(self) -> None:
        """One of each kind."""
        self.mkdir(b"run", 0o750)
        self.mkdir(b"run/step-1")
        self.write(b"run/step-1/model.pt", os.urandom(300_000))
        self.write(b"run/step-1/na\xff\xfeme", b"not UTF-8", mode=0o600)
        self.write(b"run/empty", b"")
        self.write(b"run/sparse", b"end", at=9 << 20)
        self.link(b"run/step-1/model.pt", b"best.pt")
        self.symlink(b"step-1/model.pt", b"run/latest")
        self.symlink(b"/nowhere/\xff", b"dangling")
        self.fifo(b"run/fifo")
        self.link(b"run/latest", b"run/step-1/latest")
        self.link(b"run/fifo", b"run/step-1/fifo")
        self.set(b"run/step-1/na\xff\xfeme", Change(uid=12, gid=34, mode=0o4711), plain=b"value", odd=b"\x00\xff")
        self.set(b"run/step-1", Change(mtime_ns=1_234_567_890_123_456_789), of=b"a directory")

    def drain(self, to: str = "archive") -> None:
        async def run() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.parts.migrator.run)
                nursery.start_soon(self.parts.files.copies.follow_rules)
                await self.parts.migrator.flusher.flush(ROOT_INO, to, 30)
                while to == "archive" and list(self.parts.catalog.wanted_drains(1)):  # the tiers on the way, too
                    with trio.move_on_after(0.1):
                        await self.parts.migrator.progress().wait()
                await self.parts.migrator.remove_discarded()
                nursery.cancel_scope.cancel()

        trio.run(run)

    def copy_catalog(self) -> None:
        async def run() -> None:
            assert await self.parts.migrator.copier.copy()

        trio.run(run)

    # looking

    def look(self, *, times: bool = True) -> Tree:
        tree: Tree = {}
        links: dict[int, list[bytes]] = {}
        for path, attributes in self._walk(ROOT_INO, b""):
            links.setdefault(attributes.ino, []).append(path)
            tree[path] = (
                attributes.mode,
                attributes.uid,
                attributes.gid,
                attributes.rdev,
                attributes.size if not stat.S_ISDIR(attributes.mode) else 0,
                attributes.nlink,
                attributes.mtime_ns if times and not stat.S_ISDIR(attributes.mode) else 0,
                self.parts.catalog.target(attributes.ino),
                sorted(self.parts.catalog.xattrs(attributes.ino)),
                self.read(attributes) if stat.S_ISREG(attributes.mode) else None,
            )
        for paths in links.values():
            for path in paths:
                tree[path] += (sorted(paths),)
        return tree

    def _walk(self, ino: int, above: bytes) -> list[tuple[bytes, Attributes]]:
        found = []
        for entry in self.parts.catalog.entries(ino, 0, 1000):
            path = above + entry.name
            found.append((path, entry.attributes))
            if stat.S_ISDIR(entry.attributes.mode):
                found += self._walk(entry.attributes.ino, path + b"/")
        return found

    def read(self, attributes: Attributes) -> list[bytes]:
        """The bytes of every replica of the current version; there is one."""
        parts = self.parts
        contents = set()
        for replica in parts.catalog.replicas(attributes.ino):
            if replica.version == attributes.version and replica.state is not ReplicaState.OPEN:
                found = open_replica(parts.catalog, parts.stores, parts.tree, replica)
                assert isinstance(found, FileContent)
                with open(found.fd, "rb") as file:
                    contents.add(file.read())
        assert len(contents) == 1, (attributes, parts.catalog.replicas(attributes.ino))
        return list(contents)

    # ending

    def close(self) -> None:
        self.parts.close()

    def crash(self) -> None:
        """Close without a clean end: nothing is copied to the archive."""
        self.parts.close()

    def reopen(self, before: Callable[[], object] = lambda: None) -> None:
        before()
        self.parts = assemble(self.top, catalog_at=catalog_path(self.policy))
        self.claim()

    def problems(self) -> list[dict[str, str]]:
        return check_all(self.policy, lambda done, total, what: None, data=True)


@contextlib.contextmanager
def drained_world() -> Iterator[World]:
    """A filled one, all of it on the archive. Left open."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        made = World(Path(path))
        made.fill()
        made.drain()
        yield made
