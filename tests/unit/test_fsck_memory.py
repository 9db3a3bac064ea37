"""fsck before the first mount after a reboot: the memory tier is gone, and the next mount decides what comes of it."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator

import pytest

from tests.unit.rebuilding import World, drained_world
from tierfs.fsck import repair_all
from tierfs.fsck.session import catalog_path
from tierfs.migrator.rollback import recover_lost_memory
from tierfs.report import GONE, LOST, ROLLED_BACK, UNDONE, Report

Problem = dict[str, str]


@pytest.fixture
def world() -> Iterator[World]:
    with drained_world() as made:
        yield made


def use(world: World) -> None:
    """One of each kind of thing that a reboot takes."""
    world.write(b"run/step-1/model.pt", b"newer, in memory alone")
    world.write(b"run/new.pt", b"in memory alone")
    world.rename(b"run/empty", b"run/renamed")
    world.unlink(b"run/sparse")


def reboot(world: World, damage: Callable[[], object] = lambda: None) -> list[Problem]:
    """What fsck says after it."""
    world.crash()
    shutil.rmtree(world.top / "memory")
    damage()
    return world.problems()


def of(problems: list[Problem], *severities: str) -> list[tuple[str, str]]:
    return [(problem["what"], problem["path"]) for problem in problems if problem["severity"] in severities]


def recover(world: World) -> Report:
    """What the mount does then."""
    world.reopen()
    parts = world.parts
    report = recover_lost_memory(parts.catalog, world.policy, parts.stores, parts.files, parts.migrator.archive.storing)
    world.close()
    return report


def test_fsck_after_a_reboot_tells_what_the_next_mount_does(world: World) -> None:
    use(world)
    problems = reboot(world)
    (line,) = of(problems, GONE)
    assert line[0] == (
        "memory tier memory is gone since the last mount (a reboot): at the next mount 1 file is rolled back, "
        "1 file is lost, 2 changes of names are undone"
    )
    assert [problem["severity"] for problem in problems if problem["severity"] in ("error", "orphan")] == []
    report = recover(world)
    for severity, entries in ((ROLLED_BACK, report.rolled_back), (LOST, report.lost), (UNDONE, report.undone)):
        assert of(problems, severity) == [(str(entry), entry.path) for entry in entries]  # type: ignore[attr-defined]


def test_fsck_after_a_reboot_changes_nothing(world: World) -> None:
    def contents() -> list[str]:
        with contextlib.closing(sqlite3.connect(catalog_path(world.policy))) as database:
            return [line for line in database.iterdump() if '"meta"' not in line]

    use(world)
    first = reboot(world)
    before, files = contents(), sorted(world.top.glob("nvme/data/*/*"))
    assert world.problems() == first
    assert contents() == before
    assert sorted(world.top.glob("nvme/data/*/*")) == files


def test_fsck_after_a_reboot_that_took_nothing_says_so(world: World) -> None:
    problems = reboot(world)
    (line,) = problems
    assert line["severity"] == GONE
    assert line["what"].endswith("nothing is lost, other tiers have every file")


def test_fsck_after_a_reboot_finds_real_damage_besides(world: World) -> None:
    use(world)
    ino = world.ino(b"run/step-1/na\xff\xfeme")
    (replica,) = [r for r in world.parts.catalog.replicas(ino) if r.tier == "nvme"]
    (file,) = (world.top / "nvme" / "data").rglob(replica.key)

    def damage() -> None:
        file.unlink()
        (world.top / "archive" / "run" / "empty").unlink()

    problems = reboot(world, damage)
    assert len(of(problems, GONE)) == 1
    assert of(problems, LOST) != []
    whats = [what for what, _ in of(problems, "error")]
    assert sorted(whats) == ["missing on the archive", "no file for the replica on nvme"]


def test_a_file_missing_from_memory_that_is_there_is_damage(world: World) -> None:
    world.write(b"run/new.pt", b"in memory alone")
    (replica,) = world.parts.catalog.replicas(world.ino(b"run/new.pt"))
    (file,) = (world.top / "memory" / "data").rglob(replica.key)
    world.crash()
    file.unlink()
    assert of(world.problems(), "error") == [("no file for the replica on memory", "run/new.pt")]
    assert of(world.problems(), GONE) == []


def test_a_broken_catalog_is_told_before_what_the_mount_would_do(world: World) -> None:
    use(world)
    ino = world.ino(b"run/step-1/model.pt")

    def damage() -> None:
        assert world.problems() != []  # the journal is in SQLite then
        with contextlib.closing(sqlite3.connect(catalog_path(world.policy))) as database:
            database.execute("UPDATE inodes SET nlink=7 WHERE ino=?", (ino,))
            database.commit()

    problems = reboot(world, damage)
    (line,) = of(problems, GONE)
    assert "once the catalog is repaired" in line[0]
    assert of(problems, "error") != []
    repair_all(world.policy, lambda done, total, what: None)
    assert world.problems() == []


def test_what_is_under_way_on_the_archive_may_save_some_of_it(world: World) -> None:
    world.rename(b"run", b"moved")
    assert world.parts.migrator.archive.next_batch(10, {}) is not None
    world.write(b"moved/new.pt", b"in memory alone")
    (line,) = of(reboot(world), GONE)
    assert line[0].endswith(
        "at the next mount 1 file is lost; perhaps fewer, as it first finishes what is under way on the archive"
    )
