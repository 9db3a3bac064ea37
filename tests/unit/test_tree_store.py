from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import conftest_disks as disks
from tierfs.durable import TemporaryFile
from tierfs.errors import TierError
from tierfs.tiers import tree
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
    assert store.publish(temp.name, path, mode, os.geteuid(), os.getegid(), MTIME, {})
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
    temp.close()
    assert store.publish(temp.name, (b"d", b"f"), 0o4640, uid, gid, MTIME, {b"user.k": b"v"}, sync_dir=False)
    store.sync_directories([(b"d",), (b"gone",)])
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
    temp.close()
    assert store.publish(temp.name, (b"a",), 0o600, 0, 0, MTIME, {})
    store.rename((b"a",), (b"b",))
    assert not store.publish(temp.name, (b"a",), 0o600, 0, 0, MTIME, {})
    store.rename((b"a",), (b"b",))
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


def make_ends(store: TreeStore) -> None:
    put(store, (b"target",), b"1")
    store.symlink(b"target", (b"s",))
    store.special((b"p",), stat.S_IFIFO | 0o600, 0)


def test_links_to_symlinks_and_special_files_are_links(store: TreeStore) -> None:
    make_ends(store)
    for _ in range(2):
        for name in (b"s", b"p"):
            store.link((name,), (b"d", name))
    for name in ("s", "p"):
        assert (store.root / name).lstat().st_ino == (store.root / "d" / name).lstat().st_ino
    assert os.readlink(store.root / "d" / "s") == "target"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_where_they_cannot_be_linked_there_are_several(
    store: TreeStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    make_ends(store)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        for name in (b"s", b"p"):
            store.link((name,), (b"d", name))
    assert os.readlink(store.root / "d" / "s") == "target"
    assert (store.root / "d" / "p").lstat().st_mode == stat.S_IFIFO | 0o600
    with pytest.raises(TierError):
        store.link((b"target",), (b"d", b"f"))
    assert names(store) == ["d", "d/p", "d/s", "p", "s", "target"]


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


def test_rename_over_what_is_of_the_other_kind(store: TreeStore) -> None:
    put(store, (b"file",), b"1")
    put(store, (b"d", b"f"), b"2")
    store.rename((b"d",), (b"file",))
    assert names(store) == ["file", "file/f"]
    put(store, (b"new",), b"3")
    store.mkdir((b"empty",))
    store.rename((b"new",), (b"empty",))
    assert names(store) == ["empty", "file", "file/f"]


def test_exchange(store: TreeStore) -> None:
    put(store, (b"f",), b"1")
    store.mkdir((b"d",))
    for _ in range(3):
        store.exchange((b"f",), (b"d",), "1")
        assert (store.root / "d").read_bytes() == b"1"
        assert (store.root / "f").is_dir()
    store.exchange((b"f",), (b"d",), "2")
    assert (store.root / "f").read_bytes() == b"1"
    store.forget_exchange("1")
    store.forget_exchange("2")
    store.exchange((b"f",), (b"missing",), "3")
    assert names(store) == ["d", "f"]
    assert os.listdir(store.root / ".tierfs" / "tmp") == []


class Crash(BaseException):
    """The process dies here."""


CALLS = ("rename", "unlink", "link", "symlink", "mkdir", "open", "fsync", "write")


@contextlib.contextmanager
def dying_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """The process dies before its system call of this number (of those that write), or not at all."""
    left = number

    def mortal(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, mortal(getattr(os, name)))
        yield


@pytest.mark.parametrize("swaps", [True, False], ids=["renameat2", "three renames"])
def test_exchange_happens_once_wherever_the_process_dies(
    store: TreeStore, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:

        class NoSwaps:
            def renameat2(self, *_: object) -> int:
                ctypes.set_errno(errno.EINVAL)
                return -1

        monkeypatch.setattr(tree, "_libc", NoSwaps())
    put(store, (b"a",), b"a")
    put(store, (b"d", b"b"), b"b")
    for number in range(100):
        before = (store.root / "a").read_bytes()
        died = False
        try:
            with dying_at(monkeypatch, number):
                store.exchange((b"a",), (b"d", b"b"), f"{number}")
        except Crash:
            died = True
        store.exchange((b"a",), (b"d", b"b"), f"{number}")
        after = (store.root / "a").read_bytes(), (store.root / "d" / "b").read_bytes()
        assert sorted(after) == [b"a", b"b"]
        assert after[0] != before, f"dying at call {number}"
        store.forget_exchange(f"{number}")
        if not died:
            break
    else:
        pytest.fail("never ran to its end")
    assert number > 5


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
        lambda: store.rename((b"mine",), leads_out),
        lambda: store.publish(temp.name, leads_out, 0o644, 0, 0, MTIME, {}),
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
    store.link((b"link", b"secret"), (b"stolen",))
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


def test_prepare_checks_the_marker_and_sweep_cleans_up(store: TreeStore) -> None:
    temp = filled(store, b"left over")
    temp.close()
    again = TreeStore("archive", store.root)
    again.prepare()
    assert again.uuid == store.uuid
    assert os.listdir(store.root / ".tierfs" / "tmp") == [temp.name.decode()]
    kept, mine = filled(store, b"wanted"), filled(again, b"new")
    again.sweep([kept.name])
    assert set(os.listdir(store.root / ".tierfs" / "tmp")) == {kept.name.decode(), mine.name.decode()}
    for left in (kept, mine):
        left.discard()
    again.close()
    with pytest.raises(TierError, match="belongs to a tier called archive"):
        TreeStore("other", store.root).prepare()


def test_names_that_are_not_utf8(store: TreeStore) -> None:
    store.mkdir((b"\xff\xfe",))
    put(store, (b"\xff\xfe", b"\x80 \n"), b"1")
    assert os.listdir(os.fsencode(store.root) + b"/\xff\xfe") == [b"\x80 \n"]


def test_a_large_xattr_stays_out_and_the_content_gets_through(
    store: TreeStore, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ext4 takes one block of xattrs; tmpfs takes less than a trainer may set."""
    caplog.set_level("INFO", "tierfs.archive")
    xattrs = {b"user.small": b"1", b"user.large": b"x" * 65536, b"user.too" + b"o" * 260: b"2"}
    if str(disk).startswith("/dev/shm") or disk.name == "ext4":
        for _ in range(2):
            temp = filled(store, b"data")
            temp.close()
            assert store.publish(temp.name, (b"f",), 0o644, os.geteuid(), os.getegid(), MTIME, xattrs)
            store.set_attributes((b"f",), 0o600, os.geteuid(), os.getegid(), MTIME, xattrs)
        assert (store.root / "f").read_bytes() == b"data"
        assert stat.S_IMODE((store.root / "f").stat().st_mode) == 0o600
        assert os.getxattr(store.root / "f", "user.small") == b"1"
        said = [record for record in caplog.records if "user.too" in record.getMessage()]
        assert [record.levelname for record in said] == ["INFO"], "once for each file"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.E2BIG, errno.EOPNOTSUPP, errno.EDQUOT, errno.EPERM])
def test_refused_xattrs_and_owners_stay_out(
    store: TreeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Whatever an archive says to a xattr, and a NFS server that squashes root says to chown."""
    caplog.set_level("INFO", "tierfs.archive")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "setxattr", refuse)
    if code == errno.EPERM:
        monkeypatch.setattr(os, "chown", refuse)
    temp = filled(store, b"data")
    assert store.publish(temp.name, (b"f",), 0o640, 0, 0, MTIME, {b"user.a": b"1"})
    temp.close()
    assert (store.root / "f").read_bytes() == b"data"
    assert "goes without its" in caplog.text


def test_a_xattr_that_no_longer_fits_leaves_no_old_value(store: TreeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, (b"f",), b"1")
    store.set_attributes((b"f",), 0o644, 0, 0, MTIME, {b"user.a": b"old"})

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "setxattr", refuse)
    store.set_attributes((b"f",), 0o644, 0, 0, MTIME, {b"user.a": b"new"})
    assert os.listxattr(store.root / "f") == []


# a root that goes away


def test_a_lost_mount_is_never_written_into(store: TreeStore) -> None:
    away = store.root.with_name("away")
    store.root.rename(away)
    for lost in ("missing", "empty", "empty .tierfs", "no marker"):
        if lost == "empty":
            store.root.mkdir()
        elif lost == "empty .tierfs":
            (store.root / ".tierfs").mkdir()
        elif lost == "no marker":
            assert list((store.root / ".tierfs").iterdir()) == []
            (store.root / ".tierfs" / "tmp").mkdir()
        for attempt in (store.attach, lambda: store.temporary("1-1"), lambda: store.open_first([(b"f",)], 1)):
            with pytest.raises(TierError, match="still mounted") as caught:
                attempt()
            assert caught.value.temporary
    (store.root / ".tierfs" / "tmp").rmdir()
    (store.root / ".tierfs").rmdir()
    store.root.rmdir()
    away.rename(store.root)
    put(store, (b"f",), b"1")
    assert names(store) == ["f"]


def test_the_archive_mounted_anew_is_opened_again(store: TreeStore) -> None:
    """The same archive under a new directory: what a remount or a server's restart looks like."""
    put(store, (b"old",), b"1")
    waiting = filled(store, b"2")
    waiting.close()
    fresh = store.root.with_name("fresh")
    shutil.copytree(store.root, fresh, symlinks=True)
    store.root.rename(store.root.with_name("away"))
    fresh.rename(store.root)
    before = len(os.listdir("/proc/self/fd"))
    store.attach()
    assert store.publish(waiting.name, (b"new",), 0o600, 0, 0, MTIME, {})
    assert names(store) == ["new", "old"]
    assert len(os.listdir("/proc/self/fd")) == before, "the old root is let go"
    assert sorted(os.listdir(store.root.with_name("away"))) == [".tierfs", "old"]


def test_a_removed_private_directory_is_made_again(store: TreeStore) -> None:
    put(store, (b"old",), b"1")
    waiting = filled(store, b"2")
    waiting.close()
    private = store.root / ".tierfs" / "tmp"
    for again in (store.attach, store.probe, lambda: put(store, (b"new",), b"3"), lambda: store.sweep(())):
        shutil.rmtree(private)
        before = len(os.listdir("/proc/self/fd"))
        again()
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert len(os.listdir("/proc/self/fd")) == before, "the old one is let go"
    assert names(store) == ["new", "old"]
    assert not store.publish(waiting.name, (b"new",), 0o600, 0, 0, MTIME, {}), "what was in it is gone"
    store.symlink(b"old", (b"link",))
    assert names(store) == ["link", "new", "old"]


def test_no_private_directory_is_made_in_another_archive(store: TreeStore) -> None:
    store.root.rename(store.root.with_name("away"))
    other = TreeStore("archive", store.root)
    other.prepare()
    other.close()
    (store.root / ".tierfs" / "tmp").rmdir()
    for attempt in (store.attach, store.probe, lambda: store.temporary("1-1")):
        with pytest.raises(TierError, match="another archive") as caught:
            attempt()
        assert caught.value.temporary
    assert not (store.root / ".tierfs" / "tmp").exists()


def test_a_stale_root_is_opened_again(store: TreeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def stale(fd: int) -> os.stat_result:
        if fd == held.root:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd)

    held = store._held
    assert held is not None
    monkeypatch.setattr(os, "fstat", stale)
    store.attach()
    assert store._held is not held
    monkeypatch.undo()
    put(store, (b"f",), b"1")


def test_another_archive_in_its_place_is_refused_and_tried_again(store: TreeStore) -> None:
    store.root.rename(store.root.with_name("away"))
    other = TreeStore("archive", store.root)
    other.prepare()
    other.close()
    with pytest.raises(TierError, match="another archive") as caught:
        store.attach()
    assert caught.value.temporary


def test_a_hundred_thousand_waiting_files_need_no_descriptors(store: TreeStore, disk: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    waiting = []
    for number in range(500):
        temp = filled(store, b"%d" % number)
        temp.close()
        waiting.append(temp.name)
    assert len(os.listdir("/proc/self/fd")) == before
    for number, name in enumerate(waiting):
        assert store.publish(name, (b"%d" % number,), 0o600, 0, 0, MTIME, {}, sync_dir=False)
    assert (store.root / "499").read_bytes() == b"499"
    for name in waiting:
        store.discard(name)
