"""Garbage of an archive with layout chunks: what nothing names goes, nothing else, whoever writes meanwhile."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_chunked_store import chunks, put, read_back, sourced
from tierfs import points
from tierfs.errors import TierError, UsageError
from tierfs.fsck import collect
from tierfs.fsck.collect import Collected
from tierfs.points import At, Point
from tierfs.policy.load import parse_policy
from tierfs.policy.model import Policy
from tierfs.tiers import turnstile
from tierfs.tiers.chunked import ChunkedStore
from tierfs.tiers.copy import Reading
from tierfs.tiers.turnstile import alone


def data(seed: int, size: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkedStore]:
    made = ChunkedStore("archive", tmp_path / "archive")
    made.prepare()
    yield made
    made.close()


def policy_of(store: ChunkedStore, layout: str = "chunks") -> Policy:
    top = store.root.parent
    return parse_policy(
        f"state: {top}/state\n"
        "tiers:\n"
        f"  memory: {{kind: memory, size: 1GiB}}\n"
        f"  archive: {{kind: dir, path: {store.root}, layout: {layout}}}\n",
        "test",
    )


def run(store: ChunkedStore, *, dry: bool = False, patience: float = 10.0) -> Collected:
    return collect.collect(policy_of(store), lambda *_: None, dry=dry, patience=patience)


def waiting(store: ChunkedStore, source: bytes, tmp_path: Path) -> bytes:
    """A copy that is complete and has no name yet: that of its temporary file."""
    path = sourced(tmp_path, source)
    fd = os.open(path, os.O_RDONLY)
    temp = store.temporary("3-1")
    store.store(
        fd,
        len(source),
        temp,
        "none",
        stable=True,
        reading=Reading(),
        streams=1,
        throttle=lambda size: None,
        cancelled=lambda: False,
        alive=lambda: None,
    )
    temp.close()
    os.close(fd)
    return temp.name


def test_what_nothing_names_goes_and_the_rest_stays(store: ChunkedStore, tmp_path: Path) -> None:
    put(store, (b"d", b"kept"), sourced(tmp_path, data(1)))
    before = set(chunks(store))
    put(store, (b"gone",), sourced(tmp_path, data(2)))
    put(store, (b"over",), sourced(tmp_path, data(3)))
    put(store, (b"over",), sourced(tmp_path, data(1)))
    store.remove((b"gone",))
    garbage = set(chunks(store)) - before
    told = run(store, dry=True)
    assert set(chunks(store)) == before | garbage
    done = run(store)
    assert done == told
    assert (done.removed, done.chunks, done.manifests) == (len(garbage), len(before), 2)
    assert done.bytes >= 600_000
    assert set(chunks(store)) == before
    assert read_back(store, (b"d", b"kept")) == read_back(store, (b"over",)) == data(1)
    assert run(store).removed == 0


def test_what_waits_or_was_set_aside_counts(store: ChunkedStore, tmp_path: Path) -> None:
    temp = waiting(store, data(1), tmp_path)
    put(store, (b"old",), sourced(tmp_path, data(2)))
    store.rename((b"old",), (b".tierfs", b"kept", b"2f"))
    assert run(store).removed == 0
    assert store.publish(temp, (b"f",), 0o600, os.geteuid(), os.getegid(), 0, {})
    assert read_back(store, (b"f",)) == data(1)
    assert read_back(store, (b".tierfs", b"kept", b"2f")) == data(2)


def test_a_copy_that_found_garbage_to_be_of_use_keeps_it(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector has read all manifests and takes this chunk for garbage; then a copy comes that needs it."""
    put(store, (b"gone",), sourced(tmp_path, data(1)))
    store.remove((b"gone",))
    real = collect._mark

    def marked(*args: object, **how: object) -> int:
        found = real(*args, **how)  # type: ignore[arg-type]
        if not how["sure"]:
            put(store, (b"f",), sourced(tmp_path, data(1)))
        return found

    monkeypatch.setattr(collect, "_mark", marked)
    assert run(store).removed == 0
    assert read_back(store, (b"f",)) == data(1)


