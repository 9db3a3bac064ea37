"""Times that were set while nobody wrote to a file stay when somebody opens it for writing, wherever its bytes are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from held_world import CALLER, World, inside

from tierfs.fs.filesystem import Change
from tierfs.types import Attributes

MTIME, ATIME = 1_234_567_890_123_456_789, 1_111_111_111_987_654_321
DATA = b"content"
RULES = '[{match: "ondisk*", ack: nvme}, {match: "**"}]'


class Files(World):
    def stat(self, path: str) -> Attributes:
        return self.parts.names.attributes(self.ino(path))

    def times(self, path: str) -> tuple[int, int]:
        found = self.stat(path)
        return found.atime_ns, found.mtime_ns

    def open(self, path: str, flags: int) -> int:
        return trio.run(self.parts.files.open, self.ino(path), flags)

    def release(self, fh: int) -> None:
        inside(self.parts.files.release, fh)

    def set(self, path: str, change: Change) -> None:
        trio.run(self.parts.filesystem.set_attributes, self.ino(path), change, CALLER)

    def evict(self, path: str, *tiers: str) -> None:
        found = self.stat(path)
        for tier in tiers:
            self.parts.migrator.evictor.evict(found.ino, found.version, tier)
        trio.run(self.parts.migrator.remove_discarded)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path, rules=RULES)
    yield made
    made.close()


def closed(world: Files) -> str:
    world.write("file", DATA)
    return "file"


def drained(world: Files) -> str:
    world.write("file", DATA)
    world.drain("file", "nvme")
    return "file"


def on_a_disk_below(world: Files) -> str:
    drained(world)
    world.evict("file", "memory")
    return "file"


def on_the_archive(world: Files) -> str:
    world.write("file", DATA)
    world.durable("file")
    world.evict("file", "memory", "nvme")
    return "file"


def on_a_disk(world: Files) -> str:
    world.write("ondisk", DATA)
    return "ondisk"


def durable_on_a_disk(world: Files) -> str:
    world.write("ondisk", DATA)
    world.durable("ondisk")
    return "ondisk"


def outgrowing(world: Files) -> str:
    """The next open for writing moves it one tier down."""
    world.write("file", DATA)
    world.parts.files._outgrows = lambda *_: ["nvme"]  # type: ignore[method-assign]
    return "file"


PLACES = [closed, drained, on_a_disk_below, on_the_archive, on_a_disk, durable_on_a_disk, outgrowing]
each_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
with_and_without_a_reader = pytest.mark.parametrize("read", [False, True], ids=["alone", "with a reader"])
Place = Callable[[Files], str]


@each_place
@with_and_without_a_reader
def test_an_open_for_writing_shows_the_times_that_were_set(world: Files, place: Place, read: bool) -> None:
    path = place(world)
    reader = world.open(path, os.O_RDONLY) if read else None
    world.set(path, Change(atime_ns=ATIME, mtime_ns=MTIME))
    writer = world.open(path, os.O_RDWR)
    assert world.times(path) == (ATIME, MTIME)
    another = world.open(path, os.O_WRONLY)
    for handle in (writer, another, reader):
        if handle is not None:
            world.release(handle)
    assert world.times(path) == (ATIME, MTIME)
    assert world.read(path) == DATA
    world.check()


@each_place
@with_and_without_a_reader
def test_an_open_for_writing_alone_changes_no_times(world: Files, place: Place, read: bool) -> None:
    path = place(world)
    before = world.times(path)
    reader = world.open(path, os.O_RDONLY) if read else None
    writer = world.open(path, os.O_RDWR)
    assert world.times(path) == before
    world.release(writer)
    if reader is not None:
        world.release(reader)
    assert world.times(path) == before


@each_place
def test_a_write_moves_mtime_and_not_atime(world: Files, place: Place) -> None:
    path = place(world)
    world.set(path, Change(atime_ns=ATIME, mtime_ns=MTIME))
    writer = world.open(path, os.O_RDWR)
    world.parts.write(writer, 0, b"C")
    atime, mtime = world.times(path)
    assert atime == ATIME
    assert mtime > MTIME
    world.release(writer)
    assert world.times(path) == (ATIME, mtime)


@each_place
def test_one_of_the_times_set_leaves_the_other(world: Files, place: Place) -> None:
    path = place(world)
    atime = world.stat(path).atime_ns
    world.set(path, Change(mtime_ns=MTIME))
    world.release(world.open(path, os.O_RDWR))
    assert world.times(path) == (atime, MTIME)
    world.set(path, Change(atime_ns=ATIME))
    world.release(world.open(path, os.O_RDWR))
    assert world.times(path) == (ATIME, MTIME)


@each_place
def test_times_set_before_a_daemon_died_with_the_file_open_for_writing_stay(world: Files, place: Place) -> None:
    """What the next daemon finds OPEN it closes with the times of the backing file."""
    path = place(world)
    world.set(path, Change(mtime_ns=MTIME))
    world.open(path, os.O_RDWR)
    world.restart()
    assert world.times(path)[1] == MTIME


def test_a_file_that_may_have_changed_through_a_mapping_keeps_the_time_that_was_set(world: Files) -> None:
    world.write("file", DATA)
    world.set("file", Change(mtime_ns=MTIME))
    assert world.parts.files.renew(world.stat("file"))
    assert world.times("file")[1] == MTIME
