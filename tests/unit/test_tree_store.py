from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest_disks as disks
from tierfs.durable import TemporaryFile
from tierfs.errors import TierError
from tierfs.tiers.tree import TreeStore

MIB = 1 << 20
MTIME = 1_600_000_000_123_456_789


@pytest.fixture
def store(disk: Path) -> Iterator[TreeStore]:
    with tempfile.TemporaryDirectory(dir=disk) as root:
        made = TreeStore("archive", Path(root) / "root")
        made.prepare()
        yield made
        made.close()


def filled(store: TreeStore, data: bytes) -> TemporaryFile:
    temp = store.temporary("1-1")
    os.write(temp.fd, data)
    return temp


def put(store: TreeStore, path: tuple[bytes, ...], data: bytes, mode: int = 0o644) -> TemporaryFile:
    temp = filled(store, data)
    store.publish(temp, path, mode, os.geteuid(), os.getegid(), MTIME, {})
    temp.close()
    return temp


def make_directories(store: TreeStore) -> None:
    for number in range(100_000):
        store.mkdir((b"d", str(number).encode() * 20))


def names(store: TreeStore) -> list[str]:
    found = [str(p.relative_to(store.root)) for p in store.root.rglob("*")]
    return sorted(name for name in found if not name.startswith(".tierfs"))


def test_publish_sets_everything(store: TreeStore) -> None:
    store.mkdir((b"d",))
    temp = filled(store, b"data")
    uid, gid = (12, 34) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    store.publish(temp, (b"d", b"f"), 0o4640, uid, gid, MTIME, {b"user.k": b"v"}, sync_dir=False)
    store.sync_directories([(b"d",), (b"gone",)])
    temp.close()
    path = store.root / "d" / "f"
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o4640, uid, gid)
    assert status.st_mtime_ns == MTIME
    assert path.read_bytes() == b"data"
    assert os.getxattr(path, "user.k") == b"v"
    fd = store.open((b"d", b"f"))
    assert os.read(fd, 10) == b"data"
    os.close(fd)
    assert os.listdir(store.root / ".tierfs" / "tmp") == []


def test_publish_repeated_after_a_later_rename(store: TreeStore) -> None:
    temp = filled(store, b"1")
    store.publish(temp, (b"a",), 0o600, 0, 0, MTIME, {})
    store.rename((b"a",), (b"b",))
    store.publish(temp, (b"a",), 0o600, 0, 0, MTIME, {})
    store.rename((b"a",), (b"b",))
    temp.close()
    assert names(store) == ["b"]


def test_every_operation_twice(store: TreeStore) -> None:
    put(store, (b"f",), b"1")
    for _ in range(2):
        store.mkdir((b"d",))
        store.symlink(b"../somewhere", (b"d", b"s"))
        store.special((b"d", b"p"), stat.S_IFIFO | 0o600, 0)
        store.link((b"f",), (b"d", b"l"))
    assert os.readlink(store.root / "d" / "s") == "../somewhere"
    assert (store.root / "d" / "l").stat().st_ino == (store.root / "f").stat().st_ino
    for _ in range(2):
        store.rename((b"f",), (b"g",))
        store.set_attributes((b"g",), 0o400, 0, 0, MTIME, {b"user.a": b"1"})
        store.set_attributes((b"f",), 0o400, 0, 0, MTIME, {})
    for _ in range(2):
        for name in (b"s", b"p", b"l"):
            store.remove((b"d", name))
        store.rmdir((b"d",))
        store.remove((b"g",))
    assert names(store) == []


def test_names_are_replaced(store: TreeStore) -> None:
    put(store, (b"a",), b"a")
    put(store, (b"b",), b"b")
    store.symlink(b"x", (b"a",))
    store.symlink(b"y", (b"a",))
    assert os.readlink(store.root / "a") == "y"
    store.link((b"b",), (b"a",))
    assert (store.root / "a").read_bytes() == b"b"
    put(store, (b"a",), b"new")
    assert (store.root / "b").read_bytes() == b"b"
    with pytest.raises(TierError):
        store.mkdir((b"a",))


def test_rename_onto_another_name_of_the_file(store: TreeStore) -> None:
    put(store, (b"a",), b"1")
    store.link((b"a",), (b"b",))
    store.rename((b"a",), (b"b",))
    assert names(store) == ["b"]
    store.rename((b"b",), (b"b",))
    assert names(store) == ["b"]


def test_rename_merges_into_a_full_directory(store: TreeStore) -> None:
    """A replay makes the old directory again, and finds the new one where it had been moved to."""
    put(store, (b"new", b"sub", b"kept"), b"1")
    put(store, (b"new", b"sub", b"both"), b"older")
    put(store, (b"old", b"sub", b"both"), b"newer")
    put(store, (b"old", b"more"), b"2")
    store.rename((b"old",), (b"new",))
    assert names(store) == ["new", "new/more", "new/sub", "new/sub/both", "new/sub/kept"]
    assert (store.root / "new" / "sub" / "both").read_bytes() == b"newer"


