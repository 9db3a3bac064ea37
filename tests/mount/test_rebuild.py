"""The state directory is gone, or its catalog damaged: fsck --rebuild, mount, and every file is there bit for bit."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.mount.conftest import MODES, Mounter, eventually
from tests.mount.test_semantics import limited
from tierfs.report import REBUILD
from tierfs.state import CATALOG
from tierfs.testing.mounting import TestMount, is_mounted

MB = 1 << 20
REFUSED = [r"belong to another state directory", r"before the mount was ready", r"make another from the tiers"]
"""What a mount says that is refused for want of its catalog."""


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill(top: Path) -> None:
    odd = Path(os.fsdecode(b"na\xff\xfeme"))
    (top / "run" / "step-1").mkdir(parents=True)
    (top / "run" / "step-1" / "model.pt").write_bytes(os.urandom(9 * MB + 17))
    (top / "run" / odd).write_bytes(b"not UTF-8")
    (top / "run" / "empty").touch()
    with (top / "run" / "sparse").open("wb") as file:
        file.seek(200 * MB)
        file.write(b"end")
    (top / "best.pt").hardlink_to(top / "run" / "step-1" / "model.pt")
    (top / "run" / "latest").symlink_to("step-1/model.pt")
    os.mkfifo(top / "run" / "fifo", 0o620)
    os.setxattr(top / "run" / odd, "user.key", b"\x00\xff")
    os.setxattr(top / "run" / odd, "user.large", b"v" * 3500)
    os.setxattr(top / "run", "user.directory", b"1")
    (top / "run" / "step-1" / "model.pt").chmod(0o640)
    if os.geteuid() == 0:
        os.chown(top / "run" / odd, 12, 34)
    os.utime(top / "run" / odd, ns=(1, 1_234_567_890_123_456_789))


def look(top: Path) -> dict[str, object]:
    """All that a program sees, by path."""
    found: dict[str, object] = {}
    for directory, directories, files in os.walk(os.fsencode(top)):
        for name in directories + files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            entry: list[object] = [status.st_mode, status.st_uid, status.st_gid]
            if kind != stat.S_IFDIR:
                entry += [status.st_size, status.st_mtime_ns, status.st_nlink, status.st_blocks * 512 < 100 * MB]
            if kind == stat.S_IFLNK:
                entry.append(os.readlink(path))
            else:
                entry.append({key: os.getxattr(path, key) for key in os.listxattr(path) if kind != stat.S_IFIFO})
            if kind == stat.S_IFREG:
                with open(path, "rb") as file:
                    entry.append(hashlib.file_digest(file, "blake2b").hexdigest())
            found[os.path.relpath(os.fsdecode(path), top)] = entry
    return found


def lose_machine(mnt: TestMount, *tiers: Path | None) -> None:
    """Nothing is left of the state directory, its memory tier and these tiers."""
    if is_mounted(mnt.memory):
        subprocess.run(["umount", "-l", mnt.memory], check=True)
    for path in (mnt.state, *tiers):
        assert path is not None
        shutil.rmtree(path)


def rebuild(mnt: TestMount) -> dict[str, object]:
    report = mnt.cli("fsck", "--rebuild", mnt.config, "--json").json()
    assert report["problems"] == []
    mnt.mount()
    return report


@pytest.mark.parametrize("copies", [True, False], ids=["copy", "tiers alone"])
@pytest.mark.parametrize("new_machine", [False, True], ids=["state lost", "archive alone"])
def test_everything_is_there_after_the_state_directory_is_gone(
    mounter: Mounter, mode: str, copies: bool, new_machine: bool
) -> None:
    with limited(mounter, mode, allow_log=REFUSED) as mnt:
        fill(mnt.path)
        before = look(mnt.path)
        mnt.umount()
        lose_machine(mnt, *([mnt.nvme] if new_machine else []))
        if new_machine:
            assert mnt.nvme is not None
            mnt.nvme.mkdir()
        if not copies:
            shutil.rmtree(mnt.archive / ".tierfs" / "catalog")
        refused = mnt.cli("mount", mnt.config, mnt.path, check=False)
        assert refused.code != 0
        assert "fsck --rebuild" in refused.err
        report = rebuild(mnt)
        assert (report["copy"] is not None) == copies
        assert look(mnt.path) == before
        (mnt.path / "run" / "new").write_bytes(b"goes on")
        mnt.flush()
        assert (mnt.archive / "run" / "new").read_bytes() == b"goes on"


def test_after_a_crash_what_was_durable_is_there(mounter: Mounter, mode: str) -> None:
    """Keeper and daemon are killed, state and memory are gone: what was on nvme or the archive comes back, with its
    name, although no copy of the catalog was made."""
    with limited(mounter, mode) as mnt:
        fill(mnt.path)
        mnt.flush()
        mnt.cli("flush", mnt.path / "run", "--to", "nvme")
        (mnt.path / "run" / "step-2").mkdir()
        (mnt.path / "run" / "step-2" / "model.pt").write_bytes(b"2" * MB)
        (mnt.path / "run" / "step-1").rename(mnt.path / "run" / "step-one")
        mnt.flush()
        before = look(mnt.path)
        for key in ("keeper_pid", "daemon_pid"):
            if isinstance(pid := mnt.status().get(key), int):
                os.kill(pid, signal.SIGKILL)
                break
        subprocess.run(["umount", "-l", mnt.path], check=True)
        eventually(lambda: "in use" not in mnt.cli("fsck", mnt.config, check=False).err)
        lose_machine(mnt)
        rebuild(mnt)
        assert look(mnt.path) == before


def test_a_catalog_damaged_after_a_clean_umount_is_restored_at_the_mount(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, allow_log=[r"restored from the archive as it was closed"]) as mnt:
        fill(mnt.path)
        before = look(mnt.path)
        mnt.umount()
        (mnt.state / CATALOG).write_bytes(b"garbage" * 1000)
        mnt.mount()
        assert look(mnt.path) == before
        assert "restored from the archive" in mnt.log
        assert (mnt.state / "catalog.damaged-1" / CATALOG).read_bytes().startswith(b"garbage")


def test_a_damaged_catalog_is_refused_with_the_command_that_rebuilds_it(mounter: Mounter, mode: str) -> None:
    """Where the copy on the archive is not certainly the catalog, the mount decides nothing."""
    with limited(mounter, mode, allow_log=[r"catalog .* not a database", *REFUSED]) as mnt:
        fill(mnt.path)
        before = look(mnt.path)
        mnt.umount()
        (mnt.archive / ".tierfs" / "catalog" / "clean").unlink()
        (mnt.state / CATALOG).write_bytes(b"garbage" * 1000)
        for command in (("mount", mnt.config, mnt.path), ("fsck", mnt.config), ("fsck", "--repair", mnt.config)):
            refused = mnt.cli(*command, check=False)
            assert refused.code == 1
            assert f"tierfs fsck --rebuild {mnt.config}" in refused.err
        report = rebuild(mnt)
        assert look(mnt.path) == before
        assert Path(str(report["kept_aside"]), CATALOG).read_bytes().startswith(b"garbage")
        assert (mnt.state / REBUILD).exists()
        mounted = mnt.cli("fsck", "--rebuild", mnt.config, check=False)
        assert mounted.code == 2
        assert "umount" in mounted.err


def test_fsck_repair_mends_what_fsck_finds(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode) as mnt:
        fill(mnt.path)
        before = look(mnt.path)
        mnt.umount()
        assert mnt.nvme is not None
        replicas = [path for path in (mnt.nvme / "data").rglob("*-*") if path.is_file()]
        max(replicas, key=lambda path: path.stat().st_size if path.stat().st_blocks > 100 else 0).unlink()
        (mnt.archive / "run" / "latest").unlink()
        assert mnt.cli("fsck", mnt.config, check=False).code == 1
        text = mnt.cli("fsck", "--repair", mnt.config).out
        assert "replaced the missing replica on nvme" in text
        assert "no problems left" in text
        assert mnt.cli("fsck", "--data", mnt.config).out == "no problems found\n"
        mnt.mount()
        assert look(mnt.path) == before
        mnt.flush()
        eventually(lambda: (mnt.archive / "run" / "latest").is_symlink())


def test_an_older_copy_of_the_archive_is_refused_at_the_mount(mnt: TestMount) -> None:
    """A backup mounted at the archive's path has its marker."""
    mnt.allow_log = [r"older copy of the archive", r"ended with code 1 before the mount was ready"]
    (mnt.path / "first.pt").write_bytes(b"1" * MB)
    mnt.flush()
    aside, backup = mnt.archive.with_name(mnt.archive.name + "-aside"), mnt.archive.with_name(mnt.archive.name + "-old")
    shutil.copytree(mnt.archive, backup, symlinks=True)
    (mnt.path / "second.pt").write_bytes(b"2" * MB)
    mnt.umount()
    mnt.archive.rename(aside)
    backup.rename(mnt.archive)
    refused = mnt.cli("mount", mnt.config, mnt.path, check=False)
    checked = mnt.cli("fsck", mnt.config, check=False)
    shutil.rmtree(mnt.archive)
    aside.rename(mnt.archive)
    assert refused.code == checked.code == 1
    assert "Mount the archive itself" in refused.err
    assert "older copy of the archive" in checked.out
    mnt.mount()
    assert (mnt.path / "second.pt").read_bytes() == b"2" * MB
