"""The archive follows the mount through any history of operations, crashes and power cuts."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
archive_world = importlib.import_module("archive_world")
World = archive_world.World

NAMES = st.sampled_from([b"a", b"b", b"log"])
PLACES = st.integers(0, 3)
OPERATIONS = st.tuples(
    st.sampled_from(
        ["write", "write", "save", "mkdir", "symlink", "link", "remove", "rename", "rename", "exchange", "chmod"]
    ),
    PLACES,
    NAMES,
    PLACES,
    NAMES,
)
CHANGES = st.tuples(st.sampled_from(["fifo", "xattr", "forget"]), PLACES, NAMES, PLACES, NAMES)
CRASHES = st.tuples(st.sampled_from(["io", "kill", "power", "loss"]), st.integers(0, 40))
EVENTS = st.one_of(
    OPERATIONS,
    OPERATIONS,
    OPERATIONS,
    CHANGES,
    st.tuples(st.just("drain"), st.integers(1, 4)),
    st.tuples(st.just("drain"), st.just(1000)),
    st.just(("replay",)),
    CRASHES,
    st.just(("sync",)),
)


@pytest.fixture
def world() -> Iterator[object]:
    with fresh() as made:
        yield made


class fresh:
    """A world in memory, for as long as the block runs."""

    def __init__(self, power: bool = True, chunked: bool = False) -> None:
        self._power, self._chunked = power, chunked

    def __enter__(self):  # type: ignore[no-untyped-def]
        self._directory = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self._world = World(Path(self._directory.__enter__()), power=self._power, chunked=self._chunked)
        return self._world

    def __exit__(self, *error: object) -> None:
        self._world.close()
        self._directory.cleanup()


def run(world, events) -> None:  # type: ignore[no-untyped-def]
    for event in events:
        match event:
            case ("drain", count):
                world.drain(count)
            case ("replay",):
                world.replay()
            case ("sync",):
                world.catalog.commit()
                world.catalog.sync()
            case ("io" | "kill" | "power" | "loss" as crash, at):
                world.replay(crash, at)
            case operation:
                world.operate(*operation)


def op(kind: str, name: str, name2: str = "", a: int = 0, b: int = 0) -> tuple[str, int, bytes, int, bytes]:
    return kind, a, name.encode(), b, name2.encode()


ROTATE = [op("write", "log"), ("drain", 9), ("replay",), op("rename", "log", "b"), op("write", "log"), ("drain", 9)]
"""The old log's rename and the new log wait together."""


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, max_size=60))
@example([*ROTATE, ("replay",), ("kill", 40), ("replay",)])
@example([*ROTATE, ("power", 40), ("power", 40)])
def test_the_archive_follows_through_crashes(events) -> None:  # type: ignore[no-untyped-def]
    with fresh(power=any(event[0] in ("power", "loss") for event in events)) as world:
        run(world, events)
        world.check()


CRASH = ["io", "kill", "power"]


def crash_everywhere(history, crash: str, chunked: bool = False) -> None:  # type: ignore[no-untyped-def]
    """``history``, then its replay crashing at each system call in turn, then all of it."""
    for at in range(400):
        with fresh(power=crash == "power", chunked=chunked) as world:
            run(world, history)
            while world.catalog.operations(1):
                world.drain(1000)
                world.replay(crash, at)
                world.drain(1000)
                world.replay()
                world.catalog.commit()
                world.catalog.sync()
            world.check()
            if not world.struck:
                return
    pytest.fail("the replay has no end")


