"""A cold file is read although no tier has room for it: from the archive, through the daemon, and never unchecked.

On real tmpfs of a few MiB that are full of what is not durable."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from assembled import Parts, assemble
from test_mover import content, needs_root, small

from tierfs.errors import FsError
from tierfs.fs import open_files
from tierfs.fs.caller import Caller
from tierfs.migrator import gradual, recall
from tierfs.migrator.direct import KEPT, Direct
from tierfs.migrator.gradual import Recall
from tierfs.tiers import content as contents
from tierfs.tiers.copy import CHUNK
from tierfs.types import ROOT_INO

MIB = 1 << 20
ME = Caller(0, 0)
SIZE = 2 * CHUNK + 12345
DATA = content(SIZE // 8 * 8) + b"\1" * (SIZE % 8)
LIMITS = "{read_timeout: 2s}"

pytestmark = needs_root


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    """memory has 16 MiB and nvme 16, both to the last byte."""
    with small(tmp_path / "memory", "16M"), small(tmp_path / "nvme", "16M"):
        made = assemble(tmp_path, memory="16MiB", limits=LIMITS)
        yield made
        made.close()


@pytest.fixture(params=["small", "large"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the file is recalled before its open returns, or open while it comes."""
    if request.param == "large":
        for module in (open_files, recall):
            monkeypatch.setattr(module, "GRADUAL", CHUNK)
    return str(request.param)


@contextlib.asynccontextmanager
async def working(parts: Parts) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.migrator.run)
        with trio.fail_after(60):
            yield
        nursery.cancel_scope.cancel()


def run(parts: Parts, use: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with working(parts):
            await use()

    trio.run(main)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what it looks at is on the disk
        await trio.sleep(0.01)


def save(parts: Parts, name: bytes, data: bytes) -> int:
    fh, attributes = parts.names.create(ROOT_INO, name, 0o644, os.O_RDWR, ME)
    parts.write(fh, 0, data)
    parts.files.release(fh)
    return attributes.ino


async def cold(parts: Parts, name: bytes = b"f", data: bytes = DATA) -> int:
    """A file that only the archive has."""
    ino = save(parts, name, data)
    version = parts.names.attributes(ino).version
    await until(lambda: parts.migrator.durable(ino, version, "archive") and not parts.migrator.running)
    for tier in ("memory", "nvme"):
        parts.migrator.evictor.evict(ino, version, tier)
    await parts.migrator.remove_discarded()
    assert tiers(parts, ino) == {"archive"}
    return ino


def tiers(parts: Parts, ino: int) -> set[str]:
    return {replica.tier for replica in parts.catalog.replicas(ino)}


def fill(parts: Parts) -> list[int]:
    """Every tier above the archive is full of what is not durable."""
    parts.migrator.paused = True
    found = []
    for tier in ("memory", "nvme"):
        while (free := parts.files.space.available(tier)) > 64 << 10:
            assert len(found) < 100
            fh, attributes = parts.names.create(ROOT_INO, b"fill-%d" % len(found), 0o644, os.O_RDWR, ME)
            parts.write(fh, 0, bytes(min(free, 4 * MIB)))
            parts.files.release(fh)
            found.append(attributes.ino)
    return found


async def make_room(parts: Parts, filled: list[int]) -> None:
    for ino in filled:
        path = parts.catalog.path_of(ino)
        assert path is not None
        parts.names.unlink(ROOT_INO, path[0], ME)
        parts.names.forget([ino])
    await parts.migrator.remove_discarded()


async def read(parts: Parts, fh: int, size: int = SIZE) -> bytes:
    """As the kernel does, with several requests at a time."""
    step = 256 << 10
    found = dict[int, bytes]()

    async def one(at: int) -> None:
        found[at] = await parts.filesystem.read(fh, at, step)

    for first in range(0, size + step, 4 * step):
        async with trio.open_nursery() as nursery:
            for at in range(first, min(first + 4 * step, size + step), step):
                nursery.start_soon(one, at)
    return b"".join(found[at] for at in sorted(found))


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"damaged")


def filling(parts: Parts, ino: int) -> object:
    return parts.files.inodes[ino].filling


