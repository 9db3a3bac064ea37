"""Deletes wait for a close that was not durable when the file was opened for writing again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from held_world import World, inside

from tierfs.migrator.held import AWAITED, GIVE_UP_AFTER, SNAPSHOT_AFTER
from tierfs.report import Undone
from tierfs.types import OpKind, ReplicaState

STACKS = {"memory, nvme, archive": ("nvme",), "memory, archive": ()}
HOW = {"truncated": os.O_TRUNC, "in place": 0}
OLD, FIRST, SECOND = b"old" * 100, b"first" * 10, b"second" * 10


@pytest.fixture(params=STACKS.values(), ids=STACKS.keys())
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """``old`` is durable everywhere and deleted after a file that is nowhere durable was closed."""
    made = World(tmp_path, request.param)
    made.write("old", OLD)
    made.durable("old")
    made.write("log", FIRST)
    made.unlink("old")
    yield made
    made.close()


@pytest.fixture(params=HOW.values(), ids=HOW.keys())
def flags(request: pytest.FixtureRequest) -> int:
    how: int = request.param
    return os.O_WRONLY | how


def old_is_held(world: World) -> bool:
    world.settle()
    world.replay()
    return all(OLD in world.on(tier) for tier in world.persistent)


def old_is_gone(world: World) -> bool:
    world.settle()
    world.replay()
    return not any(OLD in world.on(tier) for tier in world.persistent)


def as_time_passes(steps: Callable[[], object], *seconds: float) -> None:
    """Call it now and after each pause."""

    async def run() -> None:
        steps()
        for pause in seconds:
            await trio.sleep(pause)
            steps()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_delete_waits_for_the_next_version_of_what_was_closed_before_it(world: World, flags: int) -> None:
    for number in range(3):
        world.write("log", SECOND + b"%d" % number, truncate=flags & os.O_TRUNC != 0)
        assert old_is_held(world)
    world.drain("log", *world.persistent)
    assert old_is_gone(world)
    world.check()


def test_a_delete_is_undone_with_the_close_before_it_although_the_file_was_closed_again(
    world: World, flags: int
) -> None:
    world.write("log", SECOND, truncate=flags & os.O_TRUNC != 0)
    assert old_is_held(world)
    report = world.reboot()
    assert world.read("old") == OLD
    assert report.undone == [Undone("unlink", "old")]
    world.unlink("log")
    world.check()


def test_a_delete_is_undone_with_the_close_before_it_although_the_file_is_open_again(world: World, flags: int) -> None:
    fh = trio.run(world.parts.files.open, world.ino("log"), flags)
    world.parts.write(fh, 0, SECOND)
    assert old_is_held(world)
    report = world.reboot()
    assert world.read("old") == OLD
    assert report.undone == [Undone("unlink", "old")]
    world.unlink("log")
    world.check()


def test_a_file_deleted_after_it_was_written_again_is_waited_for_no_more(world: World, flags: int) -> None:
    world.write("log", SECOND, truncate=flags & os.O_TRUNC != 0)
    world.unlink("log")
    assert old_is_gone(world)
    world.check()


def test_the_archive_shows_nothing_past_a_close_whose_file_is_being_written_again(world: World, flags: int) -> None:
    world.write("latest", b"log")
    fh = trio.run(world.parts.files.open, world.ino("log"), flags)
    world.drain("latest", *world.persistent)
    world.replay()
    assert world.archived() == {"old": OLD}
    inside(world.parts.files.release, fh)
    world.check()


def test_a_file_that_stays_open_is_made_durable_as_it_is_if_it_was_not_cut_off(world: World) -> None:
    """A log that is opened again to be appended to for days: nothing waits that long."""
    fh = trio.run(world.parts.files.open, world.ino("log"), os.O_WRONLY)
    world.parts.write(fh, 0, SECOND)
    as_time_passes(world.parts.migrator.held.hasten, SNAPSHOT_AFTER - 1)
    assert world.parts.files.inodes[world.ino("log")].replica.state is ReplicaState.OPEN
    world.parts.migrator.held._overtaken.clear()  # each of these begins at the same time
    as_time_passes(world.parts.migrator.held.hasten, SNAPSHOT_AFTER + 1)
    world.drain("log", *world.persistent)
    assert old_is_gone(world)
    inside(world.parts.files.release, fh)
    world.check()


def test_half_a_rewritten_file_is_not_made_durable_but_at_last_given_up(world: World) -> None:
    fh = trio.run(world.parts.files.open, world.ino("log"), os.O_WRONLY | os.O_TRUNC)
    world.parts.write(fh, 0, SECOND)
    as_time_passes(world.parts.migrator.held.hasten, GIVE_UP_AFTER - 1)
    assert old_is_held(world)
    world.parts.migrator.held._overtaken.clear()  # each of these begins at the same time
    as_time_passes(world.parts.migrator.held.hasten, GIVE_UP_AFTER + 1)
    assert world.parts.files.inodes[world.ino("log")].replica.state is ReplicaState.OPEN
    assert old_is_gone(world)
    inside(world.parts.files.release, fh)
    world.check()


@pytest.mark.parametrize("awaited", [False, True], ids=["nobody waits", "somebody waits"])
def test_a_file_that_is_written_again_and_again_holds_nothing_up(world: World, flags: int, awaited: bool) -> None:
    """Each version is open for a moment, none is ever copied, and none is open for as long as one may be."""
    parts = world.parts

    async def rewrite() -> None:
        ino = world.ino("log")
        for _ in range(GIVE_UP_AFTER * 3):
            fh = await parts.files.open(ino, flags)
            parts.write(fh, 0, SECOND)
            parts.migrator.held.hasten(awaited=awaited)
            await trio.sleep(0.5)
            parts.files.release(fh)
        await parts.files.open(ino, flags)
        parts.migrator.held.hasten(awaited=awaited)

    trio.run(rewrite, clock=trio.testing.MockClock(autojump_threshold=0))
    assert old_is_gone(world)


def test_who_waits_for_what_was_done_does_not_wait_for_a_file_that_is_open_again(world: World, flags: int) -> None:
    """Else a program that fsyncs a directory could wait for a file that it has open itself."""
    fh = trio.run(world.parts.files.open, world.ino("log"), flags)
    as_time_passes(lambda: world.parts.migrator.held.hasten(awaited=True), AWAITED)
    if not flags & os.O_TRUNC:
        world.drain("log", *world.persistent)
    assert old_is_gone(world)
    inside(world.parts.files.release, fh)
    world.check()


def test_a_file_that_moved_out_of_the_rule_that_drained_it_is_waited_for_no_more(tmp_path: Path) -> None:
    world = World(tmp_path, rules='[{match: "scratch/**", drain: none}]')
    world.write("old", OLD)
    world.durable("old")
    world.mkdir("scratch")
    world.write("log", FIRST)
    world.unlink("old")
    world.rename("log", "scratch/log")
    world.write("scratch/log", SECOND)
    world.settle()
    assert world.on("nvme") == []
    world.close()


def test_a_close_is_waited_for_although_an_earlier_one_is_queued_still_and_durable_further_down(tmp_path: Path) -> None:
    """The archive was faster than the disk."""
    world = World(tmp_path)
    world.write("log", FIRST)
    world.write("log", SECOND)
    world.drain("log", "archive")
    world.replay()
    world.write("old", OLD)
    world.durable("old")
    world.write("log", FIRST)
    world.unlink("old")
    world.write("log", SECOND)
    assert old_is_held(world)
    report = world.reboot()
    assert (world.read("old"), world.read("log")) == (OLD, SECOND)
    assert report.undone == [Undone("unlink", "old")]
    world.check()
    world.close()


def test_a_file_deleted_before_it_was_durable_takes_no_deletes_along_that_its_durable_version_followed(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.write("log", FIRST)
    world.write("old", OLD)
    world.durable("old")
    world.drain("log", "archive")
    world.replay()
    world.unlink("old")
    assert old_is_gone(world)
    world.write("log", SECOND)
    world.write("new", SECOND)
    world.unlink("log")
    report = world.reboot()
    assert report.undone == [Undone("unlink", "log")]
    assert (world.files(), world.read("log")) == (["log", "new"], FIRST)
    world.unlink("new")
    world.check()
    world.close()


def test_a_killed_daemon_leaves_a_log_that_is_appended_to_what_it_was(world: World) -> None:
    """The next one knows of the flags of open files only: a file that is appended to did not begin empty."""
    ino = world.ino("log")
    fh = trio.run(world.parts.files.open, ino, os.O_WRONLY | os.O_APPEND)
    inode = world.parts.files.handles[fh].inode
    world.parts.files.inodes.clear()
    world.parts.files.handles.clear()
    inside(world.parts.files.adopt, fh, ino, os.O_WRONLY | os.O_APPEND, inode.backing_id)
    as_time_passes(world.parts.migrator.held.hasten, SNAPSHOT_AFTER + 1)
    world.drain("log", *world.persistent)
    assert old_is_gone(world)
    inside(world.parts.files.release, fh)
    os.close(inode.fd)
    world.check()


def test_a_delete_and_what_makes_up_for_the_close_before_it_reach_the_archive_together(tmp_path: Path) -> None:
    """What waits there for its name goes with the process: a loss between two batches would keep the delete only."""
    world = World(tmp_path, ())
    world.write("old", OLD)
    world.durable("old")
    world.write("early", OLD[:10])
    world.drain("early", "archive")
    world.write("log", FIRST)
    world.unlink("old")
    world.write("log", SECOND)
    world.drain("log", "archive")
    migrator = world.parts.migrator
    operations = list(world.parts.catalog.operations(100))
    deleted = next(number for number, op in enumerate(operations) if op.kind is OpKind.UNLINK)
    batch = migrator.archive.next_batch(deleted + 1, migrator.ready)
    assert batch is not None
    assert batch.last < operations[deleted].seq
    migrator.archive.execute(batch)
    migrator.archive.commit(batch)
    assert world.archived() == {"old": OLD, "early": OLD[:10]}
    world.replay()
    assert world.archived() == {"early": OLD[:10], "log": SECOND}
    world.check()
    world.close()


def test_a_delete_that_the_archive_has_followed_is_undone_from_a_disk(tmp_path: Path) -> None:
    """It may be ahead there by what was closed again and lies on the archive without its name."""
    world = World(tmp_path)
    world.write("old", OLD)
    world.durable("old")
    world.write("log", FIRST)
    world.unlink("old")
    world.write("log", SECOND)
    world.write("last", b"last")
    world.drain("log", "archive")
    migrator = world.parts.migrator
    (deleted,) = (op.seq for op in world.parts.catalog.operations(100) if op.kind is OpKind.UNLINK)
    while world.parts.catalog.archived < deleted:  # at last nothing is before the close that it could go with
        count = sum(op.seq <= deleted for op in world.parts.catalog.operations(100))
        batch = migrator.archive.next_batch(count, migrator.ready)
        assert batch is not None
        migrator.archive.execute(batch)
        migrator.archive.commit(batch)
    assert world.archived() == {}
    report = world.reboot()
    assert world.read("old") == OLD
    assert Undone("unlink", "old") in report.undone
    world.unlink("log")
    world.unlink("last")
    world.check()
    world.close()
