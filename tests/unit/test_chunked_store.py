"""An archive with layout chunks as a store: bytes in, bytes out, and what stands there in between."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoints import torch_bytes
from tierfs.errors import DigestMismatch, SourceChanged, TierError
from tierfs.tiers import intake
from tierfs.tiers.chunked import ChunkedStore, read_manifest
from tierfs.tiers.content import FileContent
from tierfs.tiers.copy import CHUNK, Reading, digest_file
from tierfs.tiers.tree import TreeStore


def weights(seed: int, bytes_each: int, number: int = 1) -> list[torch.Tensor]:
    made = random.Random(seed)
    return [torch.frombuffer(bytearray(made.randbytes(bytes_each)), dtype=torch.float32) for _ in range(number)]


MTIME = 1_700_000_000_123_456_789
FILES = {
    "empty": b"",
    "one byte": b"1",
    "text": b"hello world\n" * 5,
    "a window": random.Random(1).randbytes(CHUNK),
    "a window and a byte": random.Random(2).randbytes(CHUNK + 1),
    "checkpoint": torch_bytes({str(n): w for n, w in enumerate(weights(3, 200_000, 40))}),
    "long": random.Random(4).randbytes(20 << 20),
    "zeros": bytes(9 << 20),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkedStore]:
    made = ChunkedStore("archive", tmp_path / "archive")
    made.prepare()
    yield made
    made.close()


def put(
    store: ChunkedStore,
    path: tuple[bytes, ...],
    source: Path | int,
    *,
    codec: str = "none",
    stable: bool = True,
    size: int | None = None,
    nice: int = 0,
) -> bytes:
    """Store and publish: the digest."""
    fd = os.open(source, os.O_RDONLY) if isinstance(source, Path) else source
    try:
        temp = store.temporary("1-1")
        try:
            digest, _ = store.store(
                fd,
                os.fstat(fd).st_size if size is None else size,
                temp,
                codec,
                stable=stable,
                reading=Reading(),
                streams=3,
                nice=nice,
                throttle=lambda size: None,
                cancelled=lambda: False,
                alive=lambda: None,
            )
        except BaseException:
            temp.discard()
            raise
        temp.close()
        assert store.publish(temp.name, path, 0o640, os.geteuid(), os.getegid(), MTIME, {b"user.a": b"1"})
        return digest
    finally:
        if isinstance(source, Path):
            os.close(fd)


def read_back(store: TreeStore, path: tuple[bytes, ...], step: int = CHUNK) -> bytes:
    content = store.content(path)
    try:
        size = content.size
        return b"".join(bytes(content.read(at, min(step, size - at))) for at in range(0, size, step))
    finally:
        content.close()


def chunks(store: ChunkedStore) -> list[Path]:
    return sorted(path for path in (store.root / ".tierfs" / "chunks").glob("*/*") if path.is_file())


def sourced(directory: Path, data: bytes) -> Path:
    path = directory / "source"
    path.write_bytes(data)
    return path


def in_memory(data: bytes) -> int:
    fd = os.memfd_create("source")
    os.write(fd, data)
    return fd


@pytest.mark.parametrize("codec", ["none", "lz4", "bitshuffle-lz4", "shuffle-zstd"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["disk", "memory", "unstable"])
def test_what_is_stored_comes_back_bit_for_bit(
    store: ChunkedStore, tmp_path: Path, name: str, codec: str, how: str
) -> None:
    data = FILES[name]
    source = in_memory(data) if how == "memory" else sourced(tmp_path, data)
    digest = put(store, (b"d", b"f"), source, codec=codec, stable=how != "unstable")
    if isinstance(source, int):
        assert digest == digest_file(source, len(data))
        os.close(source)
    for step in (CHUNK, 1_000_003):
        assert read_back(store, (b"d", b"f"), step) == data
    assert store.size((b"d", b"f")) == len(data)
    status = store.status((b"d", b"f"))
    assert status is not None
    assert status.st_blocks == -(-len(data) // 512)
    assert (status.st_size, status.st_mtime_ns, status.st_mode & 0o777) == (len(data), MTIME, 0o640)
    content = store.content((b"d", b"f"))
    assert content.digest(len(data)) == content.written == digest
    copy = store.temporary("2-1")
    assert content.copy(copy, len(data)) == digest
    assert copy.path.read_bytes() == data
    copy.discard()


def test_a_manifest_says_whose_file_it_is(store: ChunkedStore, tmp_path: Path) -> None:
    put(store, (b"f",), sourced(tmp_path, b"data"))
    with (store.root / "f").open("rb") as file:
        found = read_manifest(file.fileno())
    assert found is not None
    assert (found.mode, found.uid, found.gid) == (0o100640, os.geteuid(), os.getegid())
    assert (found.mtime_ns, found.xattrs) == (MTIME, {b"user.a": b"1"})


def test_what_is_there_is_not_stored_again(store: ChunkedStore, tmp_path: Path) -> None:
    (frozen,), (first, second) = weights(5, 8 << 20), weights(6, 300_000, 2)
    put(store, (b"a",), sourced(tmp_path, torch_bytes({"frozen": frozen, "head": first})))
    before = {path: path.stat().st_ino for path in chunks(store)}
    put(store, (b"b",), sourced(tmp_path, torch_bytes({"frozen": frozen, "head": second})))
    fresh = [path for path in chunks(store) if path not in before]
    assert {path: path.stat().st_ino for path in before} == before
    assert sum(path.stat().st_size for path in fresh) < 300_000 + 100_000
    put(store, (b"c",), sourced(tmp_path, torch_bytes({"frozen": frozen, "head": second})))
    assert len(chunks(store)) == len(before) + len(fresh)


def test_holes_cost_nothing_and_stay_holes(store: ChunkedStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.write(b"begin")
        file.truncate(1 << 30)
        file.seek((1 << 30) - 3)
        file.write(b"end")
    digest = put(store, (b"f",), source)
    assert sum(path.stat().st_size for path in chunks(store)) <= 13 << 20
    content = store.content((b"f",))
    copy = store.temporary("2-1")
    assert content.copy(copy, 1 << 30) == digest
    assert os.fstat(copy.fd).st_blocks * 512 < 20 << 20
    assert os.pread(copy.fd, 3, (1 << 30) - 3) == b"end"
    copy.discard()


def test_a_source_on_a_disk_is_read_where_the_kernel_cannot_tell_its_errors(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake.Intake, "_populated", lambda self, mapping: False)
    put(store, (b"f",), sourced(tmp_path, FILES["long"]))
    assert read_back(store, (b"f",)) == FILES["long"]


def test_a_source_that_became_shorter_leaves_nothing_but_chunks(store: ChunkedStore, tmp_path: Path) -> None:
    for stable in (True, False):
        with pytest.raises(SourceChanged):
            put(store, (b"f",), sourced(tmp_path, b"short"), stable=stable, size=6)
    assert os.listdir(store.root) == [".tierfs"]
    assert os.listdir(store.root / ".tierfs" / "tmp") == []


def test_each_chunk_is_fetched_once_however_many_wait_for_it(store: ChunkedStore, tmp_path: Path) -> None:
    data = FILES["long"]
    put(store, (b"f",), sourced(tmp_path, data))
    content = store.content((b"f",))
    fetched: list[bytes] = []
    gate = threading.Barrier(8)
    real = content._fetch  # type: ignore[attr-defined]

    def counted(ident: bytes, length: int, fresh: bool) -> memoryview:
        fetched.append(ident)
        return real(ident, length, fresh)  # type: ignore[no-any-return]

    content._fetch = counted  # type: ignore[attr-defined]
    wrong: list[int] = []

    def work() -> None:
        gate.wait()
        for at in range(0, len(data), CHUNK):
            if content.read(at, min(CHUNK, len(data) - at)) != data[at : at + CHUNK]:
                wrong.append(at)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(fetched) == len(set(fetched)) == len(chunks(store))


@pytest.mark.parametrize("how", ["flipped", "short", "empty", "missing", "another"])
@pytest.mark.parametrize("codec", ["none", "shuffle-zstd"])
def test_a_chunk_that_is_not_what_was_written_is_noticed_and_stored_again(
    store: ChunkedStore, tmp_path: Path, how: str, codec: str
) -> None:
    data = FILES["checkpoint"]
    put(store, (b"f",), sourced(tmp_path, data), codec=codec)
    victim = max(chunks(store), key=lambda path: path.stat().st_size)
    raw = bytearray(victim.read_bytes())
    if how == "flipped":
        raw[len(raw) // 2] ^= 1
        victim.write_bytes(raw)
    elif how == "short":
        victim.write_bytes(raw[:-1])
    elif how == "empty":
        victim.write_bytes(b"")
    elif how == "missing":
        victim.unlink()
    else:
        other = next(path for path in chunks(store) if path != victim)
        victim.write_bytes(other.read_bytes())
    with pytest.raises(DigestMismatch):
        read_back(store, (b"f",))
    assert (store.lacks((b"f",)) is not None) == (how == "missing")
    put(store, (b"g",), sourced(tmp_path, data), codec=codec)
    assert read_back(store, (b"f",)) == read_back(store, (b"g",)) == data
    assert [path for path in chunks(store) if path.suffix] == []


def test_a_damaged_manifest_is_no_file(store: ChunkedStore, tmp_path: Path) -> None:
    put(store, (b"f",), sourced(tmp_path, b"data"))
    with (store.root / "f").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(DigestMismatch):
        store.content((b"f",))
    assert "manifest" in (store.lacks((b"f",)) or "")


def test_a_file_of_somebody_else_is_what_it_is(store: ChunkedStore) -> None:
    (store.root / "readme").write_bytes(b"not ours")
    content = store.content((b"readme",))
    assert isinstance(content, FileContent)
    assert bytes(content.read(0, 8)) == b"not ours"
    content.close()
    assert store.size((b"readme",)) == 8
    assert store.lacks((b"readme",)) is None


def test_an_archive_keeps_the_layout_that_it_was_made_with(store: ChunkedStore, tmp_path: Path) -> None:
    with pytest.raises(TierError, match="layout chunks, not tree; write layout: chunks"):
        TreeStore("archive", store.root).prepare()
    ChunkedStore("archive", store.root).prepare()
    tree = TreeStore("archive", tmp_path / "tree")
    tree.prepare()
    with pytest.raises(TierError, match="layout tree, not chunks; write layout: tree"):
        ChunkedStore("archive", tree.root).prepare()
    tree.prepare()


def test_what_a_manifest_names_is_durable_before_it(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a copy before wrote that was cut short between a chunk's name and the sync of its directory."""
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        fsync(fd)
        done.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))

    def renamed(old: bytes, new: bytes, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        before = os.readlink(f"/proc/self/fd/{src_dir_fd}") + "/" + os.fsdecode(old)
        assert ("sync", before) in done, f"{before} gets its name before it is synced"
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        done.append(("name", os.readlink(f"/proc/self/fd/{dst_dir_fd}") + "/" + os.fsdecode(new)))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    for name in (b"f", b"g"):  # the second finds every chunk there
        done.clear()
        put(store, (name,), sourced(tmp_path, FILES["checkpoint"]))
        published = done.index(("name", f"{store.root}/{name.decode()}"))
        for chunk in chunks(store):
            named = done.index(("name", str(chunk))) if name == b"f" else -1
            assert named < done.index(("sync", str(chunk.parent)), named + 1) < published
        assert (("name", str(chunks(store)[0])) in done) == (name == b"f")


def test_threads_that_encode_are_as_nice_as_they_are_told_to_be(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: set[int] = set()
    real = intake.encode

    def encode(*args: object) -> object:
        levels.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(intake, "encode", encode)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    put(store, (b"f",), sourced(tmp_path, FILES["long"]), nice=19)
    assert levels == {19}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    assert read_back(store, (b"f",)) == FILES["long"]


def test_files_that_share_their_bytes_do_not_fill_the_archive(store: ChunkedStore) -> None:
    usage = store.usage(1 << 60)
    assert usage.used < usage.capacity
    assert usage.available > 0


def test_what_layout_chunks_needs_starts_no_thread() -> None:
    """The keeper has it loaded, and forks."""
    code = (
        "import os; from tierfs.tiers.assembly import chunked_store; chunked_store();"
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "1"