def test_it_is_read_where_it_stands_and_brought_up_once_there_is_room(parts: Parts, kind: str) -> None:
    async def use() -> None:
        ino = await cold(parts)
        filled = fill(parts)
        before = {name: parts.files.space.available(name) for name in parts.stores}
        first, second = [await parts.files.open(ino, os.O_RDONLY) for _ in range(2)]
        assert isinstance(filling(parts, ino), Direct)
        assert await read(parts, first) == DATA
        assert await parts.filesystem.read(second, CHUNK - 5, 10) == DATA[CHUNK - 5 : CHUNK + 5]
        assert await parts.filesystem.read(second, SIZE - 3, 100) == DATA[-3:]
        assert await parts.filesystem.read(second, SIZE + 1, 100) == b""
        assert tiers(parts, ino) == {"archive"}
        assert {name: parts.files.space.available(name) for name in parts.stores} == before
        for fh in (first, second):
            parts.files.release(fh)
        await make_room(parts, filled)
        again = await parts.files.open(ino, os.O_RDONLY)
        assert await read(parts, again) == DATA
        await until(lambda: "memory" in tiers(parts, ino))
        parts.files.release(again)

    run(parts, use)


def test_clean_copies_go_first(parts: Parts, kind: str) -> None:
    async def use() -> None:
        ino, clean = await cold(parts), save(parts, b"clean", bytes(9 * MIB))
        await until(lambda: parts.migrator.durable(clean, 1, "archive") and not parts.migrator.running)
        fill(parts)
        fh = await parts.files.open(ino, os.O_RDONLY)
        assert await read(parts, fh) == DATA
        await until(lambda: tiers(parts, ino) & {"memory", "nvme"})
        parts.files.release(fh)

    run(parts, use)


def test_nothing_is_evicted_for_a_file_that_does_not_fit_then_either(parts: Parts, kind: str) -> None:
    async def prepare() -> None:
        inos.append(await cold(parts))
        inos.append(save(parts, b"clean", bytes(4 * MIB)))
        await until(lambda: parts.migrator.durable(inos[1], 1, "archive") and not parts.migrator.running)

    async def use() -> None:
        ino, clean = inos
        fill(parts)
        here = tiers(parts, clean)
        assert here & {"memory", "nvme"}
        fh = await parts.files.open(ino, os.O_RDONLY)
        assert await read(parts, fh) == DATA
        assert tiers(parts, clean) == here
        parts.files.release(fh)

    inos: list[int] = []
    run(parts, prepare)
    trio.run(use)  # without the migrator, which evicts above the watermark


class Half:
    """Recalls of which only the first chunk comes until they may go on."""

    def __init__(self) -> None:
        self.held, self.go_on = threading.Event(), threading.Event()
        self.real = Recall._copy

    def copy(self, recall: Recall, index: int) -> bool:
        if index:
            self.held.set()
            assert self.go_on.wait(30)
        return self.real(recall, index)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[Half]:
    monkeypatch.setattr(open_files, "GRADUAL", CHUNK)
    monkeypatch.setattr(recall, "GRADUAL", CHUNK)
    monkeypatch.setattr(gradual, "RETRY_FIRST", 0.01)
    made = Half()
    monkeypatch.setattr(Recall, "_copy", lambda recall, index: made.copy(recall, index))
    yield made
    made.go_on.set()


def test_a_tier_that_fills_up_while_the_file_comes_gives_back_what_it_took(
    parts: Parts, tmp_path: Path, half: Half
) -> None:
    """Somebody else fills the disk after the open, so that the daemon could not know it."""

    async def use() -> None:
        ino = await cold(parts)
        parts.migrator.paused = True
        fh = await parts.files.open(ino, os.O_RDONLY)
        assert isinstance(filling(parts, ino), Recall)
        await trio.to_thread.run_sync(half.held.wait)
        with contextlib.suppress(OSError):
            (tmp_path / "memory" / "foreign").write_bytes(bytes(16 * MIB))
        half.go_on.set()
        assert await read(parts, fh) == DATA
        assert isinstance(filling(parts, ino), Direct)
        await until(lambda: os.listdir(tmp_path / "memory" / "tmp") == [])
        assert parts.files.space.reserved.get("memory", 0) == 0
        (tmp_path / "memory" / "foreign").unlink()
        assert parts.files.space.available("memory") >= 16 * MIB - (256 << 10)
        parts.files.release(fh)

    run(parts, use)


