"""Deletes and rewrites of durable data wait for what was closed before, and are undone when that is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from held_world import CALLER, World, inside

from tierfs.catalog.journal import Journal, Statement
from tierfs.fs.namespace import RENAME_EXCHANGE
from tierfs.report import Lost, Report, RolledBack, Undone
from tierfs.types import ROOT_INO, Usage

STACKS = {"memory, nvme, archive": ("nvme",), "memory, archive": (), "memory, nvme, disk, archive": ("nvme", "disk")}
OLD, NEW, OTHER = b"old" * 100, b"brand new", b"other" * 10
THEN = 1_500_000_000_123_456_789


@pytest.fixture(params=STACKS.values(), ids=STACKS.keys())
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, request.param)
    yield made
    made.close()


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def found(report: Report) -> tuple[list[RolledBack], list[Lost], list[Undone]]:
    return report.rolled_back, report.lost, report.undone


# versions


@pytest.mark.parametrize("how", ["truncated", "in place"])
def test_a_rewritten_file_falls_back_to_its_durable_version_whole(world: World, how: str) -> None:
    world.write("f", OLD)
    world.change("f", mode=0o640, mtime_ns=THEN, xattr=b"1")
    world.durable("f")
    before = world.shown("f")
    world.write("f", NEW, truncate=how == "truncated")
    world.change("f", mode=0o600, mtime_ns=THEN + 5, xattr=b"2")
    size = len(NEW) if how == "truncated" else len(OLD)
    report = world.reboot()
    assert world.shown("f") == before == (OLD, len(OLD), 0o640, THEN, {b"user.x": b"1"})
    assert found(report) == ([RolledBack("f", 2, size, 1, len(OLD))], [], [])
    world.check()
    status = os.stat(world.top / "archive" / "f")
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o640, THEN)
    assert os.getxattr(world.top / "archive" / "f", "user.x") == b"1"


def test_a_file_renamed_over_a_durable_one_and_lost_gives_the_name_back(world: World) -> None:
    world.write("f", OLD)
    world.change("f", mode=0o640, mtime_ns=THEN, xattr=b"1")
    world.durable("f")
    before = world.shown("f")
    world.save("f", NEW)
    report = world.reboot()
    assert world.files() == ["f", "f.tmp"]
    assert world.shown("f") == before
    undone = [Undone("replace", "f"), Undone("rename", "f.tmp", "f")]
    assert found(report) == ([], [Lost("f.tmp", 1, len(NEW))], undone)
    world.unlink("f.tmp")
    world.check()


def test_a_durable_version_stays_on_each_tier_until_the_new_one_is_as_durable_there(nvme: World) -> None:
    nvme.write("f", OLD)
    nvme.durable("f")
    nvme.write("f", NEW)
    assert (nvme.on("nvme"), nvme.on("archive")) == ([OLD], [OLD])
    nvme.drain("f", "nvme")
    nvme.settle()
    assert (nvme.on("nvme"), nvme.on("archive")) == ([NEW], [OLD])
    nvme.drain("f", "archive")
    nvme.replay()
    assert (nvme.on("nvme"), nvme.on("archive")) == ([NEW], [NEW])
    nvme.check()


def test_rewritten_many_times_it_falls_back_to_the_last_durable_version(world: World) -> None:
    for number in range(1, 4):
        world.write("f", b"%d" % number)
        world.durable("f")
    world.write("f", b"4")
    world.write("f", b"5")
    report = world.reboot()
    assert world.read("f") == b"3"
    assert found(report) == ([RolledBack("f", 5, 1, 3, 1)], [], [])
    world.write("f", b"again")  # its versions have the numbers of the lost ones
    world.check()


def test_a_version_that_was_open_when_the_memory_was_lost_is_rolled_back(world: World) -> None:
    world.write("f", OLD)
    world.durable("f")
    fh = trio.run(world.parts.files.open, world.ino("f"), os.O_WRONLY)
    world.parts.write(fh, 0, NEW)
    world.reboot()
    assert world.read("f") == OLD
    world.check()


def test_a_replaced_version_is_held_while_something_closed_before_may_be_lost(nvme: World) -> None:
    """A pointer that is drained before the shards that it points to."""
    nvme.write("latest", b"step 1")
    nvme.durable("latest")
    nvme.write("shard", OTHER)
    nvme.write("latest", b"step 2")
    nvme.drain("latest", "nvme")
    nvme.settle()
    assert sorted(nvme.on("nvme")) == [b"step 1", b"step 2"]
    assert nvme.held() == (1, 2 * len(b"step 1")), "on nvme and on the archive"
    nvme.drain("shard", "nvme")
    nvme.settle()
    assert nvme.on("nvme") == sorted([OTHER, b"step 2"])
    nvme.check()


def test_a_pointer_rewritten_in_place_does_not_outlive_lost_shards(nvme: World) -> None:
    nvme.write("latest", b"step 1")
    nvme.durable("latest")
    nvme.write("shard", OTHER)
    for number in (2, 3):
        nvme.write("latest", b"step %d" % number)
        nvme.drain("latest", "nvme")
        nvme.settle()
    report = nvme.reboot()
    assert nvme.read("latest") == b"step 1"
    assert found(report) == ([RolledBack("latest", 3, 6, 1, 6)], [Lost("shard", 1, len(OTHER))], [])
    nvme.unlink("shard")
    nvme.check()


def test_what_somebody_was_told_to_be_durable_is_not_rolled_back(nvme: World) -> None:
    nvme.write("latest", b"step 1")
    nvme.durable("latest")
    nvme.write("shard", OTHER)
    nvme.write("latest", b"step 2")
    nvme.drain("latest", "nvme")
    attributes = nvme.find("latest")
    assert attributes is not None
    trio.run(nvme.parts.migrator.wait_durable, attributes.ino, attributes.version, "nvme")
    nvme.settle()
    report = nvme.reboot()
    assert nvme.read("latest") == b"step 2"
    assert found(report) == ([], [Lost("shard", 1, len(OTHER))], [])
    nvme.unlink("shard")
    nvme.check()


@pytest.mark.parametrize("truncate", [False, True])
def test_rewritten_while_read_from_a_disk_the_last_durable_version_stays(nvme: World, truncate: bool) -> None:
    """All that have the file open share the file on the disk, which becomes the next version."""
    nvme.write("f", OLD)
    nvme.drain("f", "nvme")
    assert nvme.parts.migrator.evictor.evict(nvme.ino("f"), 1, "memory")
    reader = trio.run(nvme.parts.files.open, nvme.ino("f"), os.O_RDONLY)
    nvme.write("f", NEW, truncate=truncate)
    new = NEW if truncate else NEW + OLD[len(NEW) :]
    assert trio.run(nvme.parts.filesystem.read, reader, 0, 1 << 20) == new
    inside(nvme.parts.files.release, reader)
    assert sorted(nvme.on("nvme")) == sorted([OLD, new])
    assert nvme.problems() == []
    nvme.check()
    assert nvme.on("nvme") == [new]


def test_rewritten_where_memory_has_no_room_the_last_durable_version_stays(
    nvme: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme.write("f", OLD)
    nvme.drain("f", "nvme")
    assert nvme.parts.migrator.evictor.evict(nvme.ino("f"), 1, "memory")
    with monkeypatch.context() as patch:
        patch.setattr(nvme.parts.files.space, "choose", lambda tiers, size: "nvme")
        nvme.write("f", NEW, truncate=False)
    new = NEW + OLD[len(NEW) :]
    assert sorted(nvme.on("nvme")) == sorted([OLD, new])
    nvme.check()
    assert nvme.on("nvme") == [new]


# deletes


def test_a_delete_becomes_physical_when_everything_closed_before_is_durable(world: World) -> None:
    world.write("old", OLD)
    world.durable("old")
    world.write("new", NEW)
    world.unlink("old")
    world.settle()
    world.replay()
    size = len(OLD) * len(world.persistent)
    assert world.held() == (1, size)
    for tier in world.persistent:
        assert OLD in world.on(tier)
    if world.disks:
        world.drain("new", *world.disks)
        world.settle()
        for tier in world.disks:
            assert world.on(tier) == [NEW]
        assert world.on("archive") == [OLD]
    world.drain("new", "archive")
    world.replay()
    assert world.on("archive") == [NEW]
    assert world.held() == (0, 0)
    world.check()


def test_a_delete_is_held_at_the_level_of_each_disk(tmp_path: Path) -> None:
    world = World(tmp_path, ("nvme", "disk"))
    world.write("old", OLD)
    world.durable("old")
    world.write("new", NEW)
    world.unlink("old")
    world.drain("new", "nvme")
    world.settle()
    assert (world.on("nvme"), world.on("disk")) == ([NEW], [OLD])
    world.drain("new", "disk")
    world.settle()
    assert (world.on("nvme"), world.on("disk")) == ([NEW], [NEW])
    world.check()
    world.close()


def test_deletes_are_undone_when_what_was_closed_before_is_lost(world: World) -> None:
    """With their directories, attributes and xattrs."""
    world.mkdir("run")
    world.mkdir("run/1")
    world.write("run/1/model", OLD)
    world.change("run/1/model", mode=0o640, mtime_ns=THEN, xattr=b"1")
    world.change("run/1", mode=0o750, mtime_ns=THEN, xattr=b"dir")
    world.durable("run/1/model")
    before = world.shown("run/1/model")
    directory = world.find("run/1")
    world.write("run/2", NEW)
    world.unlink("run/1/model")
    world.rmdir("run/1")
    world.settle()
    report = world.reboot()
    assert world.shown("run/1/model") == before
    assert directory is not None
    now = world.find("run/1")
    assert now is not None
    assert (now.mode, now.ino, now.nlink) == (directory.mode, directory.ino, 2)
    assert dict(world.parts.catalog.xattrs(now.ino)) == {b"user.x": b"dir"}
    undone = [Undone("rmdir", "run/1"), Undone("unlink", "run/1/model")]
    assert found(report) == ([], [Lost("run/2", 1, len(NEW))], undone)
    world.unlink("run/2")
    world.check()
    assert world.archived() == {"run/1/model": OLD}


def test_deletes_before_the_lost_close_stand(world: World) -> None:
    world.write("old", OLD)
    world.durable("old")
    world.unlink("old")
    world.write("new", NEW)
    report = world.reboot()
    assert world.files() == ["new"]
    assert found(report) == ([], [Lost("new", 1, len(NEW))], [])
    world.unlink("new")
    world.check()


def test_no_memory_lost_nothing_undone(world: World) -> None:
    world.write("old", OLD)
    world.durable("old")
    world.write("new", NEW)
    world.unlink("old")
    world.settle()
    world.restart()
    assert not world.report
    assert world.files() == ["new"]
    assert world.held()[0] == 1
    world.check()
    assert world.archived() == {"new": NEW}


def test_names_that_came_later_than_a_lost_close_are_what_they_were(world: World) -> None:
    """A directory renamed into place, and a pointer renamed over its former self, vouch for what is lost."""
    world.write("latest", b"step 1")
    world.mkdir("tmp-2")
    world.write("tmp-2/index", b"index")
    world.durable("latest", "tmp-2/index")
    world.write("tmp-2/shard", NEW)
    world.rename("tmp-2", "step-2")
    world.save("latest", b"step 2")
    if world.disks:
        world.drain("latest", *world.disks)
        world.settle()
    report = world.reboot()
    assert world.files() == ["latest", "latest.tmp", "tmp-2/index", "tmp-2/shard"]
    assert world.read("latest") == b"step 1"
    lost = [Lost("tmp-2/shard", 1, len(NEW))]
    if world.disks:
        assert world.read("latest.tmp") == b"step 2"
    else:
        lost.append(Lost("latest.tmp", 1, 6))
        world.unlink("latest.tmp")
    renames = [Undone("rename", "latest.tmp", "latest"), Undone("rename", "tmp-2", "step-2")]
    assert found(report) == ([], lost, [Undone("replace", "latest"), *renames])
    world.unlink("tmp-2/shard")
    world.check()


def test_saves_that_delete_the_one_before_faster_than_they_are_drained(world: World) -> None:
    """Each delete is of something that was never drained, but the first: nothing else is durable."""
    world.mkdir("1")
    world.write("1/model", OLD)
    world.durable("1/model")
    for number in range(2, 5):
        world.mkdir(f"{number}")
        world.write(f"{number}/model", b"%d" % number)
        world.unlink(f"{number - 1}/model")
        world.rmdir(f"{number - 1}")
        world.settle()
        world.replay()
        assert world.archived() == {"1/model": OLD}
        assert all(OLD in world.on(tier) for tier in world.disks)
    report = world.reboot()
    assert world.files() == ["1/model", "4/model"]
    assert world.read("1/model") == OLD
    undone = [Undone("rmdir", "1"), Undone("unlink", "1/model"), Undone("rmdir", "2")]
    assert found(report) == ([], [Lost("2/model", 1, 0), Lost("4/model", 1, 1)], undone)
    world.unlink("4/model")
    world.check()
    assert world.archived() == {"1/model": OLD}


@pytest.mark.parametrize("published", [False, True], ids=["archive as it was", "archive has followed"])
def test_a_pointer_replaced_again_and_again_is_the_durable_one_everywhere(world: World, published: bool) -> None:
    """Each but the last was replaced before it was durable. The archive has, or gets, what the mount shows."""
    world.write("latest", OLD)
    world.durable("latest")
    for number in range(2, 5):
        world.write("l", b"%d" % number)
        world.rename("l", "latest")
        if published:
            world.settle()
            world.replay()
    report = world.reboot()
    assert world.files() == ["l", "latest"]
    assert world.read("latest") == OLD
    undone = [Undone("rename", "l", "latest"), Undone("replace", "latest")]
    assert found(report) == ([], [Lost("l", 1, 1)], undone)
    assert world.archived() == {"latest": OLD}
    world.replay()
    assert world.archived() == {"latest": OLD}
    world.unlink("l")
    world.check()
    assert world.archived() == {"latest": OLD}


def test_a_directory_renamed_into_place_does_not_vouch_for_files_that_are_gone(world: World) -> None:
    """Although it was deleted itself, before the files in it were durable."""
    world.mkdir("ck-1")
    world.write("ck-1/0", OLD)
    world.write("latest", b"1")
    world.durable("ck-1/0", "latest")
    world.mkdir("tmp-2")
    world.write("tmp-2/0", OTHER)
    world.durable("tmp-2/0")
    world.write("tmp-2/1", NEW)
    world.rename("tmp-2", "ck-2")
    world.save("latest", b"2")
    world.unlink("ck-1/0")
    world.rmdir("ck-1")
    world.mkdir("tmp-3")
    world.write("tmp-3/0", b"three")
    world.rename("tmp-3", "ck-3")
    world.save("latest", b"3")
    for name in ("ck-2/0", "ck-2/1"):
        world.unlink(name)
    world.rmdir("ck-2")
    world.settle()
    world.replay()
    report = world.reboot()
    assert world.files() == ["ck-1/0", "latest", "latest.tmp", "tmp-2/0", "tmp-3/0"]
    assert (world.read("latest"), world.read("ck-1/0"), world.read("tmp-2/0")) == (b"1", OLD, OTHER)
    lost = [Lost("latest.tmp", 1, 1), Lost("tmp-2/1", 1, 0), Lost("tmp-3/0", 1, 5)]
    assert sorted(report.lost, key=lambda entry: entry.path) == lost
    for name in ("latest.tmp", "tmp-3/0"):
        world.unlink(name)
    world.check()
    assert world.archived() == {"ck-1/0": OLD, "latest": b"1", "tmp-2/0": OTHER}


def test_saves_that_delete_the_one_before_let_go_once_one_is_drained(world: World) -> None:
    world.write("1", OLD)
    world.durable("1")
    for number in range(2, 5):
        world.write(f"{number}", b"%d" % number)
        world.unlink(f"{number - 1}")
    world.check()
    assert world.archived() == {"4": b"4"}


def test_a_file_of_another_rule_that_ends_on_a_disk_is_waited_for(tmp_path: Path) -> None:
    """The archive does not get it, and would not know."""
    world = World(tmp_path, rules="[{match: '*.local', drain: nvme}]")
    world.write("old", OLD)
    world.durable("old")
    world.write("new.local", NEW)
    world.unlink("old")
    world.replay()
    assert world.archived() == {"old": OLD}
    report = world.reboot()
    assert world.read("old") == OLD
    assert found(report) == ([], [Lost("new.local", 1, len(NEW))], [Undone("unlink", "old")])
    world.unlink("new.local")
    world.check()
    world.close()


def test_a_hard_link_that_was_removed_comes_back(world: World) -> None:
    world.write("a", OLD)
    world.parts.names.link(world.ino("a"), 1, b"b", CALLER)
    world.durable("a")
    world.write("x", NEW)
    world.unlink("b")
    report = world.reboot()
    assert world.ino("a") == world.ino("b")
    attributes = world.find("a")
    assert attributes is not None
    assert attributes.nlink == 2
    assert found(report)[2] == [Undone("unlink", "b")]
    world.unlink("x")
    world.check()


def test_what_was_deleted_and_never_durable_stays_deleted(world: World) -> None:
    world.write("x", NEW)
    world.write("scratch", OLD)
    world.unlink("scratch")
    report = world.reboot()
    assert world.files() == ["x"]
    assert found(report) == ([], [Lost("x", 1, len(NEW))], [])
    world.unlink("x")
    world.check()


def test_a_loss_during_the_recovery_of_a_loss_is_recovered_from(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed anywhere, the next start does all of it again: it is one transaction."""
    world.write("old", OLD)
    world.durable("old")
    world.write("new", NEW)
    world.unlink("old")
    world.write("old", OTHER)

    def die(ino: int) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("tierfs.migrator.rollback._Rollback._queue_again", lambda self, ino: die(ino))
        with pytest.raises(SystemExit):
            world.reboot()
        world.parts.catalog._db.close()
        world.parts.catalog._journal.close()
        for tier in (*world.parts.stores.values(), world.parts.tree):
            tier.close()
    world.start()
    assert world.read("old") == OLD
    assert world.report.undone == [Undone("unlink", "old")]
    world.unlink("new")
    world.check()


