"""The catalog keeps every transaction that ended, whatever kills the process, and nothing of one that did not."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierfs.catalog import Catalog, database
from tierfs.catalog.database import GROUP, INO_BLOCK
from tierfs.catalog.journal import SIZE, Journal
from tierfs.errors import CatalogDamaged, CatalogError, FsError
from tierfs.types import ROOT_INO


def make(catalog: Catalog, name: bytes, request: int | None = None) -> int:
    with catalog.transaction() as transaction:
        ino = catalog.add_inode(0o100644, 0, 0, 1).ino
        catalog.add_entry(ROOT_INO, name, ino)
        transaction.record(request, ino)
    return ino


def names(catalog: Catalog) -> list[bytes]:
    return [entry.name for entry in catalog.entries(ROOT_INO, 0, 1 << 20)]


def killed(catalog: Catalog, to: Path) -> Catalog:
    """The catalog as the next process finds it when this one is killed now."""
    to.mkdir()
    for file in catalog.path.parent.iterdir():
        if file.is_file() and not file.name.endswith("-shm"):
            shutil.copy(file, to)
    return Catalog(to / catalog.path.name)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "catalog")
    yield catalog
    catalog.close()


@pytest.mark.parametrize("count", [0, 1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 7])
def test_a_killed_process_loses_no_transaction(catalog: Catalog, tmp_path: Path, count: int) -> None:
    made = [(b"%d" % number, make(catalog, b"%d" % number, number)) for number in range(count)]
    following = killed(catalog, tmp_path / "next")
    assert names(following) == [name for name, _ in made]
    assert [following.answered(number) for number in range(count)[-2:]] == [ino for _, ino in made[-2:]]
    again = killed(following, tmp_path / "again")
    assert names(again) == names(following)
    again.close()
    following.close()


def test_a_clean_close_needs_no_journal(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    last = make(catalog, b"file")
    catalog.close()
    for file in tmp_path.iterdir():
        if file.name != "catalog":
            file.unlink()
    catalog = Catalog(tmp_path / "catalog")
    assert names(catalog) == [b"file"]
    assert make(catalog, b"next") == last + 1, "no inode number is skipped either"
    catalog.close()


def current_journal(catalog: Path) -> Path:
    return max(catalog.parent.glob("catalog-log.*"), key=lambda file: file.read_bytes()[8:16][::-1])


def execute(catalog: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(catalog)) as database:
        database.execute(sql)
        database.commit()


def overwrite_pages(catalog: Path) -> None:
    """All but the first page of the database and of what the WAL has of them."""
    Catalog(catalog).close()
    execute(catalog, "UPDATE meta SET value=0 WHERE key='clean'")
    data = bytearray(catalog.read_bytes())
    data[4096 : len(data) // 2] = b"\xa5" * (len(data) // 2 - 4096)
    catalog.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "another file": lambda path: path.write_bytes(b"# tierfs\n" * 1000),
    "a page overwritten": lambda path: overwrite_pages(path),
    "emptied": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "wal removed": lambda path: path.with_name("catalog-wal").unlink(),
    "wal overwritten": lambda path: path.with_name("catalog-wal").write_bytes(b"\xff" * 5000),
    "wal cut": lambda path: os.truncate(path.with_name("catalog-wal"), 5000),
    "journal removed": lambda path: current_journal(path).unlink(),
    "journal emptied": lambda path: os.truncate(current_journal(path), 0),
    "no number": lambda path: execute(path, "UPDATE meta SET value='zz' WHERE key='generation'"),
    "no next inode": lambda path: execute(path, "UPDATE meta SET value='zz' WHERE key='next_ino'"),
    "no root": lambda path: execute(path, "DELETE FROM inodes WHERE ino=1"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_lost_or_damaged_catalog_is_refused_each_time(catalog: Catalog, tmp_path: Path, damage: str) -> None:
    """Never an older or empty one in its place: all files that it does not know would be removed as orphans."""
    for number in range(3 * GROUP + 7):
        make(catalog, b"%d" % number)
    (tmp_path / "next").mkdir()
    for file in tmp_path.glob("catalog*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, tmp_path / "next")
    DAMAGE[damage](tmp_path / "next" / "catalog")
    for _ in range(2):
        with pytest.raises(CatalogDamaged, match="catalog") as refused:
            Catalog(tmp_path / "next" / "catalog", verify=True)
        assert "locked" not in str(refused.value)


def test_after_a_power_cut_the_catalog_may_be_older_than_its_journal(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3 * GROUP + 7):
        make(catalog, b"%d" % number)
    (tmp_path / "next").mkdir()
    for file in tmp_path.glob("catalog*"):
        if file.name != "catalog-wal":
            shutil.copy(file, tmp_path / "next")
    monkeypatch.setattr("tierfs.catalog.database.boot_id", lambda: "the next boot")
    following = Catalog(tmp_path / "next" / "catalog")
    assert names(following) == []
    following.close()


def test_a_failed_transaction_takes_nothing_else_along(catalog: Catalog) -> None:
    make(catalog, b"before")
    with pytest.raises(FsError), catalog.transaction():  # noqa: PT012
        catalog.touch_directory(ROOT_INO, 99)
        catalog.add_entry(ROOT_INO, b"half", 7)
        catalog.add_entry(ROOT_INO, b"before", 8)
    make(catalog, b"after")
    assert names(catalog) == [b"before", b"after"]
    root = catalog.attributes(ROOT_INO)
    assert root is not None
    assert root.mtime_ns != 99


def test_changes_outside_a_transaction_are_refused(catalog: Catalog) -> None:
    with pytest.raises(AssertionError):
        catalog.remove_entry(ROOT_INO, b"name")


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_journal_ends_at_the_damage(
    catalog: Catalog, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may leave any part of the journal unwritten: what follows a hole is not executed. Within one boot
    nothing of the kind happens by itself: a hole with records behind it is damage, and refused."""
    rng = random.Random(seed)
    for number in range(GROUP + 40):
        make(catalog, b"%d" % number)
    journals = sorted(tmp_path.glob("catalog-log.*"))
    current = max(journals, key=lambda path: path.read_bytes()[8:16][::-1])
    data = bytearray(current.read_bytes())
    used = len(data.rstrip(b"\0"))
    at = rng.randrange(16, used)
    (tmp_path / "next").mkdir()
    data[at : at + 512] = bytes(512)
    for file in tmp_path.glob("catalog*"):
        if file != current and not file.name.endswith("-shm"):
            shutil.copy(file, tmp_path / "next")
    (tmp_path / "next" / current.name).write_bytes(data)
    if data[at + 512 : used].strip(b"\0"):
        for _ in range(2):
            with pytest.raises(CatalogDamaged, match="goes on behind"):
                Catalog(tmp_path / "next" / "catalog")
    monkeypatch.setattr("tierfs.catalog.database.boot_id", lambda: "the next boot")
    following = Catalog(tmp_path / "next" / "catalog")
    found = names(following)
    assert found == [b"%d" % number for number in range(len(found))]
    assert GROUP <= len(found) < GROUP + 40
    assert following.check() == []
    make(following, b"goes on")
    following.close()


