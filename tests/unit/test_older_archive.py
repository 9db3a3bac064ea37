"""An older copy of the archive in its place, with its marker, is not taken for it; the archive itself always is."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rebuilding import CALLER, World, policy_of
from tierfs.catalog import Catalog
from tierfs.errors import TierError
from tierfs.fsck import check_all, repair_all
from tierfs.fsck.session import catalog_path
from tierfs.migrator.joining import claim
from tierfs.tiers.assembly import Tiers


def quiet(done: int, total: int, what: str) -> None:
    pass


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        made = World(Path(path))
        made.mkdir(b"run")
        made.write(b"run/first", b"1" * 5000)
        made.drain()
        yield made
        made.close()


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


def archive(world: World) -> Path:
    return world.top / "archive"


def back_up(world: World) -> Path:
    """A copy of the archive, as rsync -a makes it."""
    return shutil.copytree(archive(world), world.top / "backup", symlinks=True)


def exchange(world: World) -> None:
    archive(world).rename(world.top / "aside")
    (world.top / "backup").rename(archive(world))


def exchange_back(world: World) -> None:
    archive(world).rename(world.top / "backup")
    (world.top / "aside").rename(archive(world))


def mount(world: World) -> None:
    """What a mount does before it changes anything. The world is closed. Raises TierError."""
    tiers = Tiers.open(world.policy)
    try:
        catalog = Catalog(catalog_path(world.policy))
        try:
            claim(catalog, world.policy, tiers)
        finally:
            catalog.close()
    finally:
        tiers.close()


def everything(top: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(top)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in top.rglob("*")
        if path.name not in (".tierfs", "tmp")
    }


def older(world: World) -> None:
    """In the archive's place lies a copy from before the last batch. The world is closed."""
    back_up(world)
    world.write(b"run/second", b"2" * 5000)
    world.drain()
    world.close()
    exchange(world)


@pytest.mark.parametrize("copies", [0, 1, 3], ids=["log goes on", "another log", "logs are gone"])
def test_an_older_copy_of_the_archive_is_refused_and_left_alone(world: World, copies: int) -> None:
    back_up(world)
    for number in range(max(1, copies)):
        if copies:
            world.copy_catalog()
        world.write(b"run/%d" % number, b"2" * 5000)
        world.drain()
    world.close()
    exchange(world)
    before = everything(archive(world))
    with pytest.raises(TierError, match=r"older copy of the archive.*fsck --repair") as refused:
        mount(world)
    assert not refused.value.temporary
    assert everything(archive(world)) == before
    problems = check_all(world.policy, quiet)
    assert any("older copy of the archive" in problem["what"] for problem in problems)
    exchange_back(world)
    mount(world)
    assert check_all(world.policy, quiet) == []
    world.reopen()


def test_an_archive_without_its_log_is_refused(world: World) -> None:
    world.close()
    shutil.rmtree(archive(world) / ".tierfs" / "catalog")
    with pytest.raises(TierError, match="older copy"):
        mount(world)
    assert repair_all(world.policy, quiet).problems == []
    mount(world)
    world.reopen()


def test_a_copy_with_everything_in_it_is_the_archive(world: World) -> None:
    """Moved to another disk, or put back from a backup that misses nothing."""
    world.write(b"run/second", b"2" * 5000)
    world.drain()
    world.close()
    back_up(world)
    exchange(world)
    mount(world)
    world.reopen()
    world.write(b"run/third", b"3" * 5000)
    world.drain()
    assert (archive(world) / "run" / "third").read_bytes() == b"3" * 5000


