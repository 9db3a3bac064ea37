"""A mount whose processes end themselves at a named point (tierfs.points): what the tests of kill points share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter, eventually
from tierfs.control.protocol import MountRecord, mount_directory
from tierfs.fsck import check_all
from tierfs.points import Point
from tierfs.policy.load import load_policy
from tierfs.testing.mounting import TestMount, is_mounted

LIMIT = 120.0
NOISE = [r"(rolled back|lost|undone): ", "ended with code", "daemon .* died", "was killed", "keeper was killed"]
RULES = [{"match": "ondisk/**", "ack": "nvme"}, {"match": "**"}]
_libc = ctypes.CDLL(None, use_errno=True)


class Points:
    """The switches of tests/fault/kills."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._armed: list[Point] = []

    def arm(self, *points: Point, time: int = 1, both: bool = False) -> None:
        """Whoever passes one of these for the ``time``-th time dies, each point once; with ``both`` its parent, too."""
        for left in self._directory.iterdir():
            left.unlink()
        self._armed = list(points)
        for point in points:
            fresh = self._directory / "fresh"
            fresh.write_text(f"{'both' if both else 'daemon'} {time}")
            fresh.rename(self._directory / point.name)

    @property
    def reached(self) -> bool:
        """Whether all were."""
        return all((self._directory / f"reached-{point.name}").exists() for point in self._armed)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Points]:
    directory = tmp_path_factory.mktemp("points")
    with pytest.MonkeyPatch.context() as patch:
        path = [str(Path(__file__).parent / "kills"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        patch.setenv("TIERFS_TEST_POINTS", str(directory))
        yield Points(directory)


@pytest.fixture(scope="module")
def shared(mounter: Mounter, points: Points) -> Iterator[TestMount]:
    """One mount for all points, mounted again where a test had to end it."""
    with mounter("passthrough", rules=RULES, allow_log=NOISE) as made:
        yield made


@pytest.fixture
def mnt(shared: TestMount) -> Iterator[TestMount]:
    if not is_mounted(shared.path):
        shared.mount()
    with shared.abort_after(LIMIT):
        yield shared


def exchange(one: Path, two: Path) -> None:
    if _libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(two), 2):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))


def tree(top: Path) -> dict[str, bytes]:
    """Every file by its path, whole."""
    return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def check(mnt: TestMount) -> None:
    """What fsck says of a mount that ended."""
    assert check_all(load_policy(mnt.config), lambda *_: None) == []


def end(mnt: TestMount) -> None:
    mnt.umount()
    check(mnt)


def remember(mnt: TestMount) -> None:
    """The processes that are about to die."""
    record = MountRecord.read(mount_directory(mnt.path))
    assert record.keeper_pid is not None
    mnt.pids = {record.keeper_pid, record.daemon_pid}


def bury(mnt: TestMount) -> None:
    """Keeper and daemon are dead: the mount goes."""
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in mnt.pids))
    if is_mounted(mnt.path):
        mnt.umount()
    assert not is_mounted(mnt.path)
