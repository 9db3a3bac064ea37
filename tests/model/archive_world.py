"""A mount without FUSE for model tests: real catalog, names, open files and archive, and every way to crash.

`World` carries operations out and, after each system call that changes the archive, looks at what anyone would see
there (`Witness`). The rules of what may be seen are the promises: each file is whole and has a name at which the mount
showed just this content, contents appear in the order in which they were closed, and what the catalog calls durable is
there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import trio

from tierfs.catalog import Catalog
from tierfs.errors import ContentMissing, FsError, TierError
from tierfs.fs.caller import Caller
from tierfs.fs.filesystem import Change, Filesystem
from tierfs.fs.namespace import RENAME_EXCHANGE, Namespace
from tierfs.fs.open_files import OpenFiles
from tierfs.fs.space import Space
from tierfs.fsck import check_tiers
from tierfs.migrator.archive import Archive, Ready
from tierfs.migrator.held import HeldDeletes
from tierfs.migrator.rollback import recover_lost_memory
from tierfs.migrator.throttle import Throttle
from tierfs.migrator.transfer import Transfer, copy_to_store
from tierfs.policy.match import RuleMatcher
from tierfs.policy.model import Limits, Policy, Rule, TierConfig
from tierfs.tiers.assembly import chunked_store
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.copies import CatalogCopies
from tierfs.tiers.copy import digest_file
from tierfs.tiers.tree import TreeStore
from tierfs.types import ROOT_INO, Attributes, Replica

__all__ = ["CALLER", "ContentMissing", "World"]

BATCH = 12
CALLER = Caller(os.geteuid(), os.getegid())
CALLS = ("rename", "unlink", "link", "symlink", "mkdir", "rmdir", "mknod", "fsync")


class Crash(BaseException):
    """The daemon is killed, or the machine's power goes, here."""


def policy(base: Path) -> Policy:
    tiers = (
        TierConfig("memory", "memory", base / "memory", None, 0.9, 0.7),
        TierConfig("archive", "dir", base / "archive", None, 0.9, 0.7),
    )
    rule = Rule(("**",), "memory", None, None, "archive", {})
    return Policy("test", None, "userspace", False, base / "state", tiers, (rule,), Limits())


@dataclass
class Witness:
    """Reads the archive like anyone could, and remembers what it saw."""

    root: Path
    read: Callable[[Path], bytes]
    """The bytes of the file that stands at a path of the archive."""
    contents: dict[bytes, int] = field(default_factory=dict)
    """Every content ever closed → its place in the order of closes."""
    seen: int = 0
    names: dict[str, set[bytes]] = field(default_factory=dict)
    """Path → every content that the mount showed there."""

    def shown(self, tree: Mapping[str, tuple[object, ...]]) -> None:
        for path, (kind, *rest) in tree.items():
            if kind == stat.S_IFREG and isinstance(content := rest[1], bytes):
                self.names.setdefault(path, set()).add(content)

    def files(self) -> Iterator[tuple[str, bytes]]:
        for directory, names, files in os.walk(self.root):
            if ".tierfs" in names:
                names.remove(".tierfs")
            for name in files:
                path = Path(directory, name)
                if stat.S_ISREG(path.lstat().st_mode):
                    yield str(path.relative_to(self.root)), self.read(path)

    def set_aside(self) -> set[bytes]:
        """Contents that are there, and at no name."""
        kept = self.root / ".tierfs" / "kept"
        return {self.read(path) for path in kept.iterdir()} if kept.exists() else set()

    def look(self) -> set[bytes]:
        found = set()
        for path, content in self.files():
            assert content in self.contents, f"{path} holds {content[:20]!r}, which was never closed"
            shown = self.names.get(path, set())
            assert content in shown, f"{path} holds {content[:5]!r}, and on the mount {[c[:5] for c in shown]}"
            found.add(content)
        fresh = sorted(n for c in found if (n := self.contents[c]) > self.seen)
        assert len(fresh) <= 1, f"closes {fresh} appeared at once"
        if fresh:
            self.seen = fresh[0]
        return found


