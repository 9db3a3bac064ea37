"""Real filesystems of a small size for tests: loop-mounted images. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def can_mount_loops(*tools: str) -> bool:
    """Whether this process can make and mount images with these mkfs tools."""
    return os.geteuid() == 0 and os.path.exists("/dev/loop-control") and all(map(shutil.which, tools))


@contextlib.contextmanager
def loop_disk(tmp: Path, fstype: str, size: int) -> Iterator[Path]:
    """A fresh ``fstype`` (ext4, xfs, …) of ``size`` bytes mounted below ``tmp``: its mountpoint. xfs needs 300 MiB."""
    tmp.mkdir(parents=True, exist_ok=True)
    image, mountpoint = tmp / f"{fstype}.img", tmp / fstype
    mountpoint.mkdir()
    with open(image, "wb") as file:
        file.truncate(size)
    force = "-f" if fstype in ("xfs", "btrfs") else "-F"
    try:
        subprocess.run([f"mkfs.{fstype}", "-q", force, image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, mountpoint], check=True, capture_output=True)
        try:
            yield mountpoint
        finally:
            _unmount(mountpoint)
    finally:
        image.unlink()
        mountpoint.rmdir()


@pytest.fixture(scope="module", params=["tmpfs", "ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on each kind of filesystem; tests/unit/conftest.py offers it to the tests there."""
    if request.param == "tmpfs":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)
    elif not can_mount_loops(f"mkfs.{request.param}"):
        pytest.skip("needs root and mkfs")
    else:
        size = {"ext4": 64 << 20, "xfs": 320 << 20}[request.param]
        with loop_disk(tmp_path_factory.mktemp("loop"), request.param, size) as mountpoint:
            yield mountpoint


def fill(fd: int) -> None:
    """Append to an open file until its filesystem refuses. Raises OSError: ENOSPC, always."""
    while True:
        os.write(fd, bytes(1 << 20))


def _unmount(mountpoint: Path) -> None:
    for _ in range(20):
        if subprocess.run(["umount", mountpoint], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "-l", mountpoint], check=True)