HISTORIES = {
    "log rotation": ROTATE,
    "swap by three renames": [
        op("write", "a"), op("write", "b"), ("drain", 9), ("replay",),
        op("rename", "a", "log"), op("rename", "b", "a"), op("rename", "log", "b"),
    ],
    "exchange of files": [op("write", "a"), op("write", "b"), ("drain", 9), ("replay",), op("exchange", "a", "b")],
    "exchange of a directory and a file": [
        op("mkdir", "a"), op("write", "b"), op("write", "b", a=1), ("drain", 9), ("replay",), op("exchange", "a", "b"),
    ],
    "exchange of a directory and a file that is not there yet": [
        op("mkdir", "a"), op("write", "b"), op("exchange", "a", "b"), op("write", "b", a=1),
    ],
    "exchange twice": [
        op("write", "a"), op("write", "b"), ("drain", 9), ("replay",),
        op("exchange", "a", "b"), op("exchange", "a", "b"),
    ],
    "saves by one temporary name": [op("save", "a"), op("save", "b"), op("save", "a"), op("save", "log")],
    "a directory moved into place": [
        op("mkdir", "a"), op("write", "b", a=1), ("drain", 9), op("rename", "a", "b"), op("mkdir", "a"),
        op("write", "b", a=2), op("write", "log", a=1),
    ],
    "a link to what is replaced": [
        op("write", "a"), op("write", "b"), ("drain", 9), ("replay",), op("link", "a", "log"), op("rename", "b", "a"),
    ],
    "links of a rewritten file": [
        op("write", "a"), op("link", "a", "b"), ("drain", 9), ("replay",), op("write", "a"), op("remove", "a"),
    ],
    "a link whose both names go": [
        op("write", "a"), ("drain", 9), ("replay",), op("link", "a", "b"), op("remove", "a"), op("remove", "b"),
    ],
    "a name that becomes another kind": [
        op("write", "a"), ("drain", 9), ("replay",), op("remove", "a"), op("mkdir", "a"), op("remove", "a"),
        op("symlink", "a", "b"), op("rename", "a", "b"), op("write", "a"),
    ],
    "a rename after content that nobody has any more": [
        op("write", "a"), ("drain", 9), ("replay",), op("write", "a"), op("rename", "a", "b"), op("write", "b"),
    ],
    "the same over another file, and then deleted": [
        op("write", "a"), op("write", "b"), ("drain", 9), ("replay",),
        op("write", "a"), op("rename", "a", "b"), op("write", "a"), op("remove", "b"),
    ],
    "the same with links": [
        op("write", "a"), op("link", "a", "log"), ("drain", 9), ("replay",),
        op("write", "a"), op("rename", "a", "b"), op("link", "b", "a"), op("rename", "log", "a"), op("write", "b"),
    ],
    "the same through a directory": [
        op("mkdir", "a"), op("write", "b", a=1), ("drain", 9), ("replay",),
        op("write", "b", a=1), op("rename", "a", "log"), op("write", "a", a=1), op("write", "b", a=1),
    ],
    "the same by exchanges": [
        op("write", "a"), op("write", "b"), ("drain", 9), ("replay",),
        op("write", "a"), op("exchange", "a", "b"), op("exchange", "b", "log"), op("rename", "b", "log"),
        op("write", "log"), op("write", "a"),
    ],
    "directories exchanged with what was skipped in them": [
        op("mkdir", "a"), op("mkdir", "b"), op("write", "log", a=1), op("write", "log", a=2), ("drain", 9),
        ("replay",), op("write", "log", a=1), op("exchange", "a", "b"), op("write", "log", a=1),
        op("write", "log", a=2),
    ],
    "a directory moved with what a skipped file replaced in it": [
        op("mkdir", "a"), op("write", "b", a=1), ("drain", 9), ("replay",), op("write", "log"),
        op("rename", "log", "b", b=1), op("rename", "a", "b"), op("write", "b", a=1),
    ],
    "a directory emptied and removed": [
        op("mkdir", "a"), op("write", "b", a=1), op("mkdir", "log", a=1), ("drain", 9), ("replay",),
        op("remove", "b", a=1), op("remove", "log", a=1), op("remove", "a"), op("write", "a"),
    ],
}


@pytest.mark.parametrize("crash", CRASH)
@pytest.mark.parametrize("name", HISTORIES)
def test_a_crash_at_every_system_call(name: str, crash: str) -> None:
    crash_everywhere(HISTORIES[name], crash)


@pytest.mark.parametrize("crash", CRASH)
@pytest.mark.parametrize("name", ["log rotation", "saves by one temporary name", "the same with links"])
def test_a_crash_at_every_system_call_of_an_archive_of_chunks(name: str, crash: str) -> None:
    crash_everywhere(HISTORIES[name], crash, chunked=True)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, max_size=40))
def test_an_archive_of_chunks_follows_through_crashes(events) -> None:  # type: ignore[no-untyped-def]
    with fresh(power=any(event[0] in ("power", "loss") for event in events), chunked=True) as world:
        run(world, events)
        world.check()


@pytest.mark.parametrize("crash", CRASH)
def test_what_was_published_and_then_deleted_between_two_attempts_goes(world, crash: str) -> None:  # type: ignore[no-untyped-def]
    run(world, [op("write", "a"), op("write", "b"), ("drain", 9), (crash, 40 if crash != "io" else 4)])
    assert world.archive.pending is not None
    run(world, [op("remove", "a"), op("rename", "b", "log"), op("write", "log"), op("forget", "")])
    world.check()
    assert sorted(world.shown()) == ["log"]


