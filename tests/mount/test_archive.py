"""The archive is the tree of the mount, as ordinary files that anyone can read without tierfs."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from tierfs.testing.mounting import TestMount, is_mounted

Entry = tuple[str, int, int, int, bytes]


def tree(root: Path) -> dict[str, Entry]:
    """Relative path → kind, mode, owner, mtime (0 for directories), content."""
    found: dict[str, Entry] = {}
    for directory, names, files in os.walk(root):
        if ".tierfs" in names:
            names.remove(".tierfs")
        for name in names + files:
            path = Path(directory, name)
            info = path.lstat()
            kind = stat.filemode(info.st_mode)[0]
            content = b""
            if kind == "l":
                content = os.readlink(os.fsencode(path))
            elif kind == "-":
                content = path.read_bytes()
            mtime = info.st_mtime_ns if kind == "-" else 0
            mode = 0 if kind == "l" else stat.S_IMODE(info.st_mode)
            found[str(path.relative_to(root))] = (kind, mode, info.st_uid, mtime, content)
    return found


def same(mnt: TestMount) -> None:
    mnt.flush()
    assert tree(mnt.archive) == tree(mnt.path)


def test_files_and_directories(mnt: TestMount) -> None:
    (mnt.path / "run" / "step-1").mkdir(parents=True)
    (mnt.path / "run" / "step-1" / "model.pt").write_bytes(os.urandom(5_000_003))
    (mnt.path / "run" / "empty").touch()
    (mnt.path / "run" / "latest").write_text("step-1")
    same(mnt)


def test_follows_renames(mnt: TestMount) -> None:
    (mnt.path / "tmp").mkdir()
    (mnt.path / "tmp" / "shard").write_bytes(os.urandom(100_000))
    (mnt.path / "other").write_bytes(b"other")
    same(mnt)
    (mnt.path / "tmp").rename(mnt.path / "final")
    (mnt.path / "final" / "shard").rename(mnt.path / "shard")
    (mnt.path / "other").rename(mnt.path / "final" / "other")
    same(mnt)
    (mnt.path / "new").write_bytes(b"new")
    (mnt.path / "new").rename(mnt.path / "shard")
    same(mnt)


def test_follows_swapped_names(mnt: TestMount) -> None:
    (mnt.path / "a").write_bytes(b"a")
    (mnt.path / "b").write_bytes(b"b")
    same(mnt)
    (mnt.path / "a").rename(mnt.path / "x")
    (mnt.path / "b").rename(mnt.path / "a")
    (mnt.path / "x").rename(mnt.path / "b")
    same(mnt)


def test_follows_deletes(mnt: TestMount) -> None:
    (mnt.path / "old").mkdir()
    for number in range(20):
        (mnt.path / "old" / f"{number}").write_bytes(b"x" * number)
    same(mnt)
    for path in (mnt.path / "old").iterdir():
        path.unlink()
    (mnt.path / "old").rmdir()
    same(mnt)
    assert tree(mnt.archive) == {}


def test_follows_modes_and_times(mnt: TestMount) -> None:
    file = mnt.path / "file"
    file.write_bytes(b"x")
    (mnt.path / "dir").mkdir()
    same(mnt)
    file.chmod(0o640)
    (mnt.path / "dir").chmod(0o700)
    os.utime(file, ns=(1_234_567_891, 1_234_567_891))
    same(mnt)
    if os.geteuid() == 0:
        os.chown(file, 4242, 4242)
        same(mnt)
    file.write_bytes(b"changed")
    same(mnt)


def test_hard_links_are_hard_links(mnt: TestMount) -> None:
    (mnt.path / "a").write_bytes(os.urandom(10_000))
    (mnt.path / "d").mkdir()
    (mnt.path / "d" / "b").hardlink_to(mnt.path / "a")
    same(mnt)
    assert (mnt.archive / "a").samefile(mnt.archive / "d" / "b")
    (mnt.path / "latest").symlink_to("a")
    os.link(mnt.path / "latest", mnt.path / "d" / "latest", follow_symlinks=False)
    same(mnt)
    assert (mnt.archive / "latest").lstat().st_ino == (mnt.archive / "d" / "latest").lstat().st_ino
    (mnt.path / "a").unlink()
    same(mnt)
    assert (mnt.archive / "d" / "b").stat().st_nlink == 1


def test_symlinks_are_symlinks(mnt: TestMount) -> None:
    (mnt.path / "step-1").mkdir()
    (mnt.path / "latest").symlink_to("step-1")
    (mnt.path / "outside").symlink_to("/etc/passwd")
    (mnt.path / "dangling").symlink_to("nowhere")
    same(mnt)
    (mnt.path / "latest").unlink()
    (mnt.path / "latest").symlink_to("step-2")
    same(mnt)


def test_names_that_are_not_utf8(mnt: TestMount) -> None:
    with open(os.fsencode(mnt.path) + b"/\xff\xfe", "wb") as file:
        file.write(b"x")
    same(mnt)
    assert os.fsdecode(b"\xff\xfe") in tree(mnt.archive)


def test_appended_and_rewritten_in_place(mnt: TestMount) -> None:
    file = mnt.path / "log"
    for number in range(5):
        with file.open("ab") as log:
            log.write(b"line %d\n" % number)
        same(mnt)
    with file.open("r+b") as log:
        log.write(b"LINE")
    os.truncate(file, 12)
    same(mnt)


def test_replaced_before_drain_costs_nothing(mnt: TestMount) -> None:
    mnt.cli("pause", mnt.path)
    for _ in range(10):
        (mnt.path / "temporary").write_bytes(os.urandom(8 << 20))
        (mnt.path / "temporary").rename(mnt.path / "latest.pt")
    status = mnt.status()
    drain = status["drain"]
    assert isinstance(drain, dict)
    assert drain["queued_files"] == 1
    assert drain["unsynced_bytes"] == 8 << 20
    mnt.cli("resume", mnt.path)
    same(mnt)
    used = sum(p.stat().st_blocks * 512 for p in mnt.archive.rglob("*") if p.is_file() and ".tierfs" not in p.parts)
    assert used < 12 << 20


def test_deleted_before_drain_never_reaches_the_archive(mnt: TestMount) -> None:
    mnt.cli("pause", mnt.path)
    (mnt.path / "scratch").write_bytes(b"x" * 1_000_000)
    (mnt.path / "scratch").unlink()
    mnt.cli("resume", mnt.path)
    same(mnt)
    assert tree(mnt.archive) == {}


def test_evicted_files_read_the_same(mnt: TestMount) -> None:
    content = os.urandom(20 << 20)
    (mnt.path / "model").write_bytes(content)
    mnt.flush()
    mnt.evict(mnt.path / "model")
    tiers = {replica["tier"] for replica in mnt.info(mnt.path / "model")["replicas"] if replica["state"] != "deleting"}
    assert "memory" not in tiers
    assert "archive" in tiers
    assert (mnt.path / "model").read_bytes() == content
    if mnt.nvme is not None:
        for tier in ("memory", "nvme"):
            mnt.cli("evict", mnt.path / "model", "--from", tier, check=False)
        assert (mnt.path / "model").read_bytes() == content


def test_undrained_files_are_not_evicted(mnt: TestMount) -> None:
    mnt.cli("pause", mnt.path)
    (mnt.path / "only-copy").write_bytes(b"x" * 1_000_000)
    mnt.cli("evict", mnt.path / "only-copy", check=False)
    assert (mnt.path / "only-copy").read_bytes() == b"x" * 1_000_000
    assert mnt.info(mnt.path / "only-copy")["durable"] is None
    mnt.cli("resume", mnt.path)


def test_pointer_never_precedes_its_shards(mnt: TestMount) -> None:
    """The archive shows a prefix of what was closed, in close order."""
    for step in range(4):
        directory = mnt.path / f"step-{step}"
        directory.mkdir()
        for shard in range(3):
            (directory / f"{shard}.pt").write_bytes(bytes([step]) * (12 << 20))
        (mnt.path / "latest.tmp").write_text(f"step-{step}")
        (mnt.path / "latest.tmp").rename(mnt.path / "latest")
        for _ in range(10):
            check_pointer(mnt.archive)
            time.sleep(0.01)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and check_pointer(mnt.archive) != "step-3":
        time.sleep(0.02)
    assert check_pointer(mnt.archive) == "step-3"


def check_pointer(archive: Path) -> str | None:
    try:
        step = (archive / "latest").read_text()
    except FileNotFoundError:
        return None
    for shard in range(3):
        assert (archive / step / f"{shard}.pt").stat().st_size == 12 << 20
    return step


def test_clean_umount_leaves_all_on_the_archive(mnt: TestMount) -> None:
    (mnt.path / "dir").mkdir()
    for number in range(5):
        (mnt.path / "dir" / f"{number}.pt").write_bytes(os.urandom(8 << 20))
    (mnt.path / "dir" / "link").symlink_to("0.pt")
    expected = tree(mnt.path)
    mnt.umount()
    assert tree(mnt.archive) == expected
    assert not is_mounted(mnt.memory)


def test_umount_without_drain_keeps_everything_for_the_next_mount(mnt: TestMount) -> None:
    mnt.cli("pause", mnt.path)
    (mnt.path / "kept.pt").write_bytes(b"kept" * 1_000_000)
    (mnt.path / "dir").mkdir()
    expected = tree(mnt.path)
    mnt.umount("--no-drain")
    mnt.mount()
    assert tree(mnt.path) == expected
    same(mnt)


@pytest.mark.parametrize("times", [3])
def test_mount_again(mnt: TestMount, times: int) -> None:
    for number in range(times):
        (mnt.path / f"{number}").write_bytes(os.urandom(100_000))
        expected = tree(mnt.path)
        mnt.umount()
        mnt.mount()
        assert tree(mnt.path) == expected