@pytest.mark.parametrize("directory", [False, True], ids=["files", "with a directory"])
def test_an_exchange_that_is_undone_is_reported_for_both(world: World, directory: bool) -> None:
    world.write("a", OLD)
    world.mkdir("b") if directory else world.write("b", OTHER)
    world.durable("a", *([] if directory else ["b"]))
    world.write("new", NEW)
    a, b = world.ino("a"), world.ino("b")
    world.parts.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", RENAME_EXCHANGE, CALLER)
    report = world.reboot()
    assert (world.ino("a"), world.ino("b")) == (a, b)
    assert report.undone == [Undone("rename", "a", "b"), Undone("rename", "b", "a")]
    world.unlink("new")
    world.check()


def test_a_loss_larger_than_the_catalogs_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nevertheless one transaction."""
    append = Journal.append

    def append_small(self: Journal, request: int | None, ino: int, statements: list[Statement]) -> None:
        assert len(statements) < 100
        append(self, request, ino, statements)

    monkeypatch.setattr(Journal, "append", append_small)
    world = World(tmp_path)
    world.write("old", OLD)
    world.durable("old")
    for number in range(100):
        world.write(f"{number:03}", NEW)
    world.unlink("old")
    report = world.reboot()
    assert len(report.lost) == 100
    assert report.undone == [Undone("unlink", "old")]
    assert world.read("old") == OLD
    world.close()


# files that somebody has open


def test_a_deleted_file_that_is_open_outlives_the_release_of_its_delete(nvme: World) -> None:
    nvme.write("f", OLD)
    nvme.durable("f")
    assert nvme.parts.migrator.evictor.evict(nvme.ino("f"), 1, "memory")
    handle = trio.run(nvme.parts.files.open, nvme.ino("f"), os.O_RDONLY)
    ino = nvme.ino("f")
    nvme.unlink("f")
    nvme.drain_all()
    assert trio.run(nvme.parts.filesystem.read, handle, 0, 1 << 20) == OLD
    inside(nvme.parts.files.release, handle)
    nvme.settle()
    assert nvme.on("nvme") == []
    assert nvme.parts.catalog.attributes(ino) is None


# space


def test_held_bytes_count_as_used(nvme: World) -> None:
    nvme.write("old", OLD)
    nvme.durable("old")
    nvme.write("new", NEW)
    before = nvme.parts.files.space.usage("nvme").used
    nvme.unlink("old")
    nvme.settle()
    assert nvme.parts.files.space.usage("nvme").used == before
    nvme.drain("new")
    nvme.settle()
    assert nvme.parts.files.space.usage("nvme").used == len(NEW)


def test_short_of_space_what_deletes_wait_for_is_drained_first(nvme: World, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme.write("old", OLD)
    nvme.durable("old")
    nvme.write("blocks", NEW)
    blocking = (nvme.ino("blocks"), 1)
    nvme.unlink("old")
    nvme.write("later", NEW)
    held = nvme.parts.migrator.held
    assert held.urgent() == set(), "there is room"
    monkeypatch.setattr(nvme.parts.files.space, "usage", lambda tier: Usage(1000, 950, 50))
    assert held.urgent() == {blocking}
    nvme.drain("blocks")
    assert held.urgent() == set(), "nothing waits for what is left"


# names that are wanted twice


def test_a_durable_file_keeps_the_name_of_a_removed_directory(nvme: World) -> None:
    nvme.mkdir("d")
    nvme.write("lost", NEW)
    nvme.rmdir("d")
    nvme.write("d", OTHER)
    nvme.drain("d", "nvme")
    report = nvme.reboot()
    assert nvme.read("d") == OTHER
    assert found(report) == ([], [Lost("lost", 1, len(NEW))], [])
    nvme.unlink("lost")
    nvme.check()
    assert nvme.archived() == {"d": OTHER}


def test_a_directory_that_comes_back_with_its_files_leaves_the_durable_file_of_its_name_one_beside_it(
    nvme: World,
) -> None:
    nvme.mkdir("d")
    nvme.write("d/old", OLD)
    nvme.durable("d/old")
    nvme.write("lost", NEW)
    nvme.unlink("d/old")
    nvme.rmdir("d")
    nvme.write("d", OTHER)
    nvme.drain("d", "nvme")
    report = nvme.reboot()
    assert (nvme.read("d/old"), nvme.read("d.recovered")) == (OLD, OTHER)
    undone = [Undone("rmdir", "d"), Undone("name", "d.recovered", "d"), Undone("unlink", "d/old")]
    assert found(report) == ([], [Lost("lost", 1, len(NEW))], undone)
    assert "undone: d is again what it was before; what was made under that name is d.recovered now" in report.lines()
    nvme.unlink("lost")
    nvme.check()
    assert nvme.archived() == {"d/old": OLD, "d.recovered": OTHER}


def test_what_was_saved_into_a_directory_made_anew_stays_at_its_path(nvme: World) -> None:
    """rm -r checkpoint; mkdir checkpoint; save into it."""
    nvme.mkdir("d")
    nvme.write("d/old", OLD)
    nvme.durable("d/old")
    nvme.write("lost", NEW)
    nvme.unlink("d/old")
    nvme.rmdir("d")
    nvme.mkdir("d")
    nvme.write("d/new", OTHER)
    nvme.drain("d/new", "nvme")
    report = nvme.reboot()
    assert (nvme.read("d/old"), nvme.read("d/new")) == (OLD, OTHER)
    undone = [Undone("rmdir", "d"), Undone("unlink", "d/old")]
    assert found(report) == ([], [Lost("lost", 1, len(NEW))], undone)
    nvme.unlink("lost")
    nvme.check()
    assert nvme.archived() == {"d/old": OLD, "d/new": OTHER}


def test_a_directory_renamed_away_and_made_anew_are_two(nvme: World) -> None:
    """mv checkpoint checkpoint.old; mkdir checkpoint; save into it."""
    nvme.mkdir("d")
    nvme.write("d/model", OLD)
    nvme.durable("d/model")
    nvme.write("lost", NEW)
    nvme.rename("d", "d.old")
    nvme.mkdir("d")
    nvme.write("d/model", OTHER)
    nvme.drain("d/model", "nvme")
    report = nvme.reboot()
    assert (nvme.read("d/model"), nvme.read("d.recovered/model")) == (OLD, OTHER)
    undone = [Undone("rename", "d", "d.old"), Undone("name", "d.recovered", "d")]
    assert found(report) == ([], [Lost("lost", 1, len(NEW))], undone)
    nvme.unlink("lost")
    nvme.check()
    assert nvme.archived() == {"d/model": OLD, "d.recovered/model": OTHER}


def test_a_log_that_was_rotated_and_its_successor_are_both_there(nvme: World) -> None:
    nvme.write("log", OLD)
    nvme.durable("log")
    nvme.write("lost", NEW)
    nvme.rename("log", "log.1")
    nvme.write("log", OTHER)
    nvme.drain("log", "nvme")
    report = nvme.reboot()
    assert (nvme.read("log"), nvme.read("log.recovered")) == (OLD, OTHER)
    undone = [Undone("rename", "log", "log.1"), Undone("name", "log.recovered", "log")]
    assert found(report) == ([], [Lost("lost", 1, len(NEW))], undone)
    nvme.unlink("lost")
    nvme.check()
