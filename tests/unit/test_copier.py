"""The catalog is copied to the archive when something changed and not too often, whatever the archive says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.unit.rebuilding import CALLER, World
from tierfs.catalog import take_snapshot
from tierfs.errors import CatalogDamaged, CatalogError, TierError
from tierfs.migrator.keeping import COPY_SECONDS
from tierfs.tiers.copies import LOG_BYTES


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        made = World(Path(path))
        yield made
        made.close()


def test_a_copy_is_made_when_something_changed_and_not_more_often(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = world.parts.migrator.copier
    made: list[float] = []
    paused = False

    async def copy() -> bool:
        made.append(trio.current_time())
        copier._copied_seq = world.parts.catalog.seq
        return True

    monkeypatch.setattr(copier, "copy", copy)

    async def run() -> None:
        nonlocal paused
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copier.run, lambda: paused)
            await trio.sleep(2.5 * COPY_SECONDS)
            assert len(made) == 1
            world.mkdir(b"a")
            await trio.sleep(COPY_SECONDS / 4)
            world.mkdir(b"b")
            await trio.sleep(5 * COPY_SECONDS)
            assert len(made) == 2
            paused = True
            world.mkdir(b"c")
            await trio.sleep(2 * COPY_SECONDS)
            assert len(made) == 2
            paused = False
            await trio.sleep(COPY_SECONDS)
            assert len(made) == 3
            world.mkdir(b"d")
            world.parts.migrator.copies.log_bytes = LOG_BYTES + 1
            await trio.sleep(COPY_SECONDS / 4)
            assert len(made) == 4, "a long log does not wait"
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_an_archive_that_fails_is_said_once_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copier, copies = world.parts.migrator.copier, world.parts.migrator.copies
    caplog.set_level("INFO")

    def fail(*args: object) -> None:
        raise TierError("tier archive: no room")

    async def run() -> list[bool]:
        with monkeypatch.context() as patch:
            patch.setattr(copies, "put", fail)
            failed = [await copier.copy(), await copier.copy()]
        return [*failed, await copier.copy()]

    assert trio.run(run) == [False, False, True]
    assert caplog.text.count("no room") == 1
    assert not list(world.policy.state.glob("catalog.copying*"))
    assert world.parts.catalog.freeze().seq
    world.parts.catalog.thaw()


def test_a_damaged_catalog_replaces_no_good_copy(world: World, tmp_path: Path) -> None:
    for number in range(400):
        world.mkdir(b"%d" % number)
    frozen = world.parts.catalog.freeze()
    world.parts.catalog.thaw()
    whole = take_snapshot(frozen, tmp_path)
    damaged = whole.rename(tmp_path / "catalog")
    data = bytearray(damaged.read_bytes())
    data[8192:40960] = b"\xa5" * (40960 - 8192)
    damaged.write_bytes(data)
    with pytest.raises(CatalogDamaged):
        take_snapshot(frozen._replace(path=damaged, wal_bytes=0), tmp_path)
    assert not list(tmp_path.glob("catalog.copying*"))


def test_the_log_of_batches_ends_where_it_was_cut_off_and_a_full_archive_does_not_stop_deletes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.mkdir(b"a")
    world.drain()
    copies = world.parts.migrator.copies
    assert len(list(copies.logged(0))) >= 1

    real = os.fsync
    before = list(copies.logged(0))

    def fsync(fd: int) -> None:
        if b"log-" in os.fsencode(os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(28, os.strerror(28))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    ino = world.ino(b"a")
    world.parts.names.rmdir(1, b"a", CALLER)
    world.parts.names.forget([ino])
    world.drain()
    monkeypatch.setattr(os, "fsync", real)
    assert not (world.top / "archive" / "a").exists()
    assert list(copies.logged(0)) == before
    (log,) = (world.top / "archive" / ".tierfs" / "catalog").glob("log-*")
    os.truncate(log, log.stat().st_size - 1)
    assert list(copies.logged(0)) == before[:-1]


def test_snapshots_need_room(world: World) -> None:
    frozen = world.parts.catalog.freeze()
    world.parts.catalog.thaw()
    with pytest.raises(CatalogError, match="no copy"):
        take_snapshot(frozen, world.top / "nowhere")