def test_a_power_cut_that_empties_the_memory_keeps_what_reached_the_archive(world) -> None:  # type: ignore[no-untyped-def]
    """The archive had the new version already, the catalog had not recorded it."""
    run(world, [op("write", "a"), ("drain", 9), ("replay",), op("write", "a"), ("drain", 9), ("loss", 40)])
    world.check()
    assert world.shown()["a"][2] == b"2 " * 201


@pytest.mark.parametrize("linked", [False, True])
def test_what_was_set_aside_comes_back_when_what_was_newer_is_lost(world, linked: bool) -> None:  # type: ignore[no-untyped-def]
    """The archive has the only copy that is left, and shows it at no name while there is a newer one."""
    link = [op("link", "a", "log")] if linked else []
    run(world, [op("write", "a"), ("drain", 9), ("replay",), op("write", "a"), *link, op("rename", "a", "b")])
    run(world, [op("write", "b"), ("replay",), ("sync",)])
    assert not world.shown()
    ino = world.catalog.resolve((b"b",)).ino
    os.close(world.store.open_first(world.archive.paths(ino), 201 * 2))
    world.power_cut(lose_memory=True)
    world.check()
    names = ["b", "log"] if linked else ["b"]
    assert {name: world.shown()[name][2][:2] for name in world.shown()} == dict.fromkeys(names, b"1 ")
    assert os.listdir(world.base / "archive" / ".tierfs" / "kept") == []


def test_content_lost_with_the_memory_does_not_stop_the_archive(world) -> None:  # type: ignore[no-untyped-def]
    run(world, [op("write", "a"), ("sync",)])
    world.power_cut(lose_memory=True)
    run(world, [op("write", "b")])
    world.check()
    assert sorted(world.shown()) == ["b"]


def test_a_file_is_found_while_a_batch_that_moves_it_is_under_way(world) -> None:  # type: ignore[no-untyped-def]
    """A cold file is recalled from where the archive has it at this moment, under its old or its new name."""
    run(world, [op("mkdir", "a"), op("write", "b", a=1), ("drain", 9), ("replay",)])
    ino = world.catalog.resolve((b"a", b"b")).ino
    run(world, [op("rename", "a", "log")])
    batch = world.archive.next_batch(9, {})
    for _ in range(2):
        os.close(world.store.open_first(world.archive.paths(ino), 1))
        world.archive.execute(batch)
    world.archive.commit(batch)
    assert world.archive.paths(ino) == [(b"log", b"b")]


def test_a_copy_that_someone_removed_is_made_again(world) -> None:  # type: ignore[no-untyped-def]
    run(world, [op("write", "a"), op("write", "b"), ("drain", 9)])
    world.store.discard(next(iter(world.ready.values())).temp)
    batch = world.archive.next_batch(9, world.ready)
    with pytest.raises(archive_world.ContentMissing):
        world.archive.execute(batch)
    world.archive.abandon(batch)
    for ready in world.ready.values():
        world.store.discard(ready.temp)
    world.ready.clear()
    run(world, [op("remove", "b")])
    world.check()


def test_many_small_files_are_one_batch(world) -> None:  # type: ignore[no-untyped-def]
    """Ordinary saves do not meet the rule that splits batches, nor does a temporary name used once for each."""
    for number in range(60):
        name = b"%d" % number
        world.write(1, name)
        world.write(1, name + b".tmp")
        world.names.rename(1, name + b".tmp", 1, name + b".pt", 0, archive_world.CALLER)
        world.write(1, b"tmp")
        world.names.rename(1, b"tmp", 1, name + b".bin", 0, archive_world.CALLER)
    world.witness.shown(world.expected())
    world.drain(1000)
    batch = world.archive.next_batch(10_000, world.ready)
    assert not batch.split
    assert len(batch.stored) == 180
    world.archive.execute(batch)
    world.archive.commit(batch)
    world.witness.seen = 180
    world.check()


def test_large_xattrs_do_not_make_a_batch_too_large_to_store(world) -> None:  # type: ignore[no-untyped-def]
    """The catalog's journal takes a few MiB; a batch ends before."""
    for number in range(60):
        world.write(1, b"%d" % number)
        with world.catalog.transaction():
            world.catalog.set_xattr(world.catalog.lookup(1, b"%d" % number).ino, b"user.x", b"\0" * 30_000)
    world.drain(1000)
    batches = 0
    while (batch := world.archive.next_batch(10_000, world.ready)) is not None:
        world.archive.execute(batch)
        world.archive.commit(batch)
        batches += 1
    assert batches > 5
    assert len(list(world.witness.files())) == 60
