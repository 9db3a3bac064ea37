from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from tests import conftest_disks as disks
from tierfs.durable import TemporaryFile, create_temporary
from tierfs.errors import SourceChanged
from tierfs.tiers import copy as copying
from tierfs.tiers.copy import (
    CHUNK,
    Destination,
    PipelinedCopy,
    chunk_digest,
    copy_file,
    copy_range,
    data_end,
    digest_file,
)

MIB = 1 << 20
SIZES = [0, 1, 4095, 4096, MIB, MIB + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4096, 5 * CHUNK + 12345]


def reference(data: bytes) -> bytes:
    chunks = [data[o : o + CHUNK] for o in range(0, len(data), CHUNK)]
    return xxhash.xxh3_128_digest(b"".join(map(xxhash.xxh3_128_digest, chunks)))


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(scope="module", params=["tmpfs", "ext4", "xfs"])
def disk(request: pytest.FixtureRequest, memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if request.param == "tmpfs":
        yield memory
    elif not disks.can_mount_loops(f"mkfs.{request.param}"):
        pytest.skip("needs root and mkfs")
    else:
        size = {"ext4": 160 * MIB, "xfs": 320 * MIB}[request.param]
        with disks.loop_disk(tmp_path_factory.mktemp("loop"), request.param, size) as mountpoint:
            yield mountpoint


def make(directory: Path, data: bytes) -> int:
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


class Files:
    def __init__(self, directory: Path) -> None:
        self.fd = os.open(directory, os.O_RDONLY)
        self.temps: list[TemporaryFile] = []

    def temp(self) -> TemporaryFile:
        self.temps.append(create_temporary(self.fd))
        return self.temps[-1]


@pytest.fixture
def files(disk: Path) -> Iterator[Files]:
    made = Files(disk)
    yield made
    for temp in made.temps:
        temp.discard()
    os.close(made.fd)


def content(temp: TemporaryFile) -> bytes:
    return os.pread(temp.fd, 1 << 30, 0)


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_copy_and_digest(memory: Path, files: Files, size: int, stable: bool) -> None:
    data = random.Random(size).randbytes(size)
    src, temp = make(memory, data), files.temp()
    assert copy_file(src, temp, size, streams=3, stable=stable) == reference(data)
    assert content(temp) == data
    assert digest_file(src, size) == digest_file(temp.fd, size) == reference(data)
    os.close(src)


def test_copy_from_the_disk_and_only_a_part(memory: Path, files: Files) -> None:
    data = random.Random(1).randbytes(3 * CHUNK)
    temp = files.temp()
    os.write(temp.fd, data)
    back = files.temp()
    assert copy_file(temp.fd, back, 2 * CHUNK + 5, stable=True) == reference(data[: 2 * CHUNK + 5])
    assert content(back) == data[: 2 * CHUNK + 5]


def occupied(fd: int) -> int:
    os.fsync(fd)
    return os.fstat(fd).st_blocks * 512


def sparse(directory: Path, size: int, *data: tuple[int, bytes]) -> int:
    fd = make(directory, b"")
    for offset, what in data:
        os.pwrite(fd, what, offset)
    os.ftruncate(fd, size)
    return fd


SPARSE = {
    "one extent": (6 * CHUNK + 100, [(3 * CHUNK + 77, b"x" * 5000)]),
    "several in a chunk": (2 * CHUNK, [(offset, b"y" * 4096) for offset in range(0, CHUNK, 64 * 4096)]),
    "across chunks": (4 * CHUNK, [(CHUNK - 5000, b"z" * 10_000)]),
    "data at both ends": (5 * CHUNK + 1, [(0, b"a"), (5 * CHUNK, b"b")]),
    "nothing": (3 * CHUNK + 5, []),
    "a hole at the end": (3 * CHUNK, [(0, b"c" * CHUNK)]),
}


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("shape", SPARSE)
def test_holes_stay_holes(memory: Path, files: Files, stable: bool, shape: str) -> None:
    size, data = SPARSE[shape]
    src, temp, pipelined, back = sparse(memory, size, *data), files.temp(), files.temp(), files.temp()
    blocks = os.fstat(src).st_blocks
    whole = os.pread(src, size, 0)
    assert copy_file(src, temp, size, stable=stable) == reference(whole)
    assert content(temp) == whole
    assert digest_file(src, size) == digest_file(temp.fd, size) == reference(whole)
    assert copy_file(temp.fd, back, size) == reference(whole)
    assert content(back) == whole
    copy = PipelinedCopy(pipelined)
    copy.advance(src, size)
    assert copy.finish(src, size) == reference(whole)
    assert content(pipelined) == whole
    room = sum((len(what) + 2 * 65536) for _, what in data) + 65536
    for made in (temp, back, pipelined):
        assert occupied(made.fd) <= min(room, os.fstat(src).st_blocks * 512 + 65536)
    assert os.fstat(src).st_blocks == blocks, "reading a hole must not fill it"
    os.close(src)


def test_a_huge_sparse_file_costs_what_its_data_costs(memory: Path, files: Files) -> None:
    size = 64 << 30
    src, temp = sparse(memory, size, (size // 2, b"middle"), (size - 3, b"end")), files.temp()
    seen: list[int] = []
    digest = copy_file(src, temp, size, throttle=seen.append, stable=True)
    assert digest == digest_file(temp.fd, size)
    assert os.fstat(temp.fd).st_size == size
    assert occupied(temp.fd) < MIB
    assert sum(seen) < MIB, "holes are not throttled"
    assert os.pread(temp.fd, 6, size // 2) == b"middle"
    os.close(src)


def test_zeros_stay_a_hole_where_the_filesystem_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, memory: Path, files: Files
) -> None:
    """NFS before 4.2: SEEK_HOLE finds the end of the file, only the blocks show that it is sparse."""
    size = 5 * CHUNK
    src, temp = sparse(memory, size, (CHUNK, b"x" * 5000)), files.temp()
    whole = os.pread(src, size, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "lseek", lambda fd, offset, whence: size if whence == os.SEEK_HOLE else offset)
        assert copy_file(src, temp, size) == reference(whole)
    assert content(temp) == whole
    assert occupied(temp.fd) <= CHUNK
    os.close(src)


def test_a_hole_that_is_filled_meanwhile_is_noticed(
    monkeypatch: pytest.MonkeyPatch, memory: Path, files: Files
) -> None:
    """The digest is that of what was written, whatever becomes of the source."""
    size = 2 * CHUNK
    src, temp, preadv = sparse(memory, size, (0, b"x" * 4096), (CHUNK, b"y" * 4096)), files.temp(), os.preadv

    def filling(fd: int, views: list[memoryview], offset: int) -> int:
        os.pwrite(src, b"late", 8192)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", filling)
    digest = copy_file(src, temp, size, streams=1)
    monkeypatch.undo()
    assert digest == reference(content(temp)) == digest_file(temp.fd, size)
    assert digest != digest_file(src, size)
    os.close(src)


def test_a_sparse_source_that_shrinks_is_noticed(memory: Path, files: Files) -> None:
    src = sparse(memory, 3 * CHUNK, (0, b"x"))
    with pytest.raises(SourceChanged):
        copy_file(src, files.temp(), 4 * CHUNK)
    with pytest.raises(SourceChanged):
        digest_file(src, 4 * CHUNK)
    os.close(src)


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("size", [100, 3 * CHUNK])
def test_source_too_short(memory: Path, files: Files, size: int, stable: bool) -> None:
    src = make(memory, b"x" * (size - 1))
    with pytest.raises(SourceChanged):
        copy_file(src, files.temp(), size, stable=stable)
    with pytest.raises(SourceChanged):
        digest_file(src, size)
    os.close(src)


def test_source_truncated_again_and_again_while_copied(memory: Path, files: Files) -> None:
    size = 8 * CHUNK
    data = b"\xab" * size
    src = make(memory, data)
    stop = threading.Event()

    def shake() -> None:
        while not stop.is_set():
            os.ftruncate(src, 100)
            os.ftruncate(src, size)

    thread = threading.Thread(target=shake)
    thread.start()
    try:
        for _ in range(10):
            temp = files.temp()
            try:
                digest = copy_file(src, temp, size)
                assert digest == digest_file(temp.fd, size)
            except SourceChanged:
                pass
            finally:
                temp.discard()
    finally:
        stop.set()
        thread.join()
        os.close(src)


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("size", [100, CHUNK + 1, 8 * CHUNK])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_copy_that_fails_lets_go_of_its_source_at_once(
    monkeypatch: pytest.MonkeyPatch, memory: Path, files: Files, size: int, stable: bool, streams: int
) -> None:
    """What is deleted meanwhile would keep its room in memory for as long as anything knows its bytes, and that may be
    until garbage is collected."""
    src, temp = make(memory, b"x" * size), files.temp()
    inode = os.fstat(src).st_ino

    def refuse(self: copying.Destination, data: memoryview | bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(copying.Destination, "write", refuse)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OSError, match="full"):
            copy_file(src, temp, size, streams=streams, stable=stable)
        with pytest.raises(SourceChanged):
            copy_file(src, temp, size, streams=streams, stable=stable, cancelled=lambda: True)
        os.close(src)
        left = [fd for fd in os.listdir("/proc/self/fd") if _inode(int(fd)) == inode]
    finally:
        gc.enable()
    assert left == []


def _inode(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino
    return None


def test_cancelled_and_throttled(memory: Path, files: Files) -> None:
    size = 10 * CHUNK + 1
    src = make(memory, b"x" * size)
    seen: list[int] = []
    with pytest.raises(SourceChanged):
        copy_file(src, files.temp(), size, throttle=seen.append, cancelled=lambda: len(seen) >= 3)
    assert 3 <= len(seen) <= 6
    seen.clear()
    copy_file(src, files.temp(), size, throttle=seen.append, cancelled=lambda: False)
    assert sorted(seen) == [1] + [CHUNK] * 10
    with pytest.raises(SourceChanged):
        copy_file(src, files.temp(), 10, cancelled=lambda: True)
    os.close(src)


def test_falls_back_when_direct_is_refused(monkeypatch: pytest.MonkeyPatch, memory: Path, files: Files) -> None:
    data = random.Random(2).randbytes(3 * CHUNK + 9)
    src, pwrite = make(memory, data), os.pwrite
    temp = files.temp()

    def refuse(fd: int, view: memoryview, offset: int) -> int:
        if fd != temp.fd:
            raise OSError(errno.EINVAL, "direct")
        return pwrite(fd, view[:100_000], offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    assert copy_file(src, temp, len(data)) == reference(data)
    monkeypatch.undo()
    assert content(temp) == data
    os.close(src)


def test_short_direct_writes(monkeypatch: pytest.MonkeyPatch, memory: Path, files: Files) -> None:
    data = random.Random(3).randbytes(2 * CHUNK + 4097)
    src, pwrite = make(memory, data), os.pwrite
    temp = files.temp()
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: pwrite(fd, view[: 64 * 4096], offset))
    assert copy_file(src, temp, len(data)) == reference(data)
    monkeypatch.undo()
    assert content(temp) == data
    os.close(src)


def test_copy_range(memory: Path, files: Files) -> None:
    data = random.Random(4).randbytes(2 * CHUNK)
    src, temp = make(memory, data), files.temp()
    with Destination(temp.fd) as dst:
        dst.prefer_direct()
        assert copy_range(src, dst, CHUNK, CHUNK) == xxhash.xxh3_128_digest(data[CHUNK:])
    assert content(temp) == bytes(CHUNK) + data[CHUNK:]
    os.close(src)


def test_a_full_disk(memory: Path, disk: Path, files: Files) -> None:
    if disk == memory:
        pytest.skip("that would fill the machine's memory")
    fs = os.statvfs(disk)
    room = fs.f_bavail * fs.f_frsize
    src = os.open(memory, os.O_RDWR | os.O_TMPFILE, 0o600)
    for offset in range(0, room + 64 * MIB, CHUNK):
        os.pwrite(src, b"x" * CHUNK, offset)
    seen: list[int] = []
    with pytest.raises(OSError, match="No space") as caught:
        copy_file(src, files.temp(), room + 64 * MIB, throttle=seen.append)
    assert caught.value.errno == errno.ENOSPC
    assert not seen, "the refusal comes before any byte is copied"
    files.temps.pop().discard()
    filler = files.temp()
    with pytest.raises(OSError, match="No space"):
        disks.fill(filler.fd)
    with pytest.raises(OSError, match="No space") as caught:
        copy_file(src, files.temp(), 3 * CHUNK)
    assert caught.value.errno == errno.ENOSPC
    os.close(src)


def test_pipelined(memory: Path, files: Files) -> None:
    data = random.Random(5).randbytes(7 * CHUNK + 321)
    src, temp = make(memory, data[: 3 * CHUNK + 5]), files.temp()
    pipeline = PipelinedCopy(temp)
    assert pipeline.advance(src, 10) == 0
    assert pipeline.advance(src, 3 * CHUNK + 5) == 3 * CHUNK
    assert pipeline.advance(src, 3 * CHUNK + 5) == 0
    os.pwrite(src, data[3 * CHUNK + 5 :], 3 * CHUNK + 5)
    assert pipeline.advance(src, 9 * CHUNK) == 4 * CHUNK, "a size beyond the end is no error"
    assert pipeline.finish(src, len(data)) == reference(data)
    assert pipeline.recopied == 0
    assert content(temp) == data
    os.close(src)


def test_pipelined_source_changed_and_shrank(memory: Path, files: Files) -> None:
    src, temp = make(memory, random.Random(6).randbytes(6 * CHUNK)), files.temp()
    seen: list[int] = []
    pipeline = PipelinedCopy(temp)
    pipeline.advance(src, 6 * CHUNK)
    os.pwrite(src, b"changed", CHUNK + 10)
    os.ftruncate(src, 3 * CHUNK + 50)
    data = os.pread(src, 1 << 30, 0)
    assert pipeline.finish(src, len(data), throttle=seen.append) == reference(data)
    assert sorted(seen) == [50, CHUNK]
    assert content(temp) == data
    os.close(src)


@pytest.mark.parametrize("stable", [True, False])
def test_pipelined_tells_the_chunk_digests(memory: Path, files: Files, stable: bool) -> None:
    data = random.Random(8).randbytes(3 * CHUNK + 9)
    src, temp = make(memory, data), files.temp()
    pipeline = PipelinedCopy(temp)
    pipeline.advance(src, 2 * CHUNK)
    os.pwrite(src, b"changed", CHUNK)
    data = os.pread(src, 1 << 30, 0)
    found: list[bytes] = []
    assert pipeline.finish(src, len(data), stable=stable, digests=found) == reference(data)
    assert found == [chunk_digest(data[o : o + CHUNK]) for o in range(0, len(data), CHUNK)]
    again: list[bytes] = []
    copy_file(src, files.temp(), len(data), stable=stable, digests=again)
    assert again == found
    assert content(temp) == data
    os.close(src)


def test_front_is_what_is_copied_without_a_gap(memory: Path, files: Files) -> None:
    src = make(memory, b"x" * (3 * CHUNK))
    pipeline = PipelinedCopy(files.temp())
    assert pipeline.front == 0
    pipeline.advance(src, 2 * CHUNK + 1)
    assert pipeline.front == 2 * CHUNK
    left = iter([False, True])
    with pytest.raises(SourceChanged):
        PipelinedCopy(files.temp(), streams=1).advance(src, 3 * CHUNK, cancelled=lambda: next(left))
    os.close(src)


def test_data_ends_at_the_first_hole(memory: Path) -> None:
    """safetensors sets the full size before it writes anything."""
    fd = make(memory, b"x" * CHUNK)
    assert data_end(fd, 0) == data_end(fd, 4096) == CHUNK
    os.ftruncate(fd, 4 * CHUNK)
    assert data_end(fd, 0) == CHUNK
    assert data_end(fd, CHUNK) == CHUNK
    assert data_end(fd, 5 * CHUNK) == 5 * CHUNK
    os.close(fd)


def test_pipelined_early_ftruncate(memory: Path, files: Files) -> None:
    """safetensors sets the full size before it writes anything."""
    data = random.Random(7).randbytes(4 * CHUNK + 1)
    src, temp = make(memory, b""), files.temp()
    os.ftruncate(src, len(data))
    pipeline = PipelinedCopy(temp)
    pipeline.advance(src, len(data))
    os.pwrite(src, data, 0)
    assert pipeline.finish(src, len(data)) == reference(data)
    assert pipeline.recopied == 0, "what was a hole was not copied"
    assert content(temp) == data
    os.close(src)


def test_pipelined_empty_and_cancelled(memory: Path, files: Files) -> None:
    src = make(memory, b"x" * CHUNK)
    assert PipelinedCopy(files.temp()).finish(src, 0) == reference(b"")
    pipeline = PipelinedCopy(files.temp())
    with pytest.raises(SourceChanged):
        pipeline.advance(src, CHUNK, cancelled=lambda: True)
    pipeline.close()
    os.close(src)


def test_only_stable_tmpfs_files_without_holes_are_mapped(memory: Path, tmp_path: Path) -> None:
    full = make(memory, b"x" * 10_000)
    assert copying._map(full, 10_000) is not None
    assert copying._map(full, 10_001) is None
    os.ftruncate(full, 100_000)
    assert copying._map(full, 100_000) is None
    os.close(full)
    if os.statvfs(tmp_path).f_fsid != os.statvfs(memory).f_fsid:
        on_disk = make(tmp_path, b"x" * 10_000)
        assert copying._map(on_disk, 10_000) is None
        os.close(on_disk)
