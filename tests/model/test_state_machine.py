"""Any sequence of operations, copies, evictions, losses and restarts: the mount is what an ordinary directory is.

Each operation is done on both, with the same outcome, and after every step everything that can be seen is compared.
Copies, evictions, recalls, scrubs and new daemons change nothing of it, times included. After a loss of the memory tier
the mount is what docs/SEMANTICS.md allows (`Machine.lose_memory`), and the reference becomes that.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference_world import Mounted, Reference, Tree, comparable, directory_tree

from tierfs.errors import FsError
from tierfs.fs.namespace import RENAME_EXCHANGE, RENAME_NOREPLACE

PATHS = st.sampled_from(["a", "b", "c", "d", "e", "d/a", "d/b", "d/e", "e/a", "d/e/a"])
LEAVES = st.sampled_from(["a", "b", "d/a", "d/b", "e/a"])
MODES = st.sampled_from([0o600, 0o640, 0o755])
TIMES = st.integers(1, 9).map(lambda n: n * 10**17 + 123_456_789)
SIZES = st.sampled_from([0, 1, 7, 5000, 70_000])
TIERS = st.sampled_from(["nvme", "archive"])
OPEN = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDWR,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_TRUNC,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
    ]
)
ONCE = 1 << 30
"""Number of a handle that a single step opens and closes."""


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._top = tempfile.TemporaryDirectory(dir=base)
        top = Path(self._top.name)
        (top / "mount").mkdir()
        self.mounted, self.reference = Mounted(top / "mount"), Reference(top / "reference")
        self.handles: list[int] = []
        self.writes = 0
        self.before: Tree = {}
        """As of the last step."""
        self.floor: Tree = {}
        """As it was when last all of it was durable."""
        self.touched: set[str] = set()
        """Paths that changed since then."""
        self.closed: dict[int, set[bytes]] = {}
        """File → what it held when it was closed, or when all was flushed."""

    def teardown(self) -> None:
        try:
            for number in list(self.handles):
                self.shut(number)
            self.same()
            assert self.mounted.problems() == []
            for path, seen in self.before.items():
                if stat.S_ISREG(seen.kind):
                    assert self.mounted.read_all(path) == seen.content, path
            self.drain_all()
            self.same()
            assert self.mounted.problems() == []
            assert self.mounted.held() == (0, 0)
            assert not self.mounted.parts.catalog.orphans()
        finally:
            self.dispose()

    def dispose(self) -> None:
        self.mounted.close()
        self.reference.close_all()
        self._top.cleanup()

    def both(self, name: str, *args: object) -> bool:
        """Whether it worked on both; it fails with one errno on both."""

        def outcome(side: object) -> object:
            try:
                return getattr(side, name)(*args)
            except (FsError, OSError) as error:
                return error if error.errno is None else f"errno {error.errno} {os.strerror(error.errno)}"

        expected, found = outcome(self.reference), outcome(self.mounted)
        assert found == expected, f"{name}{args}"
        return not isinstance(found, str)

    def data(self, size: int) -> bytes:
        self.writes += 1
        return (b"%d." % self.writes) * (size // 3 + 1)

    def pick(self, which: int) -> int:
        return self.handles[which % len(self.handles)]

    # operations

    @initialize(seed=st.integers(0, 3))
    def begin(self, seed: int) -> None:
        if seed:
            self.mkdir("d")
            self.save("d/a", 7)
        if seed > 1:
            self.save("a", 5000)
            self.drain_all()

    @rule(path=LEAVES, size=SIZES)
    def save(self, path: str, size: int) -> None:
        self.write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0, size)

    @rule(path=PATHS, flags=OPEN.filter(bool), offset=st.sampled_from([-1, 0, 5, 6000]), size=SIZES)
    def write(self, path: str, flags: int, offset: int, size: int) -> None:
        if self.both("open", ONCE, path, flags):
            self.both("put", ONCE, offset, self.data(size))
            self.both("shut", ONCE)

    @rule(path=LEAVES, size=SIZES)
    def save_by_rename(self, path: str, size: int) -> None:
        self.save("tmp", size)
        self.both("move", "tmp", path, 0)

    @rule(path=PATHS, flags=OPEN)
    def open(self, path: str, flags: int) -> None:
        self.writes += 1
        found = self.before.get(path)
        if flags == os.O_RDONLY and found is not None and stat.S_ISDIR(found.kind):
            return  # a directory is opened by another request
        if len(self.handles) < 4 and self.both("open", self.writes, path, flags):
            self.handles.append(self.writes)

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 3), offset=st.sampled_from([-1, 0, 5, 6000]), size=SIZES)
    def put(self, which: int, offset: int, size: int) -> None:
        number = self.pick(which)
        if self.mounted.handles[number].flags & os.O_ACCMODE != os.O_RDONLY:
            self.both("put", number, offset, self.data(size))

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 3), size=SIZES)
    def cut(self, which: int, size: int) -> None:
        number = self.pick(which)
        if self.mounted.handles[number].flags & os.O_ACCMODE != os.O_RDONLY:
            self.both("cut", number, size)

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        self.shut(self.pick(which))

    def shut(self, number: int) -> None:
        self.handles.remove(number)
        self.both("shut", number)

    @rule(path=PATHS, size=SIZES)
    def truncate(self, path: str, size: int) -> None:
        self.both("truncate", path, size)

    @rule(path=PATHS)
    def mkdir(self, path: str) -> None:
        self.both("mkdir", path)

    @rule(path=PATHS)
    def remove(self, path: str) -> None:
        self.both("rmdir" if self.writes % 2 else "unlink", path) or self.both(
            "unlink" if self.writes % 2 else "rmdir", path
        )

    @rule(path=PATHS, to=PATHS, flags=st.sampled_from([0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE]))
    def rename(self, path: str, to: str, flags: int) -> None:
        self.both("move", path, to, flags)

    @rule(path=PATHS, to=PATHS)
    def link(self, path: str, to: str) -> None:
        self.both("link", path, to)

    @rule(path=PATHS)
    def symlink(self, path: str) -> None:
        self.both("symlink", path)

    @rule(path=PATHS, mode=MODES)
    def chmod(self, path: str, mode: int) -> None:
        self.both("chmod", path, mode)

    @rule(path=PATHS, mtime_ns=TIMES)
    def utime(self, path: str, mtime_ns: int) -> None:
        self.both("utime", path, mtime_ns)

    @rule(path=PATHS, value=st.binary(max_size=4), flags=st.sampled_from([0, 0, os.XATTR_CREATE, os.XATTR_REPLACE]))
    def setxattr(self, path: str, value: bytes, flags: int) -> None:
        self.both("setxattr", path, value, flags)

    @rule(path=PATHS)
    def removexattr(self, path: str) -> None:
        self.both("removexattr", path)

    # what changes nothing

    def unseen(self, work: Callable[[], object]) -> None:
        before = self.mounted.tree()
        work()
        assert self.mounted.tree() == before

    @rule(tier=TIERS)
    def drain(self, tier: str) -> None:
        self.unseen(lambda: self.mounted.drain_to(tier))

    @rule()
    def replay(self) -> None:
        self.unseen(self.mounted.replay)

    @rule()
    def drain_all(self) -> None:
        """Everything to the archive, which then is as the mount."""
        if self.mounted.writers():
            return
        self.unseen(self.mounted.drain_all)
        shown = directory_tree(self.mounted.top / "archive", ".tierfs")
        assert archived(shown) == archived(self.reference.tree())
        self.settled()

    @rule(tier=TIERS)
    def flush(self, tier: str) -> None:
        """By the migrator's own loop, also what is open for writing."""
        self.unseen(lambda: self.mounted.flush(tier))
        self.remember(self.before, writing=True)

    @rule(path=PATHS, tier=st.sampled_from(["memory", "nvme"]))
    def evict(self, path: str, tier: str) -> None:
        if path in self.before:
            self.unseen(lambda: self.mounted.evict(path, tier))

    @rule(path=PATHS)
    def recall(self, path: str) -> None:
        if path in self.before:
            self.unseen(lambda: self.mounted.recall(path))

    @rule(path=PATHS)
    def read(self, path: str) -> None:
        seen = self.before.get(path)
        if seen is not None and stat.S_ISREG(seen.kind):
            self.unseen(lambda: self.mounted.read_all(path))
            assert self.mounted.read_all(path) == seen.content

    @rule()
    def scrub(self) -> None:
        self.unseen(self.mounted.scrub)

    @rule()
    def kill(self) -> None:
        """The next daemon goes on with the open handles."""
        self.unseen(self.mounted.kill)

    @rule()
    def remount(self) -> None:
        self.reference.close_all()
        self.handles.clear()
        self.unseen(self.mounted.remount)

    # losses

    def settled(self) -> None:
        self.floor, self.touched = self.mounted.tree(), set()

    @rule()
    def lose_memory(self) -> None:
        """What is durable is whole, and nothing that was durable before everything that was lost has changed."""
        before, mounted = self.before, self.mounted
        inos = {path: mounted.ino(path) for path in before}
        files = {path for path, seen in before.items() if stat.S_ISREG(seen.kind)}
        writing = {inode.ino for inode in mounted.parts.files.inodes.values() if inode.writers}
        durable = {path for path in files if mounted.is_durable(path) and inos[path] not in writing}
        self.reference.close_all()
        self.handles.clear()
        mounted.lose_memory()
        after = mounted.tree()
        kept = {mounted.ino(path): seen for path, seen in after.items()}
        for path, seen in after.items():
            if stat.S_ISREG(seen.kind) and seen.content is not None:
                assert seen.content in self.closed.get(mounted.ino(path), ()), f"{path} is not as it was at any close"
        if durable == files:
            assert after == before, "nothing was lost"
        for path, seen in self.floor.items():
            if path not in self.touched:
                found = after[path]
                same = found.kind == seen.kind if stat.S_ISDIR(seen.kind) else found == seen
                assert same, f"{path} was durable before anything that was lost"
        for path in durable:
            there = kept.get(inos[path]) or after.get(path)
            assert there is not None, f"{path} was durable and is gone"
            assert there.content is not None, f"{path} was durable and cannot be read"
        for path, seen in after.items():
            if stat.S_ISREG(seen.kind) and seen.content is None:
                with pytest.raises(FsError):
                    mounted.read_all(path)
                mounted.unlink(path)
        self.reference.become(mounted.tree())
        self.settled()

    # after every step

    @invariant()
    def same(self) -> None:
        now = self.mounted.tree()
        assert comparable(now) == comparable(self.reference.tree())
        for number in self.handles:
            assert self.mounted.get(number) == self.reference.get(number)
        changed = {path for path in now.keys() | self.floor.keys() if now.get(path) != self.floor.get(path)}
        self.touched |= changed
        self.remember(now)
        self.before = now

    def remember(self, tree: Tree, *, writing: bool = False) -> None:
        inodes = self.mounted.parts.files.inodes
        for path, seen in tree.items():
            ino = self.mounted.ino(path)
            if isinstance(seen.content, bytes) and (writing or ino not in inodes or not inodes[ino].writers):
                self.closed.setdefault(ino, set()).add(seen.content)


def archived(tree: Tree) -> dict[str, tuple[object, ...]]:
    """What the archive shows of a tree; directories there have times of their own."""
    return {
        path: (
            seen.kind,
            seen.mode,
            seen.content,
            seen.xattrs,
            seen.first,
            None if stat.S_ISDIR(seen.kind) else seen.comparable().mtime_ns,
        )
        for path, seen in tree.items()
    }


QUICK = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_mount_is_what_a_directory_is() -> None:
    run_state_machine_as_test(Machine, settings=QUICK)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_mount_is_what_a_directory_is_at_length() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(QUICK, max_examples=3000, stateful_step_count=60, derandomize=False, print_blob=True)
    )
