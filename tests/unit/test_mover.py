"""A write that meets the end of its tier goes on one tier further down, and ends with ENOSPC only when all are full.

On real tmpfs of a few MiB that fill up."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from assembled import Parts, assemble

from tierfs.fs import mover
from tierfs.fs.caller import Caller
from tierfs.fs.mover import copy_sparse
from tierfs.migrator.relief import Growth, meminfo, spare
from tierfs.plan import room
from tierfs.tiers.memory import MemoryMount
from tierfs.types import ROOT_INO, Replica, ReplicaState

MIB = 1 << 20
ME = Caller(0, 0)
PIECE = 128 << 10
"""Bytes of a write as the kernel sends them."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount tmpfs")


@contextlib.contextmanager
def small(path: Path, size: str) -> Iterator[None]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    """memory has 8 MiB and nvme 16, both to the last byte."""
    with small(tmp_path / "memory", "8M"), small(tmp_path / "nvme", "16M"):
        made = assemble(tmp_path, memory="8MiB")
        yield made
        made.close()


def create(parts: Parts, name: bytes) -> int:
    return parts.names.create(ROOT_INO, name, 0o644, os.O_RDWR, ME)[0]


def content(size: int) -> bytes:
    return b"".join(n.to_bytes(8, "big") for n in range(size // 8))


async def write(parts: Parts, fh: int, data: bytes, at: int = 0) -> int:
    """As the kernel does, up to the first piece that comes back short: bytes written. OSError from the very first."""
    done = 0
    while done < len(data):
        piece = data[done : done + PIECE]
        try:
            written = await parts.filesystem.write(fh, at + done, piece)
        except OSError:
            if done:
                return done
            raise
        done += written
        if written < len(piece):
            return done
    return done


def tier(parts: Parts, fh: int) -> str:
    return parts.files.handles[fh].inode.replica.tier


@needs_root
def test_a_write_that_fills_its_tier_goes_on_further_down(parts: Parts) -> None:
    data = content(12 * MIB)

    async def use() -> None:
        fh = create(parts, b"f")
        inode = parts.files.handles[fh].inode
        reader = await parts.files.open(inode.ino, os.O_RDONLY)
        os.utime(inode.fd, ns=(1, 2))
        assert tier(parts, fh) == "memory"
        assert await write(parts, fh, data) == len(data)
        assert tier(parts, fh) == "nvme"
        assert await parts.filesystem.read(reader, 0, len(data)) == data, "by a handle that was open before"
        parts.files.release(fh)
        parts.files.release(reader)
        await parts.migrator.remove_discarded()

    trio.run(use)
    (replica,) = parts.catalog.replicas(parts.names.lookup(ROOT_INO, b"f").ino)  # type: ignore[union-attr]
    assert (replica.tier, replica.state, replica.size) == ("nvme", ReplicaState.WRITTEN, len(data))
    assert list(parts.stores["memory"].keys()) == [], "the bytes up there are gone"
    assert parts.catalog.inconsistencies() == []


@needs_root
def test_several_writers_of_a_file_that_moves_lose_nothing(parts: Parts) -> None:
    data = content(12 * MIB)

    async def use() -> None:
        fh = create(parts, b"f")
        inode = parts.files.handles[fh].inode
        handles = [fh, *[await parts.files.open(inode.ino, os.O_WRONLY) for _ in range(3)]]
        async with trio.open_nursery() as nursery:
            for number, handle in enumerate(handles):
                part = slice(number * 3 * MIB, (number + 1) * 3 * MIB)
                nursery.start_soon(write, parts, handle, data[part], part.start)
        assert os.pread(inode.fd, len(data), 0) == data
        for handle in handles:
            parts.files.release(handle)

    trio.run(use)


@needs_root
def test_what_is_overwritten_while_the_file_moves_is_not_lost(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no room, so nothing but the move itself could make it wait."""
    copied, go_on = threading.Event(), threading.Event()

    def slowly(source: int, target: int, alive: Callable[[], object]) -> None:
        copy_sparse(source, target, alive)
        copied.set()
        assert go_on.wait(30)

    monkeypatch.setattr(mover, "copy_sparse", slowly)
    data = content(12 * MIB)

    async def use() -> None:
        fh = create(parts, b"f")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, parts, fh, data)
            await trio.to_thread.run_sync(copied.wait)
            nursery.start_soon(write, parts, fh, b"overwritten")
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
        found = os.pread(parts.files.handles[fh].inode.fd, len(data), 0)
        assert found[:11] == b"overwritten"
        assert found[11:] == data[11:]
        parts.files.release(fh)

    trio.run(use)


@needs_root
def test_enospc_when_every_tier_is_full_and_work_goes_on_once_there_is_room(parts: Parts) -> None:
    """What was accepted is there, the durable version of what failed is still there, and nothing needs a restart."""
    old, data = content(2 * MIB), content(30 * MIB)

    async def use() -> None:
        fh = create(parts, b"good")
        await write(parts, fh, old)
        parts.files.release(fh)
        good = parts.names.lookup(ROOT_INO, b"good")
        assert good is not None
        drained = Replica(good.ino, good.version, "nvme", ReplicaState.DURABLE, "2-1", len(old), b"d" * 16)
        fd = parts.stores["nvme"].create(drained.key)
        os.pwrite(fd, old, 0)
        os.close(fd)
        with parts.catalog.transaction():
            parts.catalog.put_replica(drained)

        fh = await parts.files.open(good.ino, os.O_WRONLY | os.O_TRUNC)
        accepted = await write(parts, fh, data)
        assert 8 * MIB < accepted < 16 * MIB
        with pytest.raises(OSError) as full:  # noqa: PT011
            await write(parts, fh, data[:PIECE], accepted)
        assert full.value.errno == errno.ENOSPC
        assert os.pread(parts.files.handles[fh].inode.fd, 30 * MIB, 0)[:accepted] == data[:accepted]
        parts.files.release(fh)
        assert drained in parts.catalog.replicas(good.ino), "what it was before can still be gone back to"
        fd = parts.stores["nvme"].open(drained.key)
        assert os.pread(fd, len(old), 0) == old
        os.close(fd)

        parts.names.unlink(ROOT_INO, b"good", ME)
        parts.names.forget([good.ino])
        await parts.migrator.remove_discarded()
        fh = create(parts, b"next")
        assert await write(parts, fh, data[: 12 * MIB]) == 12 * MIB
        assert os.pread(parts.files.handles[fh].inode.fd, 12 * MIB, 0) == data[: 12 * MIB]
        parts.files.release(fh)

    trio.run(use)
    assert parts.catalog.inconsistencies() == []


@needs_root
def test_clean_copies_leave_before_a_file_moves(parts: Parts) -> None:
    async def use() -> None:
        fh = create(parts, b"clean")
        await write(parts, fh, content(5 * MIB))
        parts.files.release(fh)
        clean = parts.names.lookup(ROOT_INO, b"clean")
        assert clean is not None
        with parts.catalog.transaction():
            parts.catalog.put_replica(
                Replica(clean.ino, clean.version, "nvme", ReplicaState.DURABLE, "2-1", 5 * MIB, b"d" * 16)
            )
        fh = create(parts, b"f.x")
        assert await write(parts, fh, content(6 * MIB)) == 6 * MIB
        assert tier(parts, fh) == "memory"
        parts.files.release(fh)

    trio.run(use)


@needs_root
def test_a_create_waits_for_the_bytes_of_clean_copies_to_go(parts: Parts) -> None:
    async def use() -> None:
        fh = create(parts, b"1.pt")
        await write(parts, fh, content(5 * MIB))
        parts.files.release(fh)
        clean = parts.names.lookup(ROOT_INO, b"1.pt")
        assert clean is not None
        with parts.catalog.transaction():
            parts.catalog.put_replica(
                Replica(clean.ino, clean.version, "nvme", ReplicaState.DURABLE, "2-1", 5 * MIB, b"d" * 16)
            )
        fh, _ = await parts.filesystem.create(ROOT_INO, b"2.pt", 0o644, os.O_RDWR, ME)
        assert tier(parts, fh) == "memory"
        assert parts.write(fh, 0, bytes(5 * MIB)) == 5 * MIB
        parts.files.release(fh)

    trio.run(use)


@needs_root
def test_opened_for_writing_on_a_full_tier_it_goes_on_further_down(parts: Parts) -> None:
    """All that can be done with passthrough, where nobody sees the writes: before the first of them."""
    data = content(4 * MIB)

    async def use() -> None:
        fh = create(parts, b"log.a")
        await write(parts, fh, data)
        parts.files.release(fh)
        other = create(parts, b"other.b")
        os.pwrite(parts.files.handles[other].inode.fd, bytes(4 * MIB - PIECE), 0)
        parts.files.measure()
        log = parts.names.lookup(ROOT_INO, b"log.a")
        assert log is not None
        fh = await parts.files.open(log.ino, os.O_WRONLY | os.O_APPEND)
        parts.files.space.learned.learn(parts.files.handles[fh].inode.role, 5 * MIB)
        parts.files.release(fh)
        fh = await parts.files.open(log.ino, os.O_WRONLY | os.O_APPEND)
        assert tier(parts, fh) == "nvme"
        parts.write(fh, len(data), data)
        assert os.pread(parts.files.handles[fh].inode.fd, 8 * MIB, 0) == data + data
        parts.files.release(fh)
        found = parts.names.lookup(ROOT_INO, b"log.a")
        assert found is not None
        assert found.size == 8 * MIB
        parts.files.release(other)

    trio.run(use)
    assert parts.catalog.inconsistencies() == []


def test_a_sparse_file_is_as_sparse_afterwards(tmp_path: Path) -> None:
    source = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    target = os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT)
    os.pwrite(source, b"head", 0)
    os.pwrite(source, b"tail", 1 << 30)
    os.ftruncate(source, (1 << 30) + MIB)
    copy_sparse(source, target)
    assert os.fstat(target).st_size == os.fstat(source).st_size
    assert os.fstat(target).st_blocks <= os.fstat(source).st_blocks + 16
    assert (os.pread(target, 4, 0), os.pread(target, 4, 1 << 30)) == (b"head", b"tail")
    os.close(source)
    os.close(target)


# the memory tier itself


@needs_root
def test_the_own_tmpfs_grows_while_files_need_it_and_shrinks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "HEADROOM", 2 * MIB)
    monkeypatch.setattr(room.hard_limit, "__kwdefaults__", {"headroom": 2 * MIB})
    parts = assemble(tmp_path, memory="16MiB")
    mount = MemoryMount("memory", tmp_path / "own", 16 * MIB)
    mount.mount()
    growth = Growth([mount], parts.files.policy, parts.files)

    def limit() -> int:
        found = os.statvfs(mount.path)
        return found.f_blocks * found.f_frsize

    async def use() -> None:
        await growth.look()
        assert limit() == 18 * MIB, "above what is placed in it, before anybody needs it"
        (mount.path / "f").write_bytes(bytes(17 * MIB))
        await growth.look()
        assert 19 * MIB <= limit() < 21 * MIB
        (mount.path / "g").write_bytes(bytes(limit() - 17 * MIB - MIB))
        assert await growth.look("memory", 4 * MIB), "on demand"
        (mount.path / "h").write_bytes(bytes(4 * MIB))
        for _ in range(10):
            await growth.look("memory", 20 * MIB)
        assert limit() == 32 * MIB, "twice the size and no more"
        mounted_again = MemoryMount("memory", mount.path, 16 * MIB)
        mounted_again.mount()
        assert limit() >= mount.used(), "a new daemon takes it over as it is"
        for name in ("f", "g", "h"):
            (mount.path / name).unlink()
        mount.size = mounted_again.size
        await growth.look()
        assert limit() == 18 * MIB

    try:
        trio.run(use)
    finally:
        mount.unmount()
        parts.close()


@needs_root
def test_it_does_not_grow_into_the_last_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assemble(tmp_path, memory="16MiB")
    mount = MemoryMount("memory", tmp_path / "own", 16 * MIB)
    mount.mount()
    monkeypatch.setattr("tierfs.migrator.relief.spare", lambda numa: MIB)

    async def use() -> None:
        growth = Growth([mount], parts.files.policy, parts.files)
        assert not await growth.look("memory", 64 * MIB)
        assert mount.size == 16 * MIB

    try:
        trio.run(use)
    finally:
        mount.unmount()
        parts.close()


def test_the_kernels_figures(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text(
        "MemTotal:       24683520 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n"
        "Node 2 Active(file):   4 kB\nNode 2 MemFree:  8 kB\n"
    )
    assert meminfo(file) == {
        "MemTotal": 24683520 << 10,
        "MemAvailable": 20000000 << 10,
        "Active(file)": 4 << 10,
        "MemFree": 8 << 10,
    }
    assert meminfo(tmp_path / "none") == {}
    assert 0 < spare() < meminfo(Path("/proc/meminfo"))["MemTotal"]
    assert spare([4095]) == 0
