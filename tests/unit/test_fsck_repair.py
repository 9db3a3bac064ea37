"""After fsck --repair a plain fsck finds nothing, and nothing that had bytes is gone."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.rebuilding import World, drained_world
from tierfs.errors import MountError
from tierfs.fs.copies import drains_of
from tierfs.fsck import repair_all
from tierfs.fsck.session import Report, catalog_path
from tierfs.state import state_lock
from tierfs.tiers.beside import SUFFIX


@pytest.fixture
def world() -> Iterator[World]:
    with drained_world() as made:
        yield made
        made.close()


def repaired(world: World, damage: Callable[[], object]) -> Report:
    """What was done about ``damage`` to the closed filesystem, which fsck finds before and not after."""
    world.close()
    damage()
    assert world.problems() != []
    report = repair_all(world.policy, lambda done, total, what: None, data=True)
    assert report.problems == []
    assert world.problems() == []
    again = repair_all(world.policy, lambda done, total, what: None, data=True)
    assert again.deeds == [], "a second repair has nothing to do"
    world.reopen()
    return report


def replica(world: World, path: bytes, tier: str) -> Path:
    ino = world.ino(path)
    (found,) = [r for r in world.parts.catalog.replicas(ino) if r.tier == tier]
    (file,) = (world.top / tier / "data").rglob(found.key)
    return file


def execute(world: World, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(catalog_path(world.policy))) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def kinds(report: Report) -> set[str]:
    return {deed.kind for deed in report.deeds}


def test_a_sound_filesystem_is_left_alone(world: World) -> None:
    before = world.look()
    world.close()
    report = repair_all(world.policy, lambda done, total, what: None, data=True)
    assert (report.deeds, report.problems) == ([], [])
    world.reopen()
    assert world.look() == before


def test_it_refuses_while_mounted(world: World) -> None:
    with state_lock(world.policy.state), pytest.raises(MountError, match="in use"):
        repair_all(world.policy, lambda done, total, what: None)


def test_orphans_go(world: World) -> None:
    before = world.look()
    nvme = replica(world, b"run/step-1/model.pt", "nvme").parent

    def damage() -> None:
        store = world.parts.stores["nvme"]
        store.prepare()
        os.close(store.create("77-1"))
        with contextlib.suppress(FileExistsError):
            os.close(store.create("2-2"))
        directory = next(path.parent for path in (world.top / "nvme" / "data").rglob("77-1"))
        (directory / "README").write_text("not a replica's name: not ours")
        (directory / f"77-1{SUFFIX}").write_bytes(b"")
        store.close()

    report = repaired(world, damage)
    assert kinds(report) == {"removed"}
    assert world.look() == before
    assert not list((world.top / "nvme" / "data").rglob("77-1*"))
    assert len(list((world.top / "nvme" / "data").rglob("README"))) == 1
    assert nvme.is_dir()


@pytest.mark.parametrize("tier", ["memory", "nvme"])
@pytest.mark.parametrize("how", ["missing", "cut", "overwritten"])
def test_a_bad_replica_is_replaced_from_a_good_one(world: World, tier: str, how: str) -> None:
    before = world.look()
    file = replica(world, b"run/step-1/model.pt", tier)

    def damage() -> None:
        if how == "missing":
            file.unlink()
        elif how == "cut":
            os.truncate(file, 1000)
        else:
            with file.open("r+b") as data:
                data.seek(100_000)
                data.write(b"damage")

    if (tier, how) == ("memory", "overwritten"):
        pytest.skip("a file in memory has no digest before it is drained")
    report = repaired(world, damage)
    found = world.look()
    for path, entry in before.items():
        assert found[path] == entry
    if tier == "nvme":
        assert "replaced" in " ".join(deed.what for deed in report.deeds)
        removed = [] if how == "missing" else ["removed a bad replica on nvme"]
        assert [deed.what for deed in report.deeds if deed.kind == "removed"] == removed
        assert replica(world, b"run/step-1/model.pt", "nvme") != file
        record = world.parts.stores["nvme"].record(replica(world, b"run/step-1/model.pt", "nvme").name)
        assert record is not None


@pytest.mark.parametrize("how", ["missing", "cut", "overwritten", "directory missing"])
def test_what_the_archive_lost_is_made_there_again(world: World, how: str) -> None:
    before = world.look()
    file = world.top / "archive" / "run" / "step-1" / os.fsdecode(b"na\xff\xfeme")

    def damage() -> None:
        if how == "missing":
            file.unlink()
        elif how == "cut":
            os.truncate(file, 3)
        elif how == "overwritten":
            status = file.stat()
            file.write_bytes(b"NOT UTF-8")
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            for path in sorted((world.top / "archive" / "run").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            (world.top / "archive" / "run").rmdir()

    repaired(world, damage)
    world.drain()
    assert world.look() == before
    assert file.read_bytes() == b"not UTF-8"
    world.close()
    assert world.problems() == []
    world.reopen()
    assert (world.top / "archive" / "run" / "latest").is_symlink()
    assert (world.top / "archive" / "run" / "step-1" / "model.pt").stat().st_nlink == 2


def test_what_scrub_listed_as_damaged_is_not_listed_once_repaired(world: World) -> None:
    ino = world.ino(b"best.pt")
    (archived,) = [r for r in world.parts.catalog.replicas(ino) if r.tier == "archive"]
    with world.parts.catalog.transaction():
        world.parts.catalog.put_damage(archived, "does not have the bytes written to it", 1)

    def damage() -> None:
        with (world.top / "archive" / "best.pt").open("r+b") as file:
            file.write(b"other bytes")

    repaired(world, damage)
    world.drain()
    (archived,) = [r for r in world.parts.catalog.replicas(ino) if r.tier == "archive"]
    assert not world.parts.catalog.is_damaged(archived)


def test_a_file_changed_on_the_archive_alone_is_taken_as_it_is(world: World) -> None:
    for tier in ("memory", "nvme"):
        world_replica = replica(world, b"best.pt", tier)
        world_replica.unlink()
    execute_after_close = [f"DELETE FROM replicas WHERE ino={world.ino(b'best.pt')} AND tier<>'archive'"]

    def damage() -> None:
        execute(world, *execute_after_close)
        (world.top / "archive" / "best.pt").write_bytes(b"edited by hand")

    repaired(world, damage)
    assert world.look()[b"best.pt"][9] == [b"edited by hand"]


def test_a_file_without_bytes_loses_its_name_and_is_named(world: World) -> None:
    world.write(b"only-memory", b"m" * 100)
    file = replica(world, b"only-memory", "memory")
    report = repaired(world, file.unlink)
    assert [deed.path for deed in report.deeds if deed.kind == "lost"] == ["only-memory"]
    assert b"only-memory" not in world.look()


@pytest.mark.parametrize("gone", ["the archive's only copy", "every copy"])
def test_what_is_lost_is_told_once_and_not_as_mended(world: World, gone: str) -> None:
    path = b"run/step-1/na\xff\xfeme"
    ino = world.ino(path)
    copies = [replica(world, path, tier) for tier in ("memory", "nvme")]
    archived = world.top / "archive" / "run" / "step-1" / os.fsdecode(b"na\xff\xfeme")

    def damage() -> None:
        for file in (*copies, archived):
            file.unlink()
        if gone == "the archive's only copy":
            execute(world, f"DELETE FROM replicas WHERE ino={ino} AND tier<>'archive'")

    report = repaired(world, damage)
    shown = path.decode(errors="replace")
    assert [(deed.kind, deed.path) for deed in report.deeds if deed.path == shown] == [("lost", shown)]
    assert report.lost == report.as_json()["lost"] == [shown]
    world.drain()
    assert path not in world.look()


def test_a_lost_version_falls_back_to_the_durable_one(world: World) -> None:
    before = world.look()
    world.write(b"run/step-1/model.pt", b"newer, in memory alone")
    repaired(world, replica(world, b"run/step-1/model.pt", "memory").unlink)
    assert world.look()[b"best.pt"][9] == before[b"best.pt"][9]


def test_bad_bytes_without_a_good_copy_are_kept_aside(world: World) -> None:
    world.write(b"precious", b"p" * 1000)
    file = replica(world, b"precious", "memory")
    report = repaired(world, lambda: os.truncate(file, 700))
    assert kinds(report) >= {"recovered", "lost"}
    assert [e[9] for p, e in world.look().items() if p.startswith(b"tierfs-recovered/precious")] == [[b"p" * 700]]


SQL = {
    "a name without an inode": ["INSERT INTO dentries VALUES (1, X'6162', 999, 999999)"],
    "a name below a file": [
        "INSERT INTO dentries SELECT ino, X'6162', ino, 999999 FROM dentries WHERE name=CAST('best.pt' AS BLOB)"
    ],
    "link counts": [
        "UPDATE inodes SET nlink=nlink+3 WHERE mode & 61440 = 32768",
        "UPDATE inodes SET nlink=9 WHERE ino=1",
    ],
    "sums": ["UPDATE sums SET bytes=bytes+7"],
    "a file without a name": ["DELETE FROM dentries WHERE name=CAST('sparse' AS BLOB)"],
    "a directory without a name": ["DELETE FROM dentries WHERE name=CAST('step-1' AS BLOB)"],
    "a ring of directories": [
        "UPDATE dentries SET parent=(SELECT ino FROM dentries WHERE name=CAST('step-1' AS BLOB))"
        " WHERE name=CAST('run' AS BLOB)"
    ],
    "replicas without an inode": [
        "DELETE FROM inodes WHERE ino=(SELECT ino FROM dentries WHERE name=CAST('sparse' AS BLOB))",
    ],
}


@pytest.mark.parametrize("what", SQL)
def test_rows_that_contradict_each_other_are_mended(world: World, what: str) -> None:
    """Every file's bytes are there afterwards, under its own name or a new one."""
    before = sorted(entry[9][0] for entry in world.look().values() if entry[9])  # type: ignore[index]
    report = repaired(world, lambda: execute(world, *SQL[what]))
    after = sorted({entry[9][0] for entry in world.look().values() if entry[9]})  # type: ignore[index]
    assert after == sorted(set(before))
    assert "lost" not in kinds(report)
    world.drain()
    world.close()
    assert world.problems() == []
    world.reopen()


