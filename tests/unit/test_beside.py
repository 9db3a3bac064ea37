"""What lies beside replicas says again what it was told, and nothing else that lies there is believed."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import zlib
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.assembled import assemble
from tierfs.fs.caller import Caller
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.beside import LIMIT, SUFFIX, XATTR, Beside, DirectoryBeside, decode, describer, encode, is_name
from tierfs.types import ROOT_INO, ReplicaState

NUMBERS = st.integers(0, (1 << 63) - 1)
TIMES = st.integers(-(1 << 62), 1 << 62)
OWNERS = st.integers(0, (1 << 32) - 1)
NAMES = st.binary(min_size=1, max_size=12).filter(is_name) | st.just(b"\xfe" * 255)
DIRECTORIES = st.builds(
    DirectoryBeside, st.integers(0, 0o7777).map(lambda mode: stat.S_IFDIR | mode), OWNERS, OWNERS, TIMES
)


@st.composite
def records(draw: st.DrawFn) -> Beside:
    ino = draw(st.integers(2, 1 << 40))
    chains = []
    directories = {}
    for _ in range(draw(st.integers(0, 3))):
        above = draw(st.lists(st.integers(2, 1 << 40).filter(lambda number: number != ino), unique=True, max_size=4))
        names = [draw(NAMES.filter(lambda name: name != b".tierfs")) for _ in range(len(above) + 1)]
        chains.append(tuple(zip([*above, ino], names, strict=True)))
        directories.update({number: draw(DIRECTORIES) for number in above})
    keys = st.binary(min_size=1, max_size=20).filter(lambda key: b"\0" not in key and not key.startswith(b"tierfs."))
    return Beside(
        ino=ino,
        version=draw(st.integers(1, 1 << 40)),
        seq=draw(NUMBERS),
        mode=stat.S_IFREG | draw(st.integers(0, 0o7777)),
        uid=draw(OWNERS),
        gid=draw(OWNERS),
        size=draw(NUMBERS),
        atime_ns=draw(TIMES),
        mtime_ns=draw(TIMES),
        ctime_ns=draw(TIMES),
        digest=draw(st.none() | st.binary(min_size=16, max_size=16)),
        names=tuple(chains),
        directories=directories,
        xattrs=draw(st.dictionaries(keys.map(lambda key: b"user." + key), st.binary(max_size=20), max_size=3)),
        file_mtime_ns=draw(TIMES),
    )


BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may have other things to do."""


@BUSY
@given(records())
def test_a_record_says_again_what_it_was_told(record: Beside) -> None:
    assert decode(encode(record)) == record


@BUSY
@given(records(), st.data())
def test_a_damaged_record_is_none(record: Beside, data: st.DataObject) -> None:
    raw = bytearray(encode(record))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    assert decode(bytes(raw)) is None
    assert decode(encode(record)[:at]) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=30,
)


def forged(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return b"tierfs-replica 1 %08x " % zlib.crc32(text) + text


@BUSY
@given(JSON | st.lists(JSON, min_size=7, max_size=7))
@example([[2, 1, 1], [33188, 0, 0, 0], [0, 0, 0, 0], None, [[[2, ".."]]], [], []])
@example([[2, 1, 1], [33188, 0, 0, 0], [0, 0, 0, 0], None, [[[3, ".."], [2, "passwd"]]], [], []])
@example([[2, 1, 1], [33188, 0, 0, 0], [0, 0, 0, 0], None, [[[2, "../../etc/passwd"]]], [], []])
@example([[2, 1, 1], [33188, 0, 0, 0], [0, 0, 0, 0], None, [[[3, ".tierfs"], [2, "x"]]], [], []])
@example([[2, 1, 1], [33188, 0, 0, 0], [0, 0, 0, 0], None, [[[3, "a"], [3, "b"], [2, "x"]]], [], []])
@example([[2, 1, 1], [33188, 0, 0, 1 << 70], [0, 0, 0, 0], None, [[[2, "x"]]], [], []])
@example([[2, 1, True], [33188, 0, 0, 0], [0, 0, 0, 0], None, [[[2, "x"]]], [], []])
def test_what_a_forged_record_says_leads_nowhere_but_down_from_the_root(fields: object) -> None:
    found = decode(forged(fields))
    if found is not None:
        for chain in found.names:
            assert all(is_name(name) for _, name in chain)
            assert chain[0][1] != b".tierfs"
            assert chain[-1][0] == found.ino


@BUSY
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"x" * (LIMIT + 1))
def test_any_bytes_are_a_record_or_none(raw: bytes) -> None:
    assert decode(raw) is None
    nested = b"tierfs-replica 1 %08x " % zlib.crc32(raw) + raw
    found = decode(nested)
    assert found is None or encode(found)


def make(store: ReplicaStore, key: str, record: Beside, content: bytes) -> None:
    temp = store.temporary(key)
    os.write(temp.fd, content)
    store.publish(temp, key, describer(record), bytes(16))