def test_exchange(store: TreeStore) -> None:
    put(store, (b"f",), b"1")
    store.mkdir((b"d",))
    store.exchange((b"f",), (b"d",))
    assert (store.root / "d").read_bytes() == b"1"
    assert (store.root / "f").is_dir()
    store.exchange((b"f",), (b"missing",))
    assert names(store) == ["d", "f"]


def test_set_attributes_of_each_kind(store: TreeStore) -> None:
    put(store, (b"f",), b"1")
    store.mkdir((b"d",))
    store.symlink(b"f", (b"s",))
    store.special((b"p",), stat.S_IFIFO | 0o600, 0)
    uid = 7 if os.geteuid() == 0 else os.geteuid()
    for name in (b"f", b"d", b"s", b"p"):
        store.set_attributes((name,), 0o610, uid, os.getegid(), MTIME, {b"user.a": b"1", b"user.b": b""})
        status = os.lstat(store.root / os.fsdecode(name))
        assert (status.st_uid, status.st_mtime_ns) == (uid, MTIME)
        assert name == b"s" or stat.S_IMODE(status.st_mode) == 0o610
    store.set_attributes((b"f",), 0o000, uid, os.getegid(), MTIME, {b"user.b": b"2"})
    assert os.listxattr(store.root / "f") == ["user.b"]
    assert os.getxattr(store.root / "f", "user.b") == b"2"
    assert stat.S_IMODE((store.root / "f").stat().st_mode) == 0


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b"])
def test_bad_names_are_refused(store: TreeStore, name: bytes) -> None:
    for path in ((name,), (b"d", name), (name, b"f")):
        with pytest.raises(TierError) as caught:
            store.mkdir(path)
        assert not caught.value.temporary


def test_the_reserved_name_and_the_root(store: TreeStore) -> None:
    for path in ((b".tierfs",), (b".tierfs", b"tmp"), ()):
        with pytest.raises(TierError):
            store.rmdir(path)
    store.mkdir((b"d", b".tierfs"))
    assert stat.S_IMODE((store.root / ".tierfs").stat().st_mode) == 0o700


def test_a_planted_symlink_never_leads_out(store: TreeStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    before = (outside / "secret").stat()
    (store.root / "link").symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    put(store, (b"mine",), b"mine")
    leads_out = (b"link", b"new")
    temp = filled(store, b"evil")
    for attempt in (
        lambda: store.mkdir(leads_out),
        lambda: store.mkdir((b"link",)),
        lambda: store.symlink(b"x", leads_out),
        lambda: store.special(leads_out, stat.S_IFIFO | 0o600, 0),
        lambda: store.link((b"mine",), leads_out),
        lambda: store.link((b"link", b"secret"), (b"stolen",)),
        lambda: store.rename((b"mine",), leads_out),
        lambda: store.publish(temp, leads_out, 0o644, 0, 0, MTIME, {}),
        lambda: store.open((b"link", b"secret")),
        lambda: store.open((b"file",)),
        lambda: store.rmdir((b"link",)),
    ):
        with pytest.raises(TierError):
            attempt()
    store.remove((b"link", b"secret"))
    store.rmdir((b"link", b"sub"))
    store.set_attributes((b"link", b"secret"), 0o777, 5, 5, MTIME, {b"user.a": b"1"})
    store.set_attributes((b"file",), 0o777, 5, 5, MTIME, {})
    store.rename((b"link", b"secret"), (b"stolen",))
    store.sync_directories([(b"link",)])
    put(store, (b"file",), b"over")
    temp.discard()
    after = (outside / "secret").stat()
    assert sorted(os.listdir(outside)) == ["secret", "sub"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert (before.st_mode, before.st_uid, before.st_mtime_ns) == (after.st_mode, after.st_uid, after.st_mtime_ns)
    assert names(store) == ["file", "link", "mine"]
    assert (store.root / "file").read_bytes() == b"over"


def test_a_full_disk_and_usage(store: TreeStore, disk: Path) -> None:
    usage = store.usage(5)
    assert usage.used == 5
    assert 0 < usage.available < usage.capacity
    if str(disk).startswith("/dev/shm"):
        return
    temp = store.temporary("1-2")
    with pytest.raises(OSError, match="No space"):
        disks.fill(temp.fd)
    assert store.usage(0).available < MIB
    with pytest.raises(TierError) as caught:
        make_directories(store)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.temporary
    temp.discard()
    put(store, (b"fits",), b"again")


def test_prepare_cleans_up_and_checks_the_marker(store: TreeStore) -> None:
    temp = filled(store, b"left over")
    temp.close()
    again = TreeStore("archive", store.root)
    again.prepare()
    assert again.uuid == store.uuid
    assert os.listdir(store.root / ".tierfs" / "tmp") == []
    again.close()
    with pytest.raises(TierError, match="belongs to a tier called archive"):
        TreeStore("other", store.root).prepare()


def test_names_that_are_not_utf8(store: TreeStore) -> None:
    store.mkdir((b"\xff\xfe",))
    put(store, (b"\xff\xfe", b"\x80 \n"), b"1")
    assert os.listdir(os.fsencode(store.root) + b"/\xff\xfe") == [b"\x80 \n"]