def test_a_read_under_way_while_the_room_is_lost_gives_no_zeros(
    parts: Parts, half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range was there when it was asked for; when it is read, the file is given back already."""

    async def use() -> None:
        ino = await cold(parts)
        parts.migrator.paused = True
        fh = await parts.files.open(ino, os.O_RDONLY)
        coming, real = filling(parts, ino), parts.files.local.read
        assert isinstance(coming, Recall)

        async def late(*args: Any) -> bytes:
            coming._crowd()
            return await real(*args)

        monkeypatch.setattr(parts.files.local, "read", late)
        assert await parts.filesystem.read(fh, 8, 100) == DATA[8:108]
        assert isinstance(filling(parts, ino), Direct)
        half.go_on.set()
        parts.files.release(fh)

    run(parts, use)


def test_bytes_that_were_not_written_are_not_handed_out(
    parts: Parts, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        ino = await cold(parts)
        fill(parts)
        damage(tmp_path / "archive" / "f", CHUNK + 7)
        fh = await parts.files.open(ino, os.O_RDONLY)
        with pytest.raises(FsError) as refused:
            await parts.filesystem.read(fh, CHUNK, 100)
        assert refused.value.errno == errno.EIO
        if kind == "large":
            assert await parts.filesystem.read(fh, 0, 100) == DATA[:100], "the chunk before it is right"
        parts.files.release(fh)

    run(parts, use)
    assert any("not those that were written" in record.message for record in caplog.records)


def test_a_file_changed_below_an_open_one_is_noticed(parts: Parts, tmp_path: Path) -> None:
    """Each chunk is compared each time that it is read, also when the whole was compared before."""

    async def use() -> None:
        ino = await cold(parts)
        fill(parts)
        fh = await parts.files.open(ino, os.O_RDONLY)
        assert await parts.filesystem.read(fh, 0, 100) == DATA[:100]
        damage(tmp_path / "archive" / "f", 2 * CHUNK)
        with pytest.raises(FsError):
            await parts.filesystem.read(fh, 2 * CHUNK, 100)
        parts.files.release(fh)

    run(parts, use)


def test_renamed_and_deleted_it_stays_readable_while_it_is_open(parts: Parts, kind: str, tmp_path: Path) -> None:
    async def use() -> None:
        ino = await cold(parts)
        filled = fill(parts)
        fh = await parts.files.open(ino, os.O_RDONLY)
        assert await parts.filesystem.read(fh, 0, 100) == DATA[:100]
        parts.names.rename(ROOT_INO, b"f", ROOT_INO, b"g", 0, ME)
        parts.names.unlink(ROOT_INO, b"g", ME)
        await make_room(parts, filled)
        parts.migrator.paused = False
        parts.migrator.kick()
        await until(lambda: not (tmp_path / "archive" / "f").exists() and not (tmp_path / "archive" / "g").exists())
        assert await read(parts, fh) == DATA
        parts.files.release(fh)
        parts.names.forget([ino])

    run(parts, use)
    assert parts.catalog.inconsistencies() == []


def test_a_writer_gets_enospc_until_there_is_room_and_readers_go_on(parts: Parts, kind: str) -> None:
    async def use() -> None:
        ino = await cold(parts)
        filled = fill(parts)
        fh = await parts.files.open(ino, os.O_RDONLY)
        with pytest.raises(FsError) as refused:
            await parts.files.open(ino, os.O_RDWR)
        assert refused.value.errno == errno.ENOSPC
        assert await read(parts, fh) == DATA
        await make_room(parts, filled)
        writer = await parts.files.open(ino, os.O_RDWR)
        assert filling(parts, ino) is None
        assert parts.write(writer, 0, b"new") == 3
        assert await read(parts, fh) == b"new" + DATA[3:]
        parts.files.release(writer)
        assert await read(parts, fh) == b"new" + DATA[3:]
        parts.files.release(fh)

    run(parts, use)
    assert parts.catalog.inconsistencies() == []


def test_opened_for_writing_alone_it_is_refused_with_enospc(parts: Parts) -> None:
    async def use() -> None:
        ino = await cold(parts)
        fill(parts)
        with pytest.raises(FsError) as refused:
            await parts.files.open(ino, os.O_RDWR)
        assert refused.value.errno == errno.ENOSPC
        assert not parts.files.inodes

    run(parts, use)


def test_a_truncating_writer_begins_a_version_of_its_own(parts: Parts, kind: str) -> None:
    async def use() -> None:
        ino = await cold(parts)
        filled = fill(parts)
        reader = await parts.files.open(ino, os.O_RDONLY)
        assert await parts.filesystem.read(reader, 0, 10) == DATA[:10]
        await make_room(parts, filled)
        writer = await parts.files.open(ino, os.O_WRONLY | os.O_TRUNC)
        assert await parts.filesystem.read(reader, 0, 10) == b""
        assert parts.write(writer, 0, b"new") == 3
        parts.files.release(writer)
        assert await parts.filesystem.read(reader, 0, 10) == b"new"
        parts.files.release(reader)
        parts.migrator.paused = False
        parts.migrator.kick()
        await until(lambda: parts.migrator.durable(ino, 2, "archive"))

    run(parts, use)
    assert parts.catalog.inconsistencies() == []


def test_a_new_daemon_reads_on(parts: Parts, kind: str) -> None:
    async def use() -> None:
        ino = await cold(parts)
        fill(parts)
        parts.files.adopt(77, ino, os.O_RDONLY, 0)
        assert isinstance(filling(parts, ino), Direct)
        assert await read(parts, 77) == DATA
        parts.files.release(77)
        assert not parts.files.inodes

    run(parts, use)


def test_an_archive_that_hangs_gives_eio_in_time_and_then_the_bytes(
    parts: Parts, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, real = threading.Event(), contents.read_chunk

    def hang(fd: int, offset: int, length: int) -> memoryview:
        assert answers.wait(60)
        return real(fd, offset, length)

    monkeypatch.setattr(contents, "read_chunk", hang)

    async def use() -> None:
        ino = await cold(parts)
        fill(parts)
        fh = await parts.files.open(ino, os.O_RDONLY)
        codes: list[int | None] = []

        async def refused(at: int) -> None:
            with pytest.raises(FsError) as error:
                await parts.filesystem.read(fh, at, 100)
            codes.append(error.value.errno)

        with trio.fail_after(3 * parts.migrator.policy.limits.read_timeout):
            async with trio.open_nursery() as nursery:
                for at in (0, 1, CHUNK, 2 * CHUNK):
                    nursery.start_soon(refused, at)
        assert codes == [errno.EIO] * 4
        answers.set()
        assert await read(parts, fh) == DATA
        parts.files.release(fh)

    run(parts, use)
    assert any("nothing came for 2 s" in record.message for record in caplog.records)


def test_an_archive_that_fails_for_a_while_is_asked_again(
    parts: Parts, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, real = iter(range(3)), contents.read_chunk

    def flaky(fd: int, offset: int, length: int) -> memoryview:
        if next(failures, None) is not None:
            raise OSError(errno.EIO, "flaky")
        return real(fd, offset, length)

    monkeypatch.setattr(contents, "read_chunk", flaky)

    async def use() -> None:
        ino = await cold(parts)
        fill(parts)
        fh = await parts.files.open(ino, os.O_RDONLY)
        assert await read(parts, fh) == DATA
        parts.files.release(fh)

    run(parts, use)


def own_descriptors(parts: Parts) -> list[str]:
    """Open files on the archive, and in memory without a name."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    archive = f"{parts.tree.root}/f"
    return [path for path in found if path.startswith((archive, "/memfd:tierfs"))]


def test_what_is_kept_for_the_next_read_and_the_descriptors_are_bounded(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async def use() -> None:
        inos = [await cold(parts, b"f%d" % number, DATA[number:]) for number in range(8)]
        fill(parts)
        handles = [await parts.files.open(ino, os.O_RDONLY) for ino in inos]
        for number, fh in enumerate(handles):
            assert await read(parts, fh, SIZE - number) == DATA[number:]
            assert len(parts.migrator.recaller._kept) <= KEPT
        assert len(own_descriptors(parts)) == 2 * 8
        for fh in handles:
            parts.files.release(fh)
        assert not parts.migrator.recaller._kept
        assert own_descriptors(parts) == []

    run(parts, use)
    assert sum("no tier has room for inode" in record.message for record in caplog.records) == 8