def test_a_directory_that_moves_while_manifests_are_read_is_found(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where nobody has looked yet to where everybody has looked before."""
    put(store, (b"z", b"f"), sourced(tmp_path, data(1)))
    real, moved = collect._files, []

    def files(*args: object) -> Iterator[tuple[str, int, bytes, bool]]:
        if not moved:
            moved.append(True)
            store.rename((b"z", b"f"), (b"a",))
            yield from (item for item in real(*args) if item[2] != b"a")  # type: ignore[arg-type]
        else:
            yield from real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(collect, "_files", files)
    assert run(store).removed == 0
    assert read_back(store, (b"a",)) == data(1)


def test_a_collection_waits_for_a_copy_under_way_and_copies_for_the_collection(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, (b"gone",), sourced(tmp_path, data(1)))
    store.remove((b"gone",))
    with store.changing(lambda: None):
        with pytest.raises(TierError, match="a copy goes on"):
            run(store, patience=0.1)
        assert len(chunks(store)) > 0
    monkeypatch.setattr(turnstile, "PATIENCE", 0.1)
    own = os.open(store.root / ".tierfs", os.O_RDONLY)
    with alone("archive", own, 1.0), pytest.raises(TierError, match="gc"), store.changing(lambda: None):
        pytest.fail("a copy did not wait")
    monkeypatch.setattr(turnstile, "PATIENCE", 60.0)
    waited, copied = threading.Event(), threading.Event()

    def copy() -> None:
        with store.changing(waited.set):
            copied.set()

    with alone("archive", own, 1.0):
        thread = threading.Thread(target=copy)
        thread.start()
        assert waited.wait(10)
        assert not copied.is_set()
    assert copied.wait(10)
    thread.join()
    os.close(own)


@pytest.mark.parametrize("what", ["foreign", "damaged"])
def test_nothing_is_removed_while_a_file_is_not_understood(store: ChunkedStore, tmp_path: Path, what: str) -> None:
    put(store, (b"f",), sourced(tmp_path, data(1)))
    put(store, (b"gone",), sourced(tmp_path, data(2)))
    store.remove((b"gone",))
    before = chunks(store)
    if what == "foreign":
        (store.root / "odd").write_bytes(b"somebody's")
    else:
        raw = (store.root / "f").read_bytes()
        (store.root / "odd").write_bytes(raw[:-1])
    with pytest.raises(TierError, match=r"odd.*nothing was removed"):
        run(store)
    assert chunks(store) == before
    (store.root / "odd").unlink()
    assert run(store).removed > 0


@pytest.mark.parametrize("point", [At.COLLECT_MARKED, At.COLLECT_REMOVED], ids=lambda point: point.name)
def test_a_collection_that_was_cut_short_is_done_by_the_next(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: Point
) -> None:
    put(store, (b"f",), sourced(tmp_path, data(1)))
    kept = chunks(store)
    put(store, (b"gone",), sourced(tmp_path, data(2, 3_000_000)))
    store.remove((b"gone",))

    def strike(reached: Point) -> None:
        if reached is point:
            raise KeyboardInterrupt

    monkeypatch.setattr(points, "struck", strike)
    with pytest.raises(KeyboardInterrupt):
        run(store)
    assert set(kept) < set(chunks(store))
    monkeypatch.setattr(points, "struck", None)
    run(store)
    assert chunks(store) == kept
    assert read_back(store, (b"f",)) == data(1)


@pytest.mark.parametrize("point", [At.CHUNK_WRITTEN, At.CHUNK_NAMED, At.CHUNKS_SYNCED], ids=lambda point: point.name)
def test_a_copy_that_was_cut_short_leaves_garbage(
    store: ChunkedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: Point
) -> None:
    def strike(reached: Point) -> None:
        if reached is point:
            raise KeyboardInterrupt

    monkeypatch.setattr(points, "struck", strike)
    with pytest.raises(KeyboardInterrupt):
        put(store, (b"f",), sourced(tmp_path, data(1)))
    monkeypatch.setattr(points, "struck", None)
    run(store)
    assert chunks(store) == []
    put(store, (b"f",), sourced(tmp_path, data(1)))
    assert read_back(store, (b"f",)) == data(1)


def test_an_archive_with_layout_tree_has_no_garbage(tmp_path: Path, store: ChunkedStore) -> None:
    with pytest.raises(UsageError, match="layout tree"):
        collect.collect(policy_of(store, "tree"), lambda *_: None)