def test_no_inode_number_is_given_twice(catalog: Catalog, tmp_path: Path) -> None:
    highest = max(make(catalog, b"%d" % number) for number in range(10))
    with catalog.transaction():
        catalog.remove_entry(ROOT_INO, b"9")
        catalog.set_links(highest, 0, 1)
        catalog.drop_inodes([highest])
    with pytest.raises(FsError), catalog.transaction():  # noqa: PT012
        lost = catalog.add_inode(0o100644, 0, 0, 1).ino
        catalog.add_entry(ROOT_INO, b"0", lost)
    following = killed(catalog, tmp_path / "next")
    fresh = make(following, b"fresh")
    assert highest < lost < fresh <= lost + INO_BLOCK
    following.close()


def test_a_new_connection_forgets_requests(catalog: Catalog, tmp_path: Path) -> None:
    make(catalog, b"file", 5)
    following = killed(catalog, tmp_path / "next")
    assert following.answered(5) is not None
    following.forget_requests()
    assert following.answered(5) is None
    make(following, b"other", 6)
    third = killed(following, tmp_path / "third")
    assert third.answered(5) is None
    assert third.answered(6) is not None
    third.close()
    following.close()


def test_a_generation_does_not_read_the_records_of_another(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "log")
    journal.begin(1)
    for number in range(5):
        journal.append(number, 0, [("one", (number,))])
    journal.begin(3)
    journal.append(7, 0, [("other", (b"x", None)), ("other", ("y", -1))])
    assert [record.request for record in journal.records(3)] == [7]
    assert next(journal.records(3)).statements == [("other", (b"x", None)), ("other", ("y", -1))]
    assert list(journal.records(1)) == []
    journal.close()


