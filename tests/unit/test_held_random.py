"""Any history of saves, deletes, renames and drains, then the memory is lost: what comes back is what was, and the
report says what happened."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from held_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierfs.errors import FsError

FILES = st.sampled_from(["a", "b", "d/a"])
NAMES = st.sampled_from(["a", "b", "d/a", "d", "e", "e/a"])
SAVE = st.tuples(st.sampled_from(["write", "append", "save", "unlink"]), FILES, FILES)
DRAIN = st.tuples(st.just("drain"), st.integers(0, 3), st.integers(0, 1))
EVENTS = st.one_of(
    SAVE,
    SAVE,
    SAVE,
    DRAIN,
    DRAIN,
    DRAIN,
    st.tuples(st.sampled_from(["mkdir", "rmdir", "rename", "rename", "rename"]), NAMES, NAMES),
    st.tuples(st.sampled_from(["replay", "replay", "settle", "restart"])),
    st.tuples(st.sampled_from(["reboot", "durable"])),
)
DURABLE = [("mkdir", "d", "d"), *(("write", path, path) for path in ("a", "b", "d/a"))]
AFTER = st.one_of(
    st.tuples(st.sampled_from(["save", "save", "unlink"]), FILES, FILES),
    st.tuples(st.sampled_from(["save", "save", "unlink"]), FILES, FILES),
    st.tuples(st.just("rename"), NAMES, NAMES),
    DRAIN,
    st.tuples(st.sampled_from(["replay", "settle"])),
)
"""Few drains: most of it is lost."""
Tree = dict[str, tuple[int, bytes | None]]
"""Path → (inode, content); None for directories."""


def names(tree: Tree) -> dict[str, tuple[int, str, int]]:
    """Path → (inode of the directory, name in it, inode): the same when only a directory above was renamed."""
    found = {}
    for path, (ino, _) in tree.items():
        above, _, name = path.rpartition("/")
        found[path] = (tree[above][0] if above else 1, name, ino)
    return found


@dataclass
class History:
    world: World
    contents: dict[int, bytes] = field(default_factory=dict)
    """Inode → bytes at its last close."""
    closed: dict[bytes, int] = field(default_factory=dict)
    """Content → the first state after its close."""
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    """Inode → its contents since the last loss, in order."""
    durable: set[bytes] = field(default_factory=set)
    """Contents that were on a persistent tier at some time."""
    states: list[Tree] = field(default_factory=list)
    """The names before each step, since the last loss."""
    marks: list[int] = field(default_factory=list)
    """The last operation before each of them."""
    writes: int = 0

    def tree(self) -> Tree:
        found: Tree = {}
        directories = [(1, "")]
        for ino, above in directories:
            for entry in self.world.parts.catalog.entries(ino, 0, 1000):
                path, child = above + os.fsdecode(entry.name), entry.attributes
                if child.mode & 0o170000 == 0o040000:
                    directories.append((child.ino, path + "/"))
                    found[path] = (child.ino, None)
                else:
                    found[path] = (child.ino, self.contents[child.ino])
        return found

    def look(self) -> None:
        for tier in self.world.persistent:
            self.durable.update(self.world.on(tier))

    def mark(self) -> None:
        catalog = self.world.parts.catalog
        self.states.append(self.tree())
        self.marks.append(max(catalog.last_operation(), catalog.archived))

    def happen(self, event: tuple[object, ...]) -> None:
        self.mark()
        match event:
            case ("reboot",):
                self.reboot()
            case ("drain", int(which), int(level)):
                self.drain(which, self.world.persistent[level % len(self.world.persistent)])
            case ("replay",):
                self.world.replay()
            case ("durable",):
                self.world.drain_all()
            case ("settle",):
                self.world.settle()
            case ("restart",):
                self.world.restart()
            case (str(kind), str(path), str(other)):
                if all(self.world.find(name.rpartition("/")[0]) for name in (path, other)):
                    with contextlib.suppress(FsError):  # what the mount refuses
                        self.operate(kind, path, other)
        self.look()

    def operate(self, kind: str, path: str, other: str) -> None:
        world = self.world
        there = world.find(path)
        directory = there is not None and there.mode & 0o170000 == 0o040000
        match kind:
            case "write" | "append" | "save" if not directory:
                self.writes += 1
                data = b"%d " % self.writes * 50
                if kind == "save" and world.find(path + ".tmp") is None:
                    world.write(path + ".tmp", data)
                    self.has_closed(path + ".tmp", data)
                    self.mark()
                    world.rename(path + ".tmp", path)
                else:
                    world.write(path, data, truncate=kind != "append")
                    self.has_closed(path, data)
            case "unlink" if there is not None and not directory:
                world.unlink(path)
            case "mkdir":
                world.mkdir(path)
            case "rmdir" if directory:
                world.rmdir(path)
            case "rename" if there is not None and not (other + "/").startswith(path + "/"):
                world.rename(path, other)

    def has_closed(self, path: str, data: bytes) -> None:
        ino = self.world.ino(path)
        self.contents[ino] = data
        self.closed[data] = len(self.states)
        self.versions.setdefault(ino, []).append(data)

    def first_close(self, ino: int) -> int:
        """The state after the first close of the file of which nothing is left, nor of a later one."""
        first = len(self.states)
        for content in reversed(self.versions.get(ino, [])):
            if content in self.durable:
                break
            first = self.closed[content]
        return first

    def drain(self, which: int, tier: str) -> None:
        catalog = self.world.parts.catalog
        if tier == "archive":
            queue = [ino for ino, version, *_ in catalog.wanted_contents(100) if not self.is_ready(ino, version)]
        else:
            queue = [ino for ino, _, name, *_ in catalog.wanted_drains(100) if name == tier]
        if queue:
            found = catalog.attributes(queue[which % len(queue)])
            assert found is not None
            self.world.drain_inode(found, tier)

    def is_ready(self, ino: int, version: int) -> bool:
        return (ino, version) in self.world.parts.migrator.ready

    # the loss

    def reboot(self) -> None:
        before = self.states[-1]
        lost = [ino for ino, content in before.values() if content is not None and content not in self.durable]
        first = self.first_loss([self.first_close(ino) for ino in lost if ino in self.versions])
        report = self.world.reboot()
        after: Tree = {}
        unreadable: list[str] = []
        for path, (ino, content) in self.after().items():
            after[path] = (ino, content)
            if content == b"":
                unreadable.append(path)
        if first is None:
            assert after == before
            assert (report.rolled_back, report.lost, report.undone) == ([], [], [])
        else:
            self.check_prefix(self.states[first], before, after)
        self.check_later(before, after)
        assert sorted(entry.path for entry in report.lost if entry.path in after) == sorted(unreadable)
        was = names(before)
        came = {path for path, entry in names(after).items() if entry not in was.values()}
        came -= {path for path in came if before.get(path, (0, None))[0] == after[path][0]}  # in another directory
        assert {entry.path for entry in report.undone} == came
        changed = {path for path, (ino, content) in after.items() if before.get(path, (0, b""))[0] == ino}
        changed = {path for path in changed if after[path][1] != before[path][1] and after[path][1] != b""}
        assert changed <= {entry.path for entry in report.rolled_back}
        for path in unreadable:
            self.world.unlink(path)
        for ino, content in after.values():
            if content:
                self.contents[ino] = content
        self.states, self.marks = [], []
        self.mark()
        self.closed, self.versions = {}, {}

    def first_loss(self, lost: list[int]) -> int | None:
        """The state that the names go back to. A file that was deleted after a loss is one, unless it was durable; and
        the archive does not go back."""
        if not lost:
            return None
        first = min(lost)
        for number in range(len(self.states) - 1, 0, -1):
            gone = dict(self.states[number - 1].values())
            for ino in gone.keys() - dict(self.states[number].values()).keys():
                content = gone[ino]
                if number > first and content in self.closed and content not in self.durable:
                    first = min(first, self.first_close(ino))
        archived = self.world.parts.catalog.archived
        while first + 1 < len(self.states) and self.marks[first] < archived:
            first += 1
        return first

    def after(self) -> Tree:
        """As `tree`, but what can be read; b"" for what cannot."""
        found: Tree = {}
        for path in list(self.paths()):
            attributes = self.world.find(path)
            assert attributes is not None
            if attributes.mode & 0o170000 == 0o040000:
                found[path] = (attributes.ino, None)
                continue
            try:
                content = self.world.read(path)
            except FsError:
                content = b""
            assert not content or content in self.durable, "whole, and what was once closed"
            found[path] = (attributes.ino, content)
        return found

    def paths(self) -> list[str]:
        found, directories = [], [(1, "")]
        for ino, above in directories:
            for entry in self.world.parts.catalog.entries(ino, 0, 1000):
                found.append(above + os.fsdecode(entry.name))
                if entry.attributes.mode & 0o170000 == 0o040000:
                    directories.append((entry.attributes.ino, found[-1] + "/"))
        return found

    def check_prefix(self, then: Tree, before: Tree, after: Tree) -> None:
        """What was durable of the state at the first lost close is as it was then, but for removed directories whose
        name a durable file has."""
        for path, (ino, content) in then.items():
            if content is None:
                empty = not any(other.startswith(path + "/") for other in after)
                gave_way = ino not in dict(before.values()) and after[path] == before.get(path) and empty
                assert after[path][0] == ino or gave_way, f"{path} was a directory"
            elif content in self.durable:
                assert after[path] == (ino, content), path

    def check_later(self, before: Tree, after: Tree) -> None:
        """What was made later and is durable is somewhere, unless what it replaced is back."""
        there = {content for _, content in after.values()}
        for path, (_, content) in before.items():
            if content is not None and content in self.durable and content not in there:
                assert after[path][1], f"{content[:9]!r} of {path} is gone"


STACKS = pytest.mark.parametrize("disks", [("nvme",), ()], ids=["memory, nvme, archive", "memory, archive"])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, max_size=30))
@STACKS
def test_what_comes_back_is_what_was(disks: tuple[str, ...], events: list[tuple[object, ...]]) -> None:
    run(disks, [("mkdir", "d", "d"), *events])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(AFTER, max_size=10))
@STACKS
def test_what_was_durable_when_much_was_lost_is_there(disks: tuple[str, ...], events: list[tuple[object, ...]]) -> None:
    """On the mount and, once drained, on the archive."""
    run(disks, [*DURABLE, ("durable",), *events])


def run(disks: tuple[str, ...], events: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as top:
        world = World(Path(top), disks)
        try:
            history = History(world)
            for event in events:
                history.happen(event)
            history.happen(("reboot",))
            world.check()
        finally:
            world.close()
