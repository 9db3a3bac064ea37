"""The memory tier is lost, as in a reboot: keeper and daemon of real mounts are killed, their tmpfs is unmounted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import MODES, Mounter, eventually
from tests.mount.test_semantics import paused
from tierfs.testing.mounting import TestMount, is_mounted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a tmpfs of its own")
MB = 1 << 20
LIMIT = 120.0
STACKS = {"with-disk": {}, "archive-only": {"nvme": None}}
EXPECTED = [r"(rolled back|lost|undone): ", r"ended with code", "daemon .* died", "was killed"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=STACKS.values(), ids=STACKS.keys())
def mount(request: pytest.FixtureRequest, mode: str, mounter: Mounter) -> Iterator[TestMount]:
    with mounter(mode, allow_log=EXPECTED, **request.param) as made, made.abort_after(LIMIT):
        yield made


@pytest.fixture
def disk_mount(mode: str, mounter: Mounter) -> Iterator[TestMount]:
    with mounter(mode, allow_log=EXPECTED) as made, made.abort_after(LIMIT):
        yield made


def die(mnt: TestMount) -> None:
    """Keeper and daemon are killed, and the memory tier goes."""
    status = mnt.status()
    pids = [pid for key in ("keeper_pid", "daemon_pid") if isinstance(pid := status[key], int)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    mnt.umount()
    assert not is_mounted(mnt.path)
    subprocess.run(["umount", mnt.memory], check=True)


def reboot(mnt: TestMount) -> dict[str, object]:
    die(mnt)
    return come_back(mnt)


def come_back(mnt: TestMount) -> dict[str, object]:
    """The report of the recovery, from each place where it is to be found."""
    printed = mnt.cli("mount", mnt.config, mnt.path).out
    mnt.connection = os.minor(os.stat(mnt.path).st_dev)
    by_config = mnt.cli("recover", mnt.config, "--json").json()
    assert isinstance(by_config, list)
    assert by_config == mnt.cli("recover", mnt.path, "--json").json()
    report = by_config[-1]
    assert isinstance(report, dict)
    told = mnt.cli("recover", mnt.path).out
    for key, what in (("rolled_back", "rolled back: "), ("lost", "lost: "), ("undone", "undone: ")):
        for entry in report[key]:
            for text in (printed, told, mnt.log):
                assert any(what in line and entry["path"] in line for line in text.splitlines())
    return report


def entries(report: dict[str, object], key: str) -> list[dict[str, object]]:
    found = report[key]
    assert isinstance(found, list)
    return found


def test_rewrites_fall_back_whole_after_the_memory_tier_is_lost(mount: TestMount) -> None:
    names = ("truncated", "appended", "renamed-over")
    for name in names:
        path = mount.path / name
        path.write_bytes(b"1" * MB)
        path.chmod(0o640)
        os.setxattr(path, "user.step", b"1")
        os.utime(path, ns=(1, 1_500_000_000_000_000_007))
    mount.flush()
    mount.cli("pause", mount.path)
    (mount.path / "truncated").write_bytes(b"22")
    with (mount.path / "appended").open("ab") as file:
        file.write(b"2" * 100)
    (mount.path / "tmp").write_bytes(b"2")
    (mount.path / "tmp").rename(mount.path / "renamed-over")
    for name in ("truncated", "appended"):
        (mount.path / name).chmod(0o600)
        os.setxattr(mount.path / name, "user.step", b"2")
    report = reboot(mount)
    for name in names:
        path = mount.path / name
        status = path.stat()
        assert path.read_bytes() == b"1" * MB
        assert (status.st_size, status.st_mode & 0o777) == (MB, 0o640)
        assert status.st_mtime_ns == 1_500_000_000_000_000_007
        assert os.getxattr(path, "user.step") == b"1"
    assert entries(report, "rolled_back") == [
        {"path": "truncated", "from_version": 2, "from_size": 2, "to_version": 1, "to_size": MB},
        {"path": "appended", "from_version": 2, "from_size": MB + 100, "to_version": 1, "to_size": MB},
    ]
    assert [entry["path"] for entry in entries(report, "lost")] == ["tmp"]
    assert entries(report, "undone") == [
        {"operation": "replace", "path": "renamed-over", "to": None},
        {"operation": "rename", "path": "tmp", "to": "renamed-over"},
    ]
    (mount.path / "tmp").unlink()
    mount.flush()
    for name in names:
        assert (mount.archive / name).read_bytes() == b"1" * MB


def test_a_checkpoint_deleted_after_its_successor_was_saved_comes_back_with_it_lost(mount: TestMount) -> None:
    """The window that asynchronous saves open: N is in memory only, N-1 deleted."""
    old = mount.path / "step-1"
    old.mkdir()
    (old / "model.pt").write_bytes(b"1" * MB)
    os.setxattr(old / "model.pt", "user.step", b"1")
    mount.flush()
    mount.cli("pause", mount.path)
    (mount.path / "step-2").mkdir()
    (mount.path / "step-2" / "model.pt").write_bytes(b"2" * MB)
    shutil.rmtree(old)
    held = mount.status()["held_deletes"]
    tiers = 1 if mount.nvme is None else 2
    assert held == {"files": 1, "bytes": tiers * MB}
    assert "held deletes: 1 files" in mount.cli("status", mount.path).out
    report = reboot(mount)
    assert (old / "model.pt").read_bytes() == b"1" * MB
    assert os.getxattr(old / "model.pt", "user.step") == b"1"
    assert [entry["path"] for entry in entries(report, "lost")] == ["step-2/model.pt"]
    assert [(entry["operation"], entry["path"]) for entry in entries(report, "undone")] == [
        ("rmdir", "step-1"),
        ("unlink", "step-1/model.pt"),
    ]
    with pytest.raises(OSError, match="Input/output error"):
        (mount.path / "step-2" / "model.pt").read_bytes()
    shutil.rmtree(mount.path / "step-2")
    mount.flush()
    assert (mount.archive / "step-1" / "model.pt").read_bytes() == b"1" * MB
    assert mount.status()["held_deletes"] == {"files": 0, "bytes": 0}


def test_held_deletes_go_once_the_successor_is_durable(mount: TestMount) -> None:
    (mount.path / "1").write_bytes(b"1" * MB)
    mount.flush()
    with paused(mount):
        (mount.path / "2").write_bytes(b"2" * MB)
        free = os.statvfs(mount.path).f_bfree
        (mount.path / "1").unlink()
        tiers = 1 if mount.nvme is None else 2
        assert mount.status()["held_deletes"] == {"files": 1, "bytes": tiers * MB}
        assert os.statvfs(mount.path).f_bfree - free <= MB * 5 // 4 // os.statvfs(mount.path).f_frsize, "memory only"
    mount.flush()
    eventually(lambda: mount.status()["held_deletes"] == {"files": 0, "bytes": 0})
    assert not (mount.archive / "1").exists()
    if mount.nvme is not None:
        files = [path for path in (mount.nvme / "data").rglob("*") if path.is_file()]
        eventually(lambda: len([path for path in files if path.exists()]) == 1)
    die(mount)
    mount.mount()
    assert (mount.path / "2").read_bytes() == b"2" * MB
    assert sorted(os.listdir(mount.path)) == ["2"]


def test_a_pointer_goes_back_with_what_it_points_to(disk_mount: TestMount) -> None:
    """`latest` is on the disk long before the large file that was closed before it."""
    mnt = disk_mount
    (mnt.path / "latest").write_text("step-1")
    mnt.flush()
    mnt.cli("pause", mnt.path)
    (mnt.path / "step-2.pt").write_bytes(os.urandom(MB))
    (mnt.path / "latest").write_text("step-2")
    report = reboot(mnt)
    assert (mnt.path / "latest").read_text() == "step-1"
    assert [entry["path"] for entry in entries(report, "lost")] == ["step-2.pt"]
    assert [entry["path"] for entry in entries(report, "rolled_back")] == ["latest"]
    (mnt.path / "step-2.pt").unlink()


def test_fsck_before_the_mount_foretells_the_recovery(disk_mount: TestMount) -> None:
    for name in ("kept", "rewritten", "deleted"):
        (disk_mount.path / name).write_bytes(b"1" * MB)
    disk_mount.flush()
    disk_mount.cli("pause", disk_mount.path)
    (disk_mount.path / "rewritten").write_bytes(b"2")
    (disk_mount.path / "new").write_bytes(b"2")
    (disk_mount.path / "deleted").unlink()
    die(disk_mount)
    told = disk_mount.cli("fsck", disk_mount.config, check=False)
    foretold = disk_mount.cli("fsck", disk_mount.config, "--json", check=False)
    assert (told.code, foretold.code) == (1, 1), "a file is lost"
    line, last = told.out.splitlines()
    assert "is gone since the last mount (a reboot): at the next mount 1 file is rolled back, 1 file is lost" in line
    assert last == "no other problems found"
    assert not is_mounted(disk_mount.memory)
    report = come_back(disk_mount)
    lines = foretold.json()
    assert isinstance(lines, list)
    assert {(line["severity"], line["path"]) for line in lines[1:]} == {
        (severity, entry["path"])
        for severity, key in (("rolled back", "rolled_back"), ("lost", "lost"), ("undone", "undone"))
        for entry in entries(report, key)
    }
    assert [line["path"] for line in lines if line["severity"] == "undone"] == ["deleted"]
    (disk_mount.path / "new").unlink()


def test_nothing_lost_nothing_reported(disk_mount: TestMount) -> None:
    (disk_mount.path / "f").write_bytes(b"1" * MB)
    disk_mount.flush()
    die(disk_mount)
    assert disk_mount.cli("mount", disk_mount.config, disk_mount.path).out == ""
    assert (disk_mount.path / "f").read_bytes() == b"1" * MB
    assert disk_mount.cli("recover", disk_mount.path, "--json").json() == []
    assert "nothing to report" in disk_mount.cli("recover", disk_mount.config).out
