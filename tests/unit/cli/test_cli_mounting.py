"""mount and umount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.cli.talking import Capture, FakeDaemon, fake_run_mount, run
from tierfs.cli import mounting
from tierfs.control.protocol import list_mounts, mount_table
from tierfs.errors import MountError, NotDurableInTime, UsageError


def test_mount_in_the_background(
    config: Path, mnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def body(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
        os.write(1, f"fake daemon of {mountpoint} {config_path}, session {os.getsid(0) != session}".encode())
        os.write(ready_fd, b"ok\n")
        return 0

    session = os.getsid(0)
    fake_run_mount(monkeypatch, body)
    assert run("mount", config) == 0
    assert capsys.readouterr().err == ""
    assert f"fake daemon of {mnt} {config}, session True" in (tmp_path / "state/tierfs.log").read_text()


def test_mount_tells_the_daemons_error(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def refuse(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
        os.write(ready_fd, b'{"message": "no /dev/fuse", "exit_code": 1}\n')
        return 1

    def vanish(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
        raise ZeroDivisionError

    fake_run_mount(monkeypatch, refuse)
    assert run("mount", config) == 1
    assert capsys.readouterr().err == "tierfs: no /dev/fuse\n"
    fake_run_mount(monkeypatch, vanish)
    assert run("mount", config) == 1
    assert "tierfs.log" in capsys.readouterr().err


def test_mount_in_the_foreground_notifies_systemd(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(5)
        name = f"tierfs-test-{os.getpid()}"
        systemd.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)

        def body(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
            os.write(ready_fd, b"ok\n")
            os.close(ready_fd)
            assert systemd.recv(100) == b"READY=1"
            return 5

        fake_run_mount(monkeypatch, body)
        assert run("mount", "--foreground", config) == 5


def test_mountpoint_checks(config: Path, mnt: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run("mount", config, tmp_path / "none") == 2
    assert "does not exist" in capsys.readouterr().err
    assert run("mount", config, config) == 2
    assert "not a directory" in capsys.readouterr().err
    (mnt / "file").write_text("")
    assert run("mount", config) == 2
    assert "not empty" in capsys.readouterr().err


def test_mounting_twice_is_refused(daemon: FakeDaemon, config: Path, capsys: Capture) -> None:
    assert run("mount", config) == 2
    assert "already mounted" in capsys.readouterr().err


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, mnt: Path) -> list[str]:
    """Unmounting is noted here and ends the processes, as far as the command can see."""
    unmounted: list[str] = []
    monkeypatch.setattr(mounting, "mount_table", lambda: {str(mnt): "fuse.tierfs"})
    monkeypatch.setattr(mounting, "unmount", unmounted.append)
    monkeypatch.setattr(mounting, "pid_alive", lambda pid: not unmounted)
    return unmounted


def test_umount_drains_first(daemon: FakeDaemon, mnt: Path, ended: list[str]) -> None:
    assert run("umount", mnt, "--timeout", "1m") == 0
    assert daemon.calls == [("flush", {"path": "", "timeout": 60.0}), ("detach", {"drain": True})]
    assert ended == [str(mnt)]
    assert list_mounts() == []


def test_umount_by_config_without_draining(daemon: FakeDaemon, config: Path, mnt: Path, ended: list[str]) -> None:
    assert run("umount", config, "--no-drain") == 0
    assert daemon.calls == [("detach", {"drain": False})]
    assert ended == [str(mnt)]


def test_umount_that_cannot_drain_stays_mounted(
    daemon: FakeDaemon, mnt: Path, ended: list[str], capsys: Capture
) -> None:
    daemon.answers["flush"] = NotDurableInTime("missing: a.pt")
    assert run("umount", mnt, "--timeout", "1s") == 3
    assert "stays mounted: missing: a.pt" in capsys.readouterr().err
    daemon.answers["flush"] = UsageError("odd")
    assert run("umount", mnt) == 2
    assert ended == []


def test_processes_using(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        try:
            assert f"sleep ({process.pid})" in mounting.processes_using(str(tmp_path))
            assert mounting.processes_using(str(tmp_path) + "x") == []
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="fusermount3 says it in other words")
def test_unmount_of_what_is_not_mounted(mnt: Path, capsys: Capture) -> None:
    assert str(mnt) not in mount_table()
    with pytest.raises(MountError, match="cannot unmount"):
        mounting.unmount(str(mnt))
