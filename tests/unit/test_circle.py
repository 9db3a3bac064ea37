"""Deletes make room on full disks where that costs no last good copy, and say so where it would.

On real ext4 of a few MiB, with the migrator at work."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble
from test_mover import content

from tests.conftest_disks import can_mount_loops, fill
from tests.mount.conftest import loop_disk
from tierfs.fs.caller import Caller
from tierfs.migrator.circle import stuck_file
from tierfs.types import ROOT_INO

MIB = 1 << 20
ME = Caller(0, 0)
DISK = 48 * MIB
LARGE = 12 * MIB
"""More than is left on a disk that was filled down to `LEFT`."""
LEFT = 8 * MIB

pytestmark = pytest.mark.skipif(not can_mount_loops("mkfs.ext4"), reason="needs root and mkfs")


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with loop_disk(tmp_path, "nvme", DISK), loop_disk(tmp_path, "archive", DISK):
        made = assemble(tmp_path)
        yield made
        made.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Parts]:
    """Memory and archive alone."""
    with loop_disk(tmp_path, "archive", DISK):
        made = assemble(tmp_path, disks=())
        yield made
        made.close()


@contextlib.asynccontextmanager
async def working(parts: Parts) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.migrator.run)
        with trio.fail_after(60):
            yield
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], object]) -> None:
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


def fill_down(disk: Path, left: int) -> Path:
    """Somebody else's file takes all but ``left`` bytes."""
    with (disk / "foreign").open("wb") as file:
        room = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - left)
        if not left:
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                fill(file.fileno())
    return disk / "foreign"


def refused(parts: Parts, tier: str) -> bool:
    return tier in parts.migrator.outages


def test_the_copy_of_two_that_is_not_the_last_goes_and_with_it_the_circle(parts: Parts, tmp_path: Path) -> None:
    """Both disks are full of what is deleted, and the deletes wait for a file that fits on neither of them."""
    archive = tmp_path / "archive"

    async def use() -> None:
        old = save(parts, b"old", LARGE)
        async with working(parts):
            await until(lambda: (archive / "old").exists() and parts.migrator.durable(old, 1, "nvme"))
            parts.migrator.paused = True
            for disk in ("nvme", "archive"):
                fill_down(tmp_path / disk, LEFT)
            save(parts, b"new", LARGE)
            delete(parts, b"old", old)
            parts.migrator.paused = False
            parts.migrator.kick()
            await until(lambda: (archive / "new").exists())
            assert (archive / "new").read_bytes() == content(LARGE)
            assert not (archive / "old").exists()
            assert stuck_file(parts.migrator) is None

    trio.run(use)
    assert parts.catalog.inconsistencies() == []


def test_a_circle_that_only_the_last_good_copy_could_break_stays_and_is_named(parts: Parts, tmp_path: Path) -> None:
    """What is deleted is on one disk alone, and what it waits for in memory alone."""
    archive, nvme = tmp_path / "archive", tmp_path / "nvme"

    async def use() -> None:
        async with working(parts):
            foreign = fill_down(archive, MIB)
            old = save(parts, b"old", LARGE)
            await until(lambda: parts.migrator.durable(old, 1, "nvme") and refused(parts, "archive"))
            assert stuck_file(parts.migrator) is None
            fill_down(nvme, LEFT)
            new = save(parts, b"new", LARGE)
            delete(parts, b"old", old)
            await until(lambda: refused(parts, "nvme"))
            stuck = stuck_file(parts.migrator)
            assert stuck is not None
            assert stuck.ino == new
            (replica,) = [r for r in parts.catalog.replicas(old) if r.tier == "nvme"]
            assert parts.stores["nvme"].size(replica.key) == LARGE, "the last good copy"
            foreign.unlink()
            await until(lambda: (archive / "new").exists())
            assert stuck_file(parts.migrator) is None
            await until(lambda: parts.catalog.replicas(old) == [])

    trio.run(use)
    assert parts.catalog.inconsistencies() == []


def test_deleting_what_does_not_fit_ends_the_circle(two: Parts, tmp_path: Path) -> None:
    archive = tmp_path / "archive"

    async def use() -> None:
        old = save(two, b"old", LARGE)
        async with working(two):
            await until(lambda: (archive / "old").exists())
            fill_down(archive, LEFT)
            new = save(two, b"new", LARGE)
            delete(two, b"old", old)
            await until(lambda: refused(two, "archive"))
            stuck = stuck_file(two.migrator)
            assert stuck is not None
            assert stuck.ino == new
            assert (archive / "old").read_bytes() == content(LARGE), "the last good copy"
            delete(two, b"new", new)
            await until(lambda: not (archive / "old").exists())
            assert stuck_file(two.migrator) is None

    trio.run(use)
    assert two.catalog.inconsistencies() == []