@pytest.mark.parametrize("done", ["logged", "taken", "recorded", "recorded and lost"])
def test_a_crash_between_log_and_catalog_refuses_no_archive(world: World, done: str) -> None:
    """The log is written first, the catalog's note of it last; a power cut may take the note back."""
    world.copy_catalog()
    world.mkdir(b"run/later")
    world.parts.catalog.commit()
    kept = world.top / "kept"
    if done == "recorded and lost":
        shutil.copytree(world.policy.state, kept)
    mover = world.parts.migrator.archive
    batch = mover.next_batch(100, {})
    assert batch is not None
    if done == "logged":
        mover._log()
    else:
        mover.execute(batch)
    if done.startswith("recorded"):
        mover.commit(batch)
    assert world.parts.tree.position() > (0, 0)
    assert (world.parts.catalog.logged < world.parts.tree.position()) == (not done.startswith("recorded"))
    world.crash()
    if done == "recorded and lost":
        shutil.rmtree(world.policy.state)
        kept.rename(world.policy.state)
    mount(world)
    world.reopen()
    world.drain()
    assert (archive(world) / "run" / "later").is_dir()


def test_a_batch_that_a_full_archive_did_not_log_refuses_no_archive(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(payload: bytes) -> None:
        raise TierError("full", errno=errno.ENOSPC, temporary=True)

    monkeypatch.setattr(world.parts.migrator.copies, "append", full)
    world.write(b"run/second", b"2" * 5000)
    world.drain()
    world.close()
    mount(world)
    world.reopen()


def test_a_log_that_was_written_in_part_refuses_no_archive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut back to what was there, which is what the catalog knows."""
    world.parts.migrator.copies.append(b"whole")
    with world.parts.catalog.transaction():
        assert world.parts.migrator.copies.reached is not None
        world.parts.catalog.put_logged(world.parts.migrator.copies.reached)
    real = os.write

    def short(fd: int, data: bytes) -> int:
        return real(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr("tierfs.tiers.copies.os.write", short)
        with pytest.raises(TierError):
            world.parts.migrator.copies.append(b"cut")
    world.crash()
    mount(world)
    world.reopen()


def test_while_mounted_an_older_copy_is_not_written_into(world: World) -> None:
    back_up(world)
    world.write(b"run/second", b"2" * 5000)
    world.drain()
    exchange(world)
    before = everything(archive(world))
    with pytest.raises(TierError, match="older copy of the archive lies at") as refused:
        world.parts.tree.attach()
    assert refused.value.temporary, "the archive may come back"
    assert everything(archive(world)) == before
    exchange_back(world)
    world.write(b"run/third", b"3" * 5000)
    world.drain()
    assert (archive(world) / "run" / "third").read_bytes() == b"3" * 5000


def test_the_next_daemon_of_a_mount_knows_it_too(world: World) -> None:
    back_up(world)
    world.write(b"run/second", b"2" * 5000)
    world.drain()
    world.crash()
    world.reopen()
    world.parts.tree.note(world.parts.catalog.logged)
    exchange(world)
    with pytest.raises(TierError, match="older copy"):
        world.parts.tree.attach()
    exchange_back(world)


def test_an_older_copy_that_is_all_there_is_becomes_the_archive_again(world: World) -> None:
    """From what the other tiers have; what they do not have, and what should not be there, is named."""
    world.mkdir(b"step-1")
    for name in (b"same", b"rewritten", b"deleted", b"step-1/model.pt"):
        world.write(name, name * 1000)
    world.drain()
    back_up(world)
    mtime = (archive(world) / "rewritten").stat().st_mtime_ns
    world.write(b"rewritten", b"REWRITTEN" * 1000)
    world.write(b"new", b"new" * 1000)
    world.unlink(b"deleted")
    world.rename(b"step-1", b"step-one")
    world.drain()
    before = world.look()
    world.close()
    exchange(world)
    os.utime(archive(world) / "rewritten", ns=(mtime, mtime))
    report = repair_all(world.policy, quiet)
    assert sorted(Path(problem["path"]).name for problem in report.problems) == ["deleted", "step-1"]
    assert all("move it away" in problem["what"] for problem in report.problems)
    mount(world)
    for name in ("deleted", "step-1"):
        shutil.rmtree(archive(world) / name) if name == "step-1" else (archive(world) / name).unlink()
    world.reopen()
    world.drain()
    assert world.look() == before
    assert (archive(world) / "rewritten").read_bytes() == b"REWRITTEN" * 1000
    world.close()
    assert world.problems() == []
    mount(world)
    world.reopen()


def test_an_older_copy_without_what_no_other_tier_has_is_told_so(world: World) -> None:
    back_up(world)
    world.write(b"run/first", b"9" * 5000)
    world.drain()
    with world.parts.catalog.transaction():
        for replica in world.parts.catalog.replicas(world.ino(b"run/first")):
            if replica.tier != "archive":
                world.parts.files.forget_replica(replica)
    world.close()
    exchange(world)
    report = repair_all(world.policy, quiet)
    assert [(problem["path"], problem["severity"]) for problem in report.problems] == [("run/first", "error")]
    world.reopen()


def empty_and_forsaken(world: World) -> None:
    """Nothing is on the archive any more, and in its place is a new directory. The world is closed."""
    world.unlink(b"run/first")
    world.parts.names.rmdir(1, b"run", CALLER)
    world.drain()
    assert world.parts.catalog.logged > (0, 0)
    world.close()
    archive(world).rename(world.top / "aside")
    archive(world).mkdir()


def test_a_new_archive_for_an_empty_filesystem_is_taken(world: World) -> None:
    empty_and_forsaken(world)
    mount(world)
    mount(world)
    world.reopen()
    world.write(b"new", b"n" * 100)
    world.drain()
    world.close()
    mount(world)
    world.reopen()


def test_a_crash_while_a_new_archive_is_claimed_refuses_it_never(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_and_forsaken(world)
    real = Tiers.check_catalog

    def killed(self: Tiers, *args: Any, claim: bool) -> None:
        real(self, *args, claim=claim)
        if claim:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tiers, "check_catalog", killed)
        with pytest.raises(KeyboardInterrupt):
            mount(world)
    mount(world)
    world.reopen()


@pytest.mark.parametrize("name", ["log-999999999999999999", "copy-1000000000000", "log-1e9", "log--1"])
def test_a_name_that_tierfs_gives_to_nothing_makes_no_archive_an_older_one(world: World, name: str) -> None:
    world.close()
    junk = world.top / "archive" / ".tierfs" / "catalog" / name
    junk.write_bytes(b"junk")
    for number in range(2):
        world.reopen()
        world.write(b"more", b"%d" % number)
        world.drain()
        world.close()
    junk.unlink()
    world.reopen()
    assert world.parts.tree.position() >= world.parts.catalog.logged > (0, 0)


def test_an_archive_of_which_nothing_is_there_is_repaired_only_if_it_is_gone(world: World) -> None:
    """It may only not be mounted; what nothing else has would be given up."""
    world.close()
    archive(world).rename(world.top / "aside")
    archive(world).mkdir()
    for look in (check_all, repair_all):
        with pytest.raises(TierError, match=r"is it mounted\?.*--repair --gone archive"):
            look(world.policy, quiet)
    shutil.rmtree(archive(world))
    (world.top / "aside").rename(archive(world))
    assert check_all(world.policy, quiet) == []
    shutil.rmtree(archive(world))
    archive(world).mkdir()
    report = repair_all(world.policy, quiet, gone=["archive"])
    assert (report.problems, report.lost) == ([], [])
    world.reopen()
    world.drain()
    assert (archive(world) / "run" / "first").read_bytes() == b"1" * 5000


@pytest.mark.parametrize("name", ["model.pt", "lost+found", ".Trash-0"])
def test_a_directory_that_has_files_already_becomes_no_archive(top: Path, name: str) -> None:
    (top / "archive").mkdir()
    (top / "archive" / name).mkdir()
    policy = policy_of(top)
    policy.state.mkdir()
    tiers = Tiers.open(policy)
    catalog = Catalog(catalog_path(policy))
    try:
        if name == "model.pt":
            with pytest.raises(TierError, match=r"is not empty .*model\.pt.*fsck --rebuild"):
                claim(catalog, policy, tiers)
            assert tiers.tree.owner() is None
        else:
            claim(catalog, policy, tiers)
    finally:
        catalog.close()
        tiers.close()
