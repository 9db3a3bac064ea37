"""mount/ on a real mount: what systemd and mount(8) do with it; a daemon that does not answer."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tierfs
from tests.mount.conftest import MODES, Mounter, eventually
from tierfs.testing.mounting import TestMount, is_mounted

HELPER = Path(__file__).parents[2] / "mount" / "mount.tierfs"


@pytest.mark.parametrize("mode", MODES)
def test_the_service_says_that_it_is_ready_and_ends_when_told(mounter: Mounter, mode: str, tmp_path: Path) -> None:
    """Type=notify, NotifyAccess=main, SIGTERM."""
    with mounter(mode) as mnt, mnt.abort_after(90):
        mnt.umount()
        address = tmp_path / "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            systemd.settimeout(30)
            systemd.bind(str(address))
            command = [sys.executable, "-m", "tierfs", "mount", "--foreground", mnt.config, mnt.path]
            environ = {**os.environ, "NOTIFY_SOCKET": str(address)}
            with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, env=environ, stderr=log) as service:
                try:
                    message, ancillary, _, _ = systemd.recvmsg(100, socket.CMSG_SPACE(12))
                    assert message == b"READY=1"
                    assert struct.unpack("iII", ancillary[0][2])[0] == service.pid, "NotifyAccess=main ignores others"
                    (mnt.path / "model.pt").write_bytes(b"m" * (5 << 20))
                    service.send_signal(signal.SIGTERM)
                    assert service.wait(60) == 0
                finally:
                    service.kill()
        assert not is_mounted(mnt.path)
        assert (mnt.archive / "model.pt").stat().st_size == 5 << 20
        assert b"Traceback" not in (tmp_path / "log").read_bytes()


def test_a_mount_goes_on_without_its_keeper(mounter: Mounter) -> None:
    """Also what systemd's Restart=on-failure needs: ExecStop ends the mount, the next start finds its place free."""
    with mounter("passthrough", allow_log=["keeper"]) as mnt, mnt.abort_after(90):
        (mnt.path / "before.pt").write_bytes(b"m" * (1 << 20))
        with (mnt.path / "open.pt").open("wb", buffering=0) as file:
            keeper = mnt.status()["keeper_pid"]
            assert isinstance(keeper, int)
            os.kill(keeper, signal.SIGKILL)
            file.write(b"after")
            (mnt.path / "later.pt").write_bytes(b"later")
        eventually(lambda: "the keeper was killed" in mnt.log)
        assert mnt.status()["keeper_pid"] is None
        refused = mnt.cli("restart", mnt.path, check=False)
        assert (refused.code, refused.err.count("keeper of this mount was killed")) == (2, 1)
        mnt.cli("umount", mnt.config)
        assert not is_mounted(mnt.path)
        assert (mnt.archive / "later.pt").read_bytes() == b"later"
        mnt.mount()
        assert (mnt.path / "before.pt").read_bytes() == b"m" * (1 << 20)
        assert (mnt.path / "open.pt").read_bytes() == b"after"


def test_a_daemon_told_to_end_without_its_keeper_unmounts_itself(mounter: Mounter) -> None:
    with mounter("passthrough", allow_log=["keeper"]) as mnt, mnt.abort_after(90):
        (mnt.path / "file").write_bytes(b"bytes")
        status = mnt.status()
        keeper, daemon = status["keeper_pid"], status["daemon_pid"]
        assert isinstance(keeper, int)
        assert isinstance(daemon, int)
        os.kill(keeper, signal.SIGKILL)
        os.kill(daemon, signal.SIGTERM)
        eventually(lambda: not is_mounted(mnt.path))
        eventually(lambda: not Path(f"/proc/{daemon}").exists())
        assert (mnt.archive / "file").read_bytes() == b"bytes"


NAMESPACE = """\
set -eu
mount -t overlay none -o lowerdir="$1/sbin:/usr/sbin" /usr/sbin
mount -t overlay none -o lowerdir="$1/bin:/usr/local/bin" /usr/local/bin
mount -T "$1/fstab" "$2"
echo written >"$2/file"
grep -q "fuse.tierfs" /proc/mounts
"$1/bin/tierfs" umount "$2"
! grep -q " $2 fuse.tierfs" /proc/mounts
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root")
@pytest.mark.parametrize("mode", MODES)
def test_a_line_in_fstab_mounts(mounter: Mounter, mode: str, tmp_path: Path) -> None:
    """As mount(8) does it, with the helper installed; in a mount namespace of its own."""
    with mounter(mode) as mnt:
        mnt.umount()
        for name in ("bin", "sbin"):
            (tmp_path / name).mkdir()
        program = tmp_path / "bin" / "tierfs"
        # mount(8) passes no environment on
        package = Path(tierfs.__file__).parents[1]
        program.write_text(f'#!/bin/sh\nPYTHONPATH={package} exec {sys.executable} -m tierfs "$@"\n')
        program.chmod(0o755)
        shutil.copy(HELPER, tmp_path / "sbin" / "mount.tierfs")
        (tmp_path / "fstab").write_text(f"{mnt.config} {mnt.path} tierfs defaults,nofail,_netdev 0 0\n")
        script = ["unshare", "-m", "sh", "-c", NAMESPACE, "fstab", tmp_path, mnt.path]
        done = subprocess.run(script, capture_output=True, text=True, timeout=90)
        if "overlay" in done.stderr:
            pytest.skip(f"no overlay to install the helper with: {done.stderr}")
        assert (done.returncode, done.stderr) == (0, "")
        assert (mnt.archive / "file").read_text() == "written\n"


def test_what_asks_a_stopped_daemon_ends_with_one_clear_message(mnt: TestMount) -> None:
    mnt.allow_log = [r"tier \w+ does not answer"]  # the time that it was stopped looks to it as if a tier took it
    path = mnt.path / "file"
    path.write_bytes(b"x")
    pid = mnt.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        for arguments in (["status", mnt.path], ["info", path], ["resume", mnt.path]):
            started = time.monotonic()
            answer = mnt.cli(*arguments, check=False, timeout=40)
            assert answer.code == 1, answer
            assert f"kill -CONT {pid}" in answer.err
            assert answer.err.count("\n") == 1
            assert time.monotonic() - started < 30
    finally:
        os.kill(pid, signal.SIGCONT)
    mnt.info(path)
