"""A replica that is evicted, superseded or deleted while the migrator is on its way to it is no fault of its tier."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Coroutine, Hashable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import pytest
import trio
from assembled import Parts, assemble

from tierfs.errors import FsError, TierError
from tierfs.fs.caller import Caller
from tierfs.migrator import early as copying
from tierfs.types import ROOT_INO, Replica, ReplicaState

OLD, NEW = b"old" * (3 << 20), b"new" * 1000
ROOT = Caller(0, 0)

T = TypeVar("T")
Happening = Callable[[Parts, int], None]


class Backing:
    """Stands for the kernel's backing files, with which closed files may be mapped."""

    def open(self, fd: int) -> int:
        return 1

    def close(self, backing_id: int) -> None:
        pass


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def create(parts: Parts, name: bytes = b"f") -> tuple[int, int]:
    """(inode, handle open for writing) of a file with the content OLD."""
    fh, attributes = parts.names.create(ROOT_INO, name, 0o644, os.O_RDWR, ROOT)
    parts.write(fh, 0, OLD)
    return attributes.ino, fh


def durable_on_nvme(parts: Parts, ino: int) -> None:
    """The closed file has been drained that far."""
    (memory,) = parts.catalog.replicas(ino)
    key = parts.files.new_key(ino)
    fd = parts.stores["nvme"].create(key)
    os.write(fd, OLD)
    os.close(fd)
    copy = Replica(memory.ino, memory.version, "nvme", ReplicaState.DURABLE, key, len(OLD), None)
    with parts.catalog.transaction():
        parts.catalog.put_replica(copy)
        parts.catalog.unqueue_drain(ino, memory.version, "nvme")


def remove_bytes(parts: Parts) -> None:
    for tier, key in parts.migrator.remover.doomed:
        parts.stores[tier].remove(key)
    parts.migrator.remover._doomed.clear()


def evicted(parts: Parts, ino: int, tier: str = "memory") -> None:
    attributes = parts.names.attributes(ino)
    assert parts.migrator.evictor.evict(ino, attributes.version, tier)
    remove_bytes(parts)


def superseded(parts: Parts, ino: int) -> None:
    fh = at_once(parts.files.open(ino, os.O_WRONLY | os.O_TRUNC))
    parts.write(fh, 0, NEW)
    parts.files.release(fh)
    remove_bytes(parts)