def test_a_full_journal_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "log")
    journal.begin(1)
    count = 0
    with pytest.raises(OSError, match="full"):  # noqa: PT012
        while True:
            journal.append(count, 0, [("sql", (bytes(100_000),))])
            count += 1
    assert count == SIZE // 100_100
    with pytest.raises(OSError, match="full"):
        journal.append(count, 0, [("a new text", (bytes(100_000),))])
    journal.append(count, 0, [("a new text", (b"small",))])
    assert [record.request for record in journal.records(1)] == list(range(count + 1))
    journal.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_full_disk_loses_nothing_and_work_goes_on_once_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", disk], check=True)
    try:
        catalog = Catalog(disk / "catalog")
        free = os.statvfs(disk)
        filler = disk / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        count = 0
        with pytest.raises(OSError, match="full"):  # noqa: PT012
            while True:
                make(catalog, b"%d" % count)
                count += 1
                with catalog.transaction():
                    catalog.set_xattr(ROOT_INO, b"user.%d" % (count % 8), os.urandom(10_000))
        with pytest.raises(CatalogError, match="full"):
            catalog.commit()
        assert len(names(catalog)) == count > GROUP
        filler.unlink()
        catalog.commit()
        make(catalog, b"more")
        catalog.close()
        catalog = Catalog(disk / "catalog")
        assert len(names(catalog)) == count + 1
        catalog.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def test_a_bulk_transaction_is_all_or_nothing_whatever_its_size(tmp_path: Path) -> None:
    """It is larger than the journal, and killed inside it leaves no trace."""

    def make(catalog: Catalog, first: int) -> None:
        for number in range(first, first + 300):
            attributes = catalog.add_inode(0o100644, 0, 0, 1)
            catalog.set_xattr(attributes.ino, b"user.x", b"x" * 30_000)
            catalog.add_entry(1, b"%d" % number, attributes.ino)

    catalog = Catalog(tmp_path / "catalog")
    with catalog.transaction():
        catalog.add_entry(1, b"before", 1)

    def fail() -> None:
        with catalog.bulk():
            make(catalog, 0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [entry.name for entry in catalog.entries(1, 0, 1000)] == [b"before"]
    with catalog.bulk():
        make(catalog, 1000)
    with catalog.transaction():
        catalog.add_entry(1, b"after", 1)

    def die() -> None:
        with catalog.bulk():
            make(catalog, 2000)
            shutil.copytree(tmp_path, tmp_path.with_name("copy"))  # as a killed daemon leaves it
            raise RuntimeError

    with pytest.raises(RuntimeError):
        die()
    catalog.close()
    again = Catalog(tmp_path.with_name("copy") / "catalog")
    names = {entry.name for entry in again.entries(1, 0, 1000)}
    assert names == {b"before", b"after", *(b"%d" % number for number in range(1000, 1300))}
    again.close()


def _bulk(catalog: Catalog) -> None:
    with catalog.bulk():
        catalog.add_entry(ROOT_INO, b"name", 2)


@pytest.mark.parametrize("step", [Catalog.commit, Catalog.checkpoint, Catalog.freeze, Catalog.forget_requests, _bulk])
def test_a_block_that_changes_nothing_is_in_nothings_way(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, step: Callable[[Catalog], object]
) -> None:
    """SQLite has a transaction open then, in which it can neither be folded nor closed."""
    monkeypatch.setattr(database, "CHECKPOINT_BYTES", 0)
    with catalog.transaction():
        catalog.add_entry(ROOT_INO, b"before", 2)
    catalog.commit()
    for _ in range(2):
        with catalog.transaction():
            pass
        step(catalog)
        if step is _bulk:
            with catalog.transaction():
                catalog.remove_entry(ROOT_INO, b"name")
    assert catalog.lookup(ROOT_INO, b"before") is None  # a name without an inode
    assert catalog.has_entries(ROOT_INO)
