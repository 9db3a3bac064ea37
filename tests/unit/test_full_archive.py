"""A full archive can be emptied by deleting on the mount, and the last good copy stays nevertheless.

On a real tmpfs that fills up, with the migrator at work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble
from test_mover import content, needs_root, small

from tierfs.fs.caller import Caller
from tierfs.migrator.steps import Batch
from tierfs.types import ROOT_INO

MIB = 1 << 20
ME = Caller(0, 0)

pytestmark = [needs_root, pytest.mark.filterwarnings("default")]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    """nvme has room, the archive 10 MiB."""
    with small(tmp_path / "archive", "10M"):
        made = assemble(tmp_path)
        yield made
        made.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Parts]:
    """Memory and an archive of 10 MiB."""
    with small(tmp_path / "archive", "10M"):
        made = assemble(tmp_path, disks=())
        yield made
        made.close()


@contextlib.asynccontextmanager
async def working(parts: Parts) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.migrator.run)
        with trio.fail_after(30):
            yield
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it looks at is on the disk
        await trio.sleep(0.02)


def save(parts: Parts, name: bytes, size: int) -> int:
    fh, attributes = parts.names.create(ROOT_INO, name, 0o644, os.O_RDWR, ME)
    parts.write(fh, 0, content(size))
    parts.files.release(fh)
    return attributes.ino


def delete(parts: Parts, name: bytes, ino: int) -> None:
    parts.names.unlink(ROOT_INO, name, ME)
    parts.names.forget([ino])


def full(parts: Parts) -> bool:
    return parts.migrator._archive_full


def test_deletes_go_before_what_does_not_fit(parts: Parts, tmp_path: Path) -> None:
    archive = tmp_path / "archive"

    async def use() -> None:
        old = save(parts, b"old", 6 * MIB)
        other = save(parts, b"other", 2 * MIB)
        async with working(parts):
            await until(lambda: (archive / "old").exists() and (archive / "other").exists())
            new = save(parts, b"new", 6 * MIB)
            await until(lambda: full(parts) and parts.migrator.durable(new, 1, "nvme"))
            (parts.names.rename(ROOT_INO, b"other", ROOT_INO, b"renamed", 0, ME))
            delete(parts, b"old", old)
            await until(lambda: (archive / "new").exists())
            assert not (archive / "old").exists()
            assert (archive / "new").read_bytes() == content(6 * MIB)
            await until(lambda: (archive / "renamed").exists())
            await until(lambda: parts.catalog.first_operation() == 0)
            assert not full(parts)
            assert parts.catalog.attributes(other) is not None

    trio.run(use)
    assert parts.catalog.inconsistencies() == []


def test_the_last_good_copy_stays_even_when_the_archive_is_full(two: Parts, tmp_path: Path) -> None:
    """What the delete waits for is in memory only: a power cut would leave nothing at all."""
    archive = tmp_path / "archive"

    async def use() -> None:
        old = save(two, b"old", 6 * MIB)
        async with working(two):
            await until(lambda: (archive / "old").exists())
            save(two, b"new", 6 * MIB)
            await until(lambda: full(two))
            delete(two, b"old", old)
            for _ in range(3):
                two.migrator._deleted = True
                two.migrator.kick()
                await trio.sleep(0.2)
            assert (archive / "old").read_bytes() == content(6 * MIB)

    trio.run(use)


def test_deleting_what_does_not_fit_lets_the_rest_go_on(two: Parts, tmp_path: Path) -> None:
    archive = tmp_path / "archive"

    async def use() -> None:
        save(two, b"old", 6 * MIB)
        async with working(two):
            await until(lambda: (archive / "old").exists())
            new = save(two, b"new", 6 * MIB)
            await until(lambda: full(two))
            save(two, b"small", MIB)
            delete(two, b"new", new)
            await until(lambda: (archive / "small").exists())
            assert (archive / "old").exists()
            assert not (archive / "new").exists()
            assert os.listdir(archive / ".tierfs" / "tmp") == []

    trio.run(use)


def test_nothing_overtakes_what_concerns_its_own_name_or_file(parts: Parts, tmp_path: Path) -> None:
    """a is renamed to b and b deleted, while the content of c does not fit: b on the archive is still another file."""
    archive = tmp_path / "archive"

    async def use() -> None:
        a, b = save(parts, b"a", 3 * MIB), save(parts, b"b", 3 * MIB)
        async with working(parts):
            await until(lambda: (archive / "a").exists() and (archive / "b").exists())
            c = save(parts, b"c", 6 * MIB)
            await until(lambda: full(parts) and parts.migrator.durable(c, 1, "nvme"))
            await until(lambda: parts.catalog.published(ROOT_INO, b"c") is not None)
            parts.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0, ME)
            delete(parts, b"b", a)
            parts.names.forget([b])
            batch = parts.migrator.archive.next_batch(10, {}, full=True)
            assert batch is None, "the rename is before the delete"
            assert (archive / "a").exists()
            delete(parts, b"c", c)
            await until(lambda: not (archive / "a").exists() and not (archive / "b").exists())

    trio.run(use)


def test_a_batch_of_such_deletes_is_stored_and_done_again_after_a_crash(parts: Parts, tmp_path: Path) -> None:
    archive = tmp_path / "archive"

    async def use() -> None:
        old = save(parts, b"old", 6 * MIB)
        async with working(parts):
            await until(lambda: (archive / "old").exists())
        new = save(parts, b"new", 6 * MIB)
        parts.migrator._archive_full = True
        async with working(parts):
            await until(lambda: parts.migrator.durable(new, 1, "nvme"))
        parts.migrator.paused = True
        delete(parts, b"old", old)
        batch = parts.migrator.archive.next_batch(10, {}, full=True)
        assert batch is not None
        stored = parts.catalog.intent()
        assert stored is not None
        again = Batch.decode(stored)
        assert again.ahead == batch.ahead
        assert (again.last, len(again.ahead)) == (0, 1)
        waiting = parts.catalog.first_operation()
        for found in (batch, again):
            parts.migrator.archive.execute(found)
        parts.migrator.archive.commit(again)
        assert not (archive / "old").exists()
        assert parts.catalog.first_operation() == waiting, "what did not fit keeps its place"
        assert again.ahead[0] not in [op.seq for op in parts.catalog.operations(10)]

    trio.run(use)


def test_a_batch_stored_by_an_earlier_program_is_read(parts: Parts) -> None:
    assert Batch.decode('[7,[],[],[],[]]').ahead == []
