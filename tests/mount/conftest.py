"""Mounts for the tests of this directory: both modes, tiers on loop-mounted ext4 where that is allowed."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tierfs.testing.mounting import TestMount, mounted

MODES = ("passthrough", "userspace")
TEST_LIMIT = 150.0
"""Seconds until a mount that hangs is aborted, so that the test fails and the run goes on."""


@dataclass(frozen=True)
class Disks:
    nvme: Path
    archive: Path


def passthrough_obstacle() -> str | None:
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if os.geteuid() != 0:
        return "needs root"
    return None if version >= (6, 9) else "needs Linux 6.9"


def eventually(holds: Callable[[], object], otherwise: str = "waited in vain", *, seconds: float = 30.0) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def need_mode(mode: str) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    if mode == "passthrough" and (obstacle := passthrough_obstacle()):
        pytest.skip(obstacle)


def make_base(prefix: str) -> Path:
    """A directory that other users can reach (pytest's own is 0700) on a real disk (/tmp may be a tmpfs)."""
    base = Path(tempfile.mkdtemp(prefix=prefix, dir="/var/tmp"))
    base.chmod(0o755)
    return base


@contextlib.contextmanager
def loop_disk(directory: Path, name: str, size: int) -> Iterator[Path]:
    """An ext4 of its own in a sparse file, or a plain directory where loop devices are not to be had."""
    where = directory / name
    where.mkdir()
    image = directory / f"{name}.img"
    image.touch()
    os.truncate(image, size)
    made = False
    if os.geteuid() == 0 and shutil.which("mkfs.ext4", path="/sbin:/usr/sbin:/bin:/usr/bin"):
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m0", image], check=True, stdin=subprocess.DEVNULL)
        made = subprocess.run(["mount", "-o", "loop", image, where], capture_output=True).returncode == 0
    try:
        yield where
    finally:
        if made:
            subprocess.run(["umount", "-l", where], check=False)
        image.unlink()


@pytest.fixture(scope="session")
def disks() -> Iterator[Disks]:
    base = make_base("tierfs-disks-")
    try:
        with loop_disk(base, "nvme", 6 << 30) as nvme, loop_disk(base, "archive", 8 << 30) as archive:
            yield Disks(nvme, archive)
    finally:
        shutil.rmtree(base, ignore_errors=True)


Mounter = Callable[..., contextlib.AbstractContextManager[TestMount]]


@pytest.fixture(scope="session")
def mounter(disks: Disks) -> Mounter:
    """``mounter(mode, **options of mounted)``: a fresh mount with fresh directories on the disks."""

    @contextlib.contextmanager
    def mount(mode: str, **options: object) -> Iterator[TestMount]:
        need_mode(mode)
        base = make_base("tierfs-test-")
        nvme = options.pop("nvme", disks.nvme / base.name)
        archive = disks.archive / base.name
        try:
            with mounted(base, mode=mode, nvme=nvme, archive=archive, **options) as made:
                yield made
        finally:
            for path in (base, nvme, archive):
                if path is not None:
                    shutil.rmtree(path, ignore_errors=True)

    return mount


@pytest.fixture(params=MODES)
def mnt(request: pytest.FixtureRequest, mounter: Mounter) -> Iterator[TestMount]:
    """A mount of its own, in both modes."""
    with mounter(request.param) as mount, mount.abort_after(TEST_LIMIT):
        yield mount


@pytest.fixture
def passthrough_mnt(mounter: Mounter) -> Iterator[TestMount]:
    """A mount of its own that survives its daemon, whose death is no warning."""
    with mounter("passthrough") as mount, mount.abort_after(TEST_LIMIT):
        yield mount


PAUSES = pytest.StashKey[dict[str, list[float]]]()


@pytest.fixture
def pauses(request: pytest.FixtureRequest) -> list[float]:
    """Seconds that operations took which met a dead daemon; the summary of the run shows them."""
    return request.config.stash.setdefault(PAUSES, {}).setdefault(request.node.name, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, taken in config.stash.get(PAUSES, {}).items():
        if taken:
            median, longest = statistics.median(taken), max(taken)
            terminalreporter.write_line(
                f"{name}: {len(taken)} kills of the daemon, the next operation took {median:.3f} s (median), "
                f"{longest:.3f} s (longest)"
            )


@pytest.fixture(scope="module", params=MODES)
def shared_mnt(request: pytest.FixtureRequest, mounter: Mounter) -> Iterator[TestMount]:
    """One mount for all tests of a module and mode, for tests that keep to a directory of their own."""
    with mounter(request.param, memory="2GiB") as mount:
        yield mount


@pytest.fixture
def here(shared_mnt: TestMount) -> Iterator[Path]:
    """An empty directory on the shared mount."""
    with shared_mnt.abort_after(TEST_LIMIT):
        path = Path(tempfile.mkdtemp(prefix="test-", dir=shared_mnt.path))
        path.chmod(0o755)
        yield path
        shutil.rmtree(path)