def test_what_is_not_durable_is_queued_again(world: World) -> None:
    world.write(b"run/new", b"new")
    world.close()
    execute(world, "DELETE FROM drains", "DELETE FROM oplog WHERE kind=5")
    assert repair_all(world.policy, lambda done, total, what: None).problems == []
    world.reopen()
    world.drain()
    assert (world.top / "archive" / "run" / "new").read_bytes() == b"new"


def test_what_is_neither_archived_nor_queued_is_named(world: World) -> None:
    world.write(b"run/new", b"new")
    with world.parts.catalog.transaction():
        world.parts.catalog.remember_drains(drains_of(world.policy))
    world.close()
    assert world.problems() == []
    execute(world, "DELETE FROM oplog WHERE kind=5")
    what = {"severity": "error", "what": "neither on the archive nor queued for it", "path": "run/new"}
    assert world.problems() == [what]
    assert repair_all(world.policy, lambda done, total, what: None).problems == []
    assert world.problems() == []
    world.reopen()
    world.drain()
    assert (world.top / "archive" / "run" / "new").read_bytes() == b"new"


def test_a_batch_that_was_begun_is_carried_out(world: World) -> None:
    world.rename(b"run", b"walk")
    archive = world.parts.migrator.archive
    batch = archive.next_batch(100, {})
    assert batch is not None
    world.parts.tree.rename((b"run",), (b"walk",))
    world.close()
    assert world.problems() == [], "it is no damage"
    assert repair_all(world.policy, lambda done, total, what: None).problems == []
    assert world.problems() == []
    world.reopen()
    assert (world.top / "archive" / "walk").is_dir()
    assert not (world.top / "archive" / "run").exists()


def test_bytes_that_were_not_written_replace_nothing(world: World) -> None:
    """The nvme replica is missing and the archive's has other bytes: neither is made from the other, and it is said."""
    missing = replica(world, b"best.pt", "nvme")
    ino = world.ino(b"best.pt")
    world.close()
    missing.unlink()
    execute(world, f"DELETE FROM replicas WHERE ino={ino} AND tier='memory'")
    with (world.top / "archive" / "best.pt").open("r+b") as file:
        file.write(b"other bytes")
    report = repair_all(world.policy, lambda done, total, what: None, data=True)
    (problem,) = report.problems
    assert problem["what"] == "replica on archive does not have the bytes written to it"
    world.reopen()
    assert {r.tier for r in world.parts.catalog.replicas(ino)} == {"archive"}