def sample(**changes: object) -> Beside:
    record = Beside(
        ino=5,
        version=2,
        seq=77,
        mode=stat.S_IFREG | 0o640,
        uid=1,
        gid=2,
        size=0,
        atime_ns=1,
        mtime_ns=2,
        ctime_ns=3,
        digest=None,
        names=(((4, b"d\xff"), (5, b"n\xfe")),),
        directories={4: DirectoryBeside(stat.S_IFDIR | 0o700, 3, 4, 5)},
        xattrs={b"user.a": b"\x00\xff"},
    )
    return Beside(**{**{name: getattr(record, name) for name in Beside.__slots__}, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [b"", b"v" * 2000, b"v" * 60_000], ids=["small", "most of a block", "beyond a block"])
def test_a_record_is_found_beside_its_replica_wherever_it_fits(disk: Path, value: bytes) -> None:
    """ext4 takes 4 KiB of xattrs for a file, xfs 64: what is larger lies in a file of its own."""
    store = ReplicaStore("nvme", disk / f"tier-{len(value)}", persistent=True)
    store.prepare()
    make(store, "5-1", sample(xattrs={b"user.a": value}), b"content")
    found = store.record("5-1")
    assert found is not None
    assert (found.size, found.digest, found.xattrs) == (7, bytes(16), {b"user.a": value})
    assert found.file_mtime_ns == store.status("5-1").st_mtime_ns
    assert list(store.keys()) == ["5-1"]
    store.remove("5-1")
    assert not list(store.keys())
    assert not list(store.root.rglob(f"*{SUFFIX}"))
    store.close()


def test_a_filesystem_without_user_xattrs_keeps_records_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    store = ReplicaStore("nvme", tmp_path / "tier", persistent=True)
    store.prepare()
    monkeypatch.setattr(os, "setxattr", refuse)
    monkeypatch.setattr(os, "getxattr", refuse)
    make(store, "5-1", sample(), b"content")
    found = store.record("5-1")
    assert found is not None
    assert found.names == sample().names
    assert list(store.loose_records()) == []
    (directory,) = [path.parent for path in store.root.rglob("5-1")]
    os.unlink(directory / "5-1")
    (loose,) = store.loose_records()
    store.remove(loose)
    assert list(store.loose_records()) == []


def test_what_is_no_plain_file_beside_a_replica_is_no_record(tmp_path: Path) -> None:
    store = ReplicaStore("nvme", tmp_path / "tier", persistent=True)
    store.prepare()
    os.close(store.create("5-1"))
    assert store.record("5-1") is None
    (path,) = store.root.rglob("5-1")
    outside = tmp_path / "outside"
    outside.write_bytes(encode(sample()))
    (path.parent / f"5-1{SUFFIX}").symlink_to(outside)
    assert store.record("5-1") is None
    os.unlink(path.parent / f"5-1{SUFFIX}")
    os.mkfifo(path.parent / f"5-1{SUFFIX}")
    assert store.record("5-1") is None


@settings(deadline=None, max_examples=5)
@given(st.binary(max_size=100))
def test_a_durable_replica_has_its_record_before_the_catalog_says_so(content: bytes) -> None:
    """On every way to a persistent tier: drained there, recalled there, and synced where it was written."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as top:
        trio.run(_drain, Path(top), content)


async def _drain(top: Path, content: bytes) -> None:
    parts = assemble(top)
    caller = Caller(0, 0, None, False)
    directory = parts.names.make(ROOT_INO, b"dir\xff", stat.S_IFDIR | 0o750, caller)
    fh, made = parts.names.create(directory.ino, b"file", 0o600, os.O_WRONLY, caller)
    await parts.filesystem.write(fh, 0, content)
    await parts.filesystem.set_xattr(made.ino, b"user.k", b"v", caller)
    parts.files.release(fh)
    parts.names.link(made.ino, ROOT_INO, b"other", caller)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.migrator.run)
        await parts.migrator.flusher.flush(ROOT_INO, "archive", 20)
        nursery.cancel_scope.cancel()
    replica = next(r for r in parts.catalog.replicas(made.ino) if r.tier == "nvme")
    assert replica.state is ReplicaState.DURABLE
    found = parts.stores["nvme"].record(replica.key)
    assert found is not None
    assert (found.ino, found.version, found.size, found.digest) == (made.ino, 1, len(content), replica.digest)
    assert sorted(found.paths) == [(b"dir\xff", b"file"), (b"other",)]
    assert found.xattrs == {b"user.k": b"v"}
    assert found.directories[directory.ino].mode == stat.S_IFDIR | 0o750
    memory = next(r for r in parts.catalog.replicas(made.ino) if r.tier == "memory")
    (file,) = (top / "memory").rglob(memory.key)
    assert XATTR not in os.listxattr(file)
    # recalled there
    with parts.catalog.transaction():
        for local in (memory, replica):
            parts.catalog.remove_replica(local)
    attributes = parts.catalog.attributes(made.ino)
    assert attributes is not None
    recalled = await parts.migrator.recaller.recall(attributes, "nvme")
    beside = parts.stores["nvme"].record(recalled.key)
    assert beside is not None
    assert (beside.ino, beside.version, beside.digest) == (made.ino, 1, recalled.digest)
    assert beside.file_mtime_ns == attributes.mtime_ns
    # synced in place
    source = recalled._replace(state=ReplicaState.WRITTEN)
    os.removexattr(next((top / "nvme").rglob(recalled.key)), XATTR)
    with parts.catalog.transaction():
        parts.catalog.put_replica(source)
    await parts.migrator._settle_in_place(source)
    again = parts.stores["nvme"].record(recalled.key)
    assert again is not None
    assert again.ino == made.ino
    parts.close()