@dataclass
class World:
    base: Path
    now: int = 0
    ready: dict[tuple[int, int], Ready] = field(default_factory=dict)
    by_digest: dict[bytes, bytes] = field(default_factory=dict)
    power: bool = True
    """Power cuts are to be possible: the catalog is copied at each sync."""
    struck: bool = False
    """An injected failure happened."""
    lost: bool = False
    chunked: bool = False
    """The archive has layout chunks."""
    calm: bool = False
    """Calls of the test's own are neither watched nor do they fail."""

    def __post_init__(self) -> None:
        self.policy = policy(self.base)
        (self.base / "state").mkdir()
        self.store = (chunked_store() if self.chunked else TreeStore)("archive", self.base / "archive")
        self.store.prepare()
        self.memory = ReplicaStore("memory", self.base / "memory", persistent=False)
        self.memory.prepare()
        self.witness = Witness(self.base / "archive", self.read)
        self.start()
        self.catalog.commit()
        self.sync()

    def read(self, path: Path) -> bytes:
        if not self.chunked:
            return path.read_bytes()
        content = self.store.content(tuple(map(os.fsencode, path.relative_to(self.store.root).parts)))
        return bytes(content.read(0, content.size))

    def close(self) -> None:
        self.catalog.close()
        self.store.close()
        self.memory.close()

    # the daemon

    def start(self) -> None:
        self.catalog = Catalog(self.base / "state" / "catalog")
        self._real_sync = self.catalog.sync
        self.catalog.sync = self.sync  # type: ignore[method-assign]
        self.archive = Archive(self.catalog, self.store, "archive", copies=CatalogCopies(self.store))
        self.swept = False
        self.store._session = secrets.token_hex(4)
        self.ready = {}

        async def no_recall(attributes: Attributes, tier: str) -> Replica:
            raise FsError(errno.EIO)

        async def no_copy(replica: Replica) -> Replica:
            raise FsError(errno.EIO)

        def no_fill(attributes: Attributes, tier: str) -> NoReturn:
            raise FsError(errno.EIO)

        async def quiet(ino: int) -> None:
            pass

        async def no_wait(ino: int, version: int, tier: str) -> None:
            pass

        async def no_replay(tier: str) -> None:
            pass

        self.files = OpenFiles(
            catalog=self.catalog,
            policy=self.policy,
            stores={"memory": self.memory},
            matcher=RuleMatcher(self.policy.rules),
            space=Space(self.policy, {"memory": self.memory.usage, "archive": self.store.usage}, lambda tier: 0),
            backing=None,
            recall=no_recall,
            preserve=no_copy,
            fill=no_fill,
            changed=lambda: None,
            quiesce=quiet,
            discard=lambda tier, key: None,
        )
        self.files.orphans.update(self.catalog.orphans())
        self.held = HeldDeletes(self)
        self.names = Namespace(self.catalog, self.files)
        self.fs = Filesystem(self.catalog, self.names, self.files, no_wait, no_replay, lambda attributes: {})

    def sync(self) -> None:
        self._real_sync()
        if not self.power:
            return
        self.calm = True
        kept = self.base / "synced"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.base / "state", kept, ignore=shutil.ignore_patterns("catalog-log"))
        self.calm = False

    def hang_up(self) -> None:
        self.catalog._db.close()
        self.catalog._journal.close()

    def kill(self) -> None:
        """The daemon dies and comes back."""
        self.hang_up()
        self.start()

    def power_cut(self, *, lose_memory: bool) -> None:
        """The catalog is as it was at its last sync, and the memory tier perhaps empty."""
        self.hang_up()
        shutil.rmtree(self.base / "state")
        shutil.copytree(self.base / "synced", self.base / "state")
        if lose_memory:
            self.memory.close()
            shutil.rmtree(self.base / "memory")
            self.memory.prepare()
            self.lost = True
        self.start()
        if lose_memory:
            recover_lost_memory(self.catalog, self.policy, {"memory": self.memory}, self.files, self.archive.storing)
            self.files.orphans.clear()
            self.files.orphans.update(self.catalog.orphans())
        self.names.forget(list(self.files.orphans))
        self.witness.shown(self.expected())

    # the mount

    def directory(self, pick: int) -> int:
        found = [ROOT_INO]
        for parent in found:
            for entry in self.catalog.entries(parent, 0, 1000):
                if stat.S_ISDIR(entry.attributes.mode):
                    found.append(entry.attributes.ino)
        return found[pick % len(found)]

    def write(self, parent: int, name: bytes) -> None:
        found = self.names.lookup(parent, name)
        if found is None:
            fh, _ = self.names.create(parent, name, 0o644, os.O_WRONLY, CALLER)
        elif stat.S_ISREG(found.mode):
            fh = trio.run(self.files.open, found.ino, os.O_WRONLY | os.O_TRUNC)
        else:
            return
        self.now += 1
        content = b"%d " % self.now * (1 + self.now % 7 * 100)
        inode = self.files.handles[fh].inode
        os.pwrite(inode.fd, content, 0)
        self.witness.contents[content] = self.now
        self.by_digest[digest_file(inode.fd, len(content))] = content
        self.files.release(fh)
        self.witness.shown(self.expected())

    def operate(self, kind: str, a: int, name: bytes, b: int, name2: bytes) -> None:
        """One operation on the mount; what the mount would refuse is refused."""
        parent, parent2 = self.directory(a), self.directory(b)
        child = self.names.lookup(parent, name)
        with contextlib.suppress(FsError):
            match kind:
                case "write":
                    self.write(parent, name)
                case "save":
                    self.write(parent, b"tmp")
                    self.names.rename(parent, b"tmp", parent, name, 0, CALLER)
                case "mkdir":
                    self.names.make(parent, name, stat.S_IFDIR | 0o755, CALLER)
                case "symlink":
                    self.names.make(parent, name, stat.S_IFLNK | 0o777, CALLER, target=name2)
                case "fifo":
                    self.names.make(parent, name, stat.S_IFIFO | 0o600, CALLER)
                case "link" if child is not None:
                    self.names.link(child.ino, parent2, name2, CALLER)
                case "remove" if child is not None:
                    remove = self.names.rmdir if stat.S_ISDIR(child.mode) else self.names.unlink
                    remove(parent, name, CALLER)
                case "forget":
                    self.names.forget(list(self.files.orphans))
                case "rename" | "exchange" if child is not None:
                    other = self.names.lookup(parent2, name2)
                    if not self.below(parent2, child.ino) and (other is None or not self.below(parent, other.ino)):
                        flags = RENAME_EXCHANGE if kind == "exchange" else 0
                        self.names.rename(parent, name, parent2, name2, flags, CALLER)
                case "chmod" if child is not None and not stat.S_ISLNK(child.mode):
                    trio.run(self.fs.set_attributes, child.ino, Change(mode=0o600 | a << 3 | b), CALLER)
                case "xattr" if child is not None and stat.S_ISREG(child.mode):
                    trio.run(self.fs.set_xattr, child.ino, b"user.x", name2, CALLER)
        self.witness.shown(self.expected())

    def below(self, directory: int, top: int) -> bool:
        """The kernel refuses to move a directory into itself, or over one above, before tierfs is asked."""
        while directory not in (ROOT_INO, top):
            path = self.catalog.path_of(directory)
            assert path is not None
            above = self.catalog.resolve(path[:-1])
            assert above is not None
            directory = above.ino
        return directory == top

    # the archive's side

    def drain(self, count: int) -> None:
        """Copy some contents that wait."""
        for ino, version, size, *_ in self.catalog.wanted_contents(count):
            if (ino, version) in self.ready or self.archive.storing(ino, version):
                continue
            source = self.catalog.replica(ino, version, "memory")
            if source is None:
                continue
            transfer = Transfer(ino, version, "archive", size, threading.Event())
            copied = copy_to_store(
                source, self.memory, self.store, f"{ino:x}-1", transfer, Throttle(None), stable=True
            )
            copied.temp.close()
            self.ready[ino, version] = Ready(copied.temp.name, source.size, copied.digest)

    def replay(self, crash: str | None = None, at: int = 0) -> bool:
        """One batch. ``crash`` comes at the system call ``at``, or else between the last step and the commit: an error
        of the archive (io), the daemon's death (kill), a power cut (power) that also empties the memory (loss)."""
        try:
            if not self.swept:
                self.catalog.commit()
                self.archive.sweep()
                self.swept = True
            batch = self.archive.next_batch(BATCH, self.ready)
            if batch is None:
                return False
            with self.dying(crash, at):
                self.archive.execute(batch)
            if crash in ("kill", "power", "loss"):
                raise Crash
        except Crash:
            if crash == "kill":
                self.kill()
            else:
                self.power_cut(lose_memory=crash == "loss")
            return True
        except (TierError, OSError):
            assert crash == "io"
            return True
        self.archive.commit(batch)
        self.held.release()
        for replica in batch.stored.values():
            self.ready.pop((replica.ino, replica.version), None)
        for key in list(self.ready):
            attributes = self.catalog.attributes(key[0])
            if attributes is None or attributes.version != key[1]:
                self.store.discard(self.ready.pop(key).temp)
        return True

    @contextlib.contextmanager
    def dying(self, crash: str | None, at: int) -> Iterator[None]:
        left = at
        real = {name: getattr(os, name) for name in CALLS}

        def wrap(call: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*args: object, **kwargs: object) -> object:
                nonlocal left
                if self.calm:
                    return call(*args, **kwargs)
                self.look()
                left -= 1
                if crash is not None and left < 0:
                    self.struck = True
                    raise OSError(errno.EIO, "injected") if crash == "io" else Crash
                result = call(*args, **kwargs)
                self.look()
                return result

            return wrapped

        for name, call in real.items():
            setattr(os, name, wrap(call))
        try:
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)
        self.look()

    # what must hold

    def look(self) -> None:
        """What may be seen at any moment: whole files, in order, and everything that is called durable."""
        found = self.witness.look() | self.witness.set_aside()
        pending = self.archive.pending
        for row in self.catalog.all_published():
            if abs(row.occupant) != row.ino or (pending is not None and row.ino in pending.gone):
                continue
            for replica in self.catalog.replicas(row.ino):
                if replica.tier == "archive" and replica.digest is not None:
                    accepted = {self.by_digest[replica.digest]}
                    if pending is not None and row.ino in pending.stored:
                        newer = pending.stored[row.ino].digest
                        assert newer is not None
                        accepted.add(self.by_digest[newer])
                    assert accepted & found, f"inode {row.ino} is called durable and is not there"

    def settle(self) -> None:
        """Everything drained and replayed, undisturbed."""
        while self.catalog.operations(1) or self.archive.pending is not None:
            self.drain(1000)
            self.replay()

    def expected(self, parent: int = ROOT_INO, above: str = "") -> dict[str, tuple[object, ...]]:
        found: dict[str, tuple[object, ...]] = {}
        for entry in self.catalog.entries(parent, 0, 1000):
            attributes, path = entry.attributes, above + os.fsdecode(entry.name)
            kind, mode = stat.S_IFMT(attributes.mode), stat.S_IMODE(attributes.mode)
            if kind == stat.S_IFDIR:
                found[path] = (kind, mode)
                found |= self.expected(attributes.ino, path + "/")
            elif kind == stat.S_IFREG:
                content = self.content(attributes)
                xattrs = dict(self.catalog.xattrs(attributes.ino))
                found[path] = ("lost",) if content is None else (kind, mode, content, xattrs, attributes.nlink)
            elif kind == stat.S_IFLNK:
                found[path] = (kind, self.catalog.target(attributes.ino), attributes.nlink)
            else:
                found[path] = (kind, mode, attributes.nlink)
        return found

    def content(self, attributes: Attributes) -> bytes | None:
        """Bytes of the current version, None when a power cut took them."""
        for replica in self.catalog.replicas(attributes.ino):
            if replica.version == attributes.version and replica.tier == "memory":
                fd = self.memory.open(replica.key)
                try:
                    return os.pread(fd, 1 << 20, 0)
                finally:
                    os.close(fd)
            if replica.version == attributes.version and replica.digest is not None:
                return self.by_digest[replica.digest]
        return None

    def shown(self) -> dict[str, tuple[object, ...]]:
        found: dict[str, tuple[object, ...]] = {}
        root = self.base / "archive"
        for directory, names, files in os.walk(root):
            if ".tierfs" in names:
                names.remove(".tierfs")
            for name in names + files:
                path = Path(directory, name)
                info = path.lstat()
                kind, mode = stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode)
                shown: tuple[object, ...] = (kind, mode) if kind == stat.S_IFDIR else (kind, mode, info.st_nlink)
                if kind == stat.S_IFLNK:
                    shown = (kind, os.readlink(os.fsencode(path)), info.st_nlink)
                elif kind == stat.S_IFREG:
                    xattrs = {os.fsencode(n): os.getxattr(path, n) for n in os.listxattr(path) if n.startswith("user.")}
                    shown = (kind, mode, self.read(path), xattrs, info.st_nlink)
                found[str(path.relative_to(root))] = shown
        return found

    def check(self) -> None:
        """The archive's tree is the mount's."""
        self.settle()
        self.look()
        expected, shown = self.expected(), self.shown()
        lost = [path for path, what in expected.items() if what == ("lost",)]
        for path in lost:
            del expected[path]
            shown.pop(path, None)
        if lost:  # what such a file replaced stays at its name, perhaps as one more link
            expected, shown = ({path: what[:4] for path, what in tree.items()} for tree in (expected, shown))
        assert shown == expected
        self.kill()
        self.archive.sweep()
        left = [n for n in os.listdir(self.base / "archive" / ".tierfs" / "tmp") if not n.startswith("exchange")]
        assert left == []
        assert self.lost or not self.witness.set_aside()
        if not self.lost:
            problems = check_tiers(self.catalog, {}, self.store, lambda done, total, what: None)
            assert problems == []
