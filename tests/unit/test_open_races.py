"""An open waits for copies of the file; what it knew before it waited may not be true any more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble

from tierfs.fs.caller import Caller
from tierfs.types import ROOT_INO, Replica, ReplicaState

OLD = b"old" * 1000


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def make(parts: Parts) -> tuple[int, int]:
    """(inode, handle open for writing) of a file with the content OLD."""
    fh, attributes = parts.names.create(ROOT_INO, b"f", 0o644, os.O_RDWR, Caller(0, 0))
    parts.write(fh, 0, OLD)
    return attributes.ino, fh


def meanwhile(parts: Parts, happens: Callable[[], None]) -> None:
    """Let ``happens`` happen the next time that something waits for the copies of a file."""

    async def quiesce(ino: int) -> None:
        parts.files.quiesce = parts.migrator.quiesce
        await trio.lowlevel.checkpoint()
        happens()

    parts.files.quiesce = quiesce


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
def test_the_last_handle_is_released_while_another_open_waits(parts: Parts, flags: int) -> None:
    ino, first = make(parts)
    meanwhile(parts, lambda: parts.files.release(first))
    second = trio.run(parts.files.open, ino, flags)
    assert parts.write(second, 0, b"new") == 3
    parts.files.release(second)
    content(parts, ino, b"new" if flags & os.O_TRUNC else b"new" + OLD[3:])


def test_the_last_handle_is_released_while_a_truncate_waits(parts: Parts) -> None:
    ino, first = make(parts)
    meanwhile(parts, lambda: parts.files.release(first))
    trio.run(parts.files.truncate, ino, 4)
    assert not parts.files.inodes
    content(parts, ino, OLD[:4])


def test_an_open_that_is_cancelled_while_it_waits_holds_nothing(parts: Parts) -> None:
    ino, first = make(parts)

    async def open_cancelled() -> None:
        with trio.CancelScope() as scope:

            async def quiesce(_: int) -> None:
                scope.cancel()
                await trio.sleep_forever()

            parts.files.quiesce = quiesce
            await parts.files.open(ino, os.O_WRONLY)
        assert scope.cancelled_caught

    trio.run(open_cancelled)
    parts.files.release(first)
    assert not parts.files.inodes


def test_the_replica_is_evicted_while_a_writing_open_waits(parts: Parts) -> None:
    ino, first = make(parts)
    parts.files.release(first)
    memory = parts.catalog.replicas(ino)[0]
    assert memory.tier == "memory"

    def drained_and_evicted() -> None:
        fd = parts.stores["nvme"].create("2-1")
        os.write(fd, OLD)
        os.close(fd)
        with parts.catalog.transaction():
            parts.catalog.put_replica(
                Replica(memory.ino, memory.version, "nvme", ReplicaState.DURABLE, "2-1", len(OLD), None)
            )
        assert parts.migrator.evictor.evict(ino, memory.version, "memory")

    meanwhile(parts, drained_and_evicted)

    async def append() -> None:
        handle = await parts.files.open(ino, os.O_WRONLY)
        parts.write(handle, len(OLD), b"more")
        parts.files.release(handle)
        await parts.migrator.remove_discarded()

    trio.run(append)
    content(parts, ino, OLD + b"more")


def content(parts: Parts, ino: int, expected: bytes) -> None:
    """The current version has these bytes, in a file that is there."""
    trio.run(parts.migrator.remove_discarded)
    handle = trio.run(parts.files.open, ino, os.O_RDONLY)
    assert trio.run(parts.filesystem.read, handle, 0, 1 << 20) == expected
    parts.files.release(handle)
    assert parts.names.attributes(ino).size == len(expected)