def at_once(coroutine: Coroutine[object, None, T]) -> T:
    """What it returns: nothing in it waits."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return cast("T", end.value)


def deleted(parts: Parts, ino: int, name: bytes = b"f") -> None:
    parts.names.unlink(ROOT_INO, name, ROOT)
    parts.names.forget([ino])
    remove_bytes(parts)


HAPPENINGS = [(evicted, OLD), (superseded, NEW), (deleted, None)]


def at_first_open(
    target: object, method: str, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]
) -> trio.Event:
    """Let ``happens`` happen when a thread is about to open a file of the tier for the first time; the event says that
    it did."""
    real = getattr(target, method)
    seen = trio.Event()

    def opens(*args: object, **kwargs: object) -> object:
        if not seen.is_set():
            trio.from_thread.run_sync(seen.set)
            trio.from_thread.run_sync(happens)
        return real(*args, **kwargs)

    monkeypatch.setattr(target, method, opens)
    return seen


def drain(parts: Parts, seen: trio.Event | None = None) -> None:
    """Run the migrator until this was seen and everything is on every tier that is to have it."""
    migrator = parts.migrator

    async def use() -> None:
        migrator.hurry += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(migrator.run)
            with trio.fail_after(20):
                if seen is not None:
                    await seen.wait()
                await migrator.flush(ROOT_INO, "archive", 20)
                while migrator.running or parts.catalog.wanted_drains(1):
                    await migrator._progress.wait()
            nursery.cancel_scope.cancel()

    trio.run(use)


def check(parts: Parts, tmp_path: Path, expected: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """The archive has what is wanted, and no tier was complained of."""
    archived = tmp_path / "archive" / "f"
    assert (archived.read_bytes() if archived.exists() else None) == expected
    assert parts.migrator.outages.last_errors == {}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("backing", [None, Backing()], ids=["copy", "look at mappings"])
@pytest.mark.parametrize(("happening", "expected"), HAPPENINGS)
def test_the_source_of_a_drain_vanishes(
    parts: Parts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backing: Backing | None,
    happening: Happening,
    expected: bytes | None,
) -> None:
    parts.files.backing = backing
    ino, fh = create(parts)
    parts.files.release(fh)
    durable_on_nvme(parts, ino)
    seen = at_first_open(parts.stores["memory"], "open", monkeypatch, lambda: happening(parts, ino))
    drain(parts, seen)
    check(parts, tmp_path, expected, caplog)


@pytest.mark.parametrize(("happening", "expected"), HAPPENINGS)
def test_the_source_of_a_copy_ahead_of_the_close_vanishes(
    parts: Parts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    happening: Happening,
    expected: bytes | None,
) -> None:
    """It is closed, and drained to the disk, before the thread comes to open it."""
    monkeypatch.setattr(copying, "EARLY", 1)
    monkeypatch.setattr(copying, "EARLY_STEP", 1)
    monkeypatch.setattr(parts.files.copies, "targets", lambda tier, rule: ["archive"])
    ino, fh = create(parts)

    def happens() -> None:
        parts.files.release(fh)
        durable_on_nvme(parts, ino)
        happening(parts, ino)

    seen = at_first_open(parts.stores["memory"], "open", monkeypatch, happens)
    drain(parts, seen)
    check(parts, tmp_path, expected, caplog)


def test_a_file_that_is_missing_for_no_reason_is_a_fault(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ino, fh = create(parts)
    parts.files.release(fh)
    (memory,) = parts.catalog.replicas(ino)
    parts.stores["memory"].remove(memory.key)
    failed = trio.Event()
    real = parts.migrator.outages.failed

    def fails(tier: str, error: TierError, work: Hashable | None = None) -> None:
        real(tier, error, work)
        failed.set()

    monkeypatch.setattr(parts.migrator.outages, "failed", fails)

    async def use() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator.run)
            with trio.fail_after(20):
                await failed.wait()
            nursery.cancel_scope.cancel()

    trio.run(use)
    assert "tier memory: open: No such file or directory" in caplog.text


# recalls


@pytest.fixture
def cold(parts: Parts) -> int:
    """A file that only nvme and the archive have."""
    ino, fh = create(parts)
    parts.files.release(fh)
    drain(parts)
    evicted(parts, ino)
    return ino


def replay(parts: Parts) -> None:
    """What happened on the mount happens on the archive."""
    archive = parts.migrator.archive
    batch = archive.next_batch(100, {})
    assert batch is not None
    archive.execute(batch)
    archive.commit(batch)


def read(parts: Parts, ino: int) -> bytes:
    async def use() -> bytes:
        fh = await parts.files.open(ino, os.O_RDONLY)
        data = await parts.filesystem.read(fh, 0, len(OLD) + 1)
        parts.files.release(fh)
        return data

    return trio.run(use)


def test_a_recall_goes_on_from_the_archive_when_its_source_is_evicted(
    parts: Parts, cold: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = at_first_open(parts.stores["nvme"], "open", monkeypatch, lambda: evicted(parts, cold, "nvme"))
    trio.run(parts.migrator.recaller.recall, parts.names.attributes(cold), "memory")
    assert seen.is_set()
    assert read(parts, cold) == OLD
    check(parts, tmp_path, OLD, caplog)


def test_a_recall_follows_a_file_that_is_renamed(
    parts: Parts, cold: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it stood, another file stands by the time the thread comes to open it."""
    evicted(parts, cold, "nvme")
    other, fh = create(parts, b"other")
    parts.write(fh, 0, OLD[::-1])
    parts.files.release(fh)
    drain(parts)

    def happens() -> None:
        parts.names.rename(ROOT_INO, b"f", ROOT_INO, b"g", 0, ROOT)
        parts.names.rename(ROOT_INO, b"other", ROOT_INO, b"f", 0, ROOT)
        replay(parts)

    seen = at_first_open(parts.tree, "open_first", monkeypatch, happens)
    assert read(parts, cold) == OLD
    assert seen.is_set()
    assert read(parts, other) == OLD[::-1]
    assert caplog.text == ""


@pytest.mark.parametrize("also_archived", [False, True])
def test_a_file_that_is_deleted_while_it_is_recalled_leaves_nothing(
    parts: Parts, cold: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, also_archived: bool
) -> None:
    evicted(parts, cold, "nvme")

    def happens() -> None:
        deleted(parts, cold)
        if also_archived:
            replay(parts)

    seen = at_first_open(parts.tree, "open_first", monkeypatch, happens)
    with pytest.raises(FsError) as refused:
        read(parts, cold)
    assert refused.value.errno == errno.ENOENT
    assert seen.is_set()
    trio.run(parts.migrator.remove_discarded)
    assert [replica for replica in parts.catalog.all_replicas() if replica.tier != "archive"] == []
    assert list(parts.stores["memory"].keys()) == []
    assert caplog.text == ""


@pytest.mark.parametrize("also_archived", [False, True])
def test_a_warmup_passes_over_a_file_that_is_deleted(
    parts: Parts, cold: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, also_archived: bool
) -> None:
    evicted(parts, cold, "nvme")
    attributes = parts.names.attributes(cold)

    def happens() -> None:
        deleted(parts, cold)
        if also_archived:
            replay(parts)

    seen = at_first_open(parts.tree, "open_first", monkeypatch, happens)
    for _ in range(2):  # once deleted meanwhile, once before its turn
        assert trio.run(parts.migrator.recaller.warmup, attributes) is False
    assert seen.is_set()
    trio.run(parts.migrator.remove_discarded)
    assert [replica for replica in parts.catalog.all_replicas() if replica.tier != "archive"] == []
    assert list(parts.stores["memory"].keys()) == []
    assert caplog.text == ""
