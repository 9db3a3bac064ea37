"""The process is killed at every point between two steps (tierfs.points, docs/DURABILITY.md), for every operation: with
the daemon alone gone, or with keeper and daemon gone and the mount made anew, the program sees every byte.

What is left when the memory tier is gone as well: test_kill_points_memory.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fault.killing import Points, bury, end, exchange, remember, tree
from tests.fault.test_kill_points_chunks import COLLECTIONS, COPIES
from tests.fault.test_kill_points_memory import LOSSES, recovered, since
from tests.mount.conftest import eventually
from tierfs.points import POINTS, At, Point
from tierfs.state import CATALOG
from tierfs.testing.mounting import TestMount

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs passthrough and a tmpfs of its own")
LARGE = 72 << 20
"""Above `open_files.GRADUAL`: opened while it is recalled."""


@dataclass
class Work:
    """What a program does in a directory of its own, and what it must find afterwards."""

    mnt: TestMount
    top: Path
    files: dict[str, bytes] = field(default_factory=dict)

    def write(self, name: str, data: bytes, how: str = "wb") -> None:
        (self.top / name).parent.mkdir(exist_ok=True)
        with (self.top / name).open(how) as file:
            file.write(data)
        self.files[name] = self.files.get(name, b"") + data if how == "ab" else data

    def rename(self, old: str, new: str) -> None:
        (self.top / old).rename(self.top / new)
        self.files[new] = self.files.pop(old)

    def exchange(self, one: str, two: str) -> None:
        exchange(self.top / one, self.top / two)
        self.files[one], self.files[two] = self.files[two], self.files[one]

    def unlink(self, name: str) -> None:
        (self.top / name).unlink()
        del self.files[name]

    def chill(self, name: str) -> None:
        """The file is on the archive alone."""
        self.flush()
        for tier in ("memory", "nvme"):
            self.mnt.evict(self.top / name, tier=tier)

    def flush(self) -> None:
        """Everything written here is on the archive. The kernel asks again when the daemon dies meanwhile."""
        for name in self.files:
            os.setxattr(self.top / name, "user.tierfs.flush", b"")


Step = Callable[[Work], None]


def _nothing(work: Work) -> None:
    pass


def _write(work: Work) -> None:
    work.write("new", b"new" * 50_000)


def _written(work: Work) -> None:
    work.write("old", b"1" * 100_000)
    work.flush()


def _rewrite(work: Work) -> None:
    work.write("old", b"22" * 70_000)


def _append(work: Work) -> None:
    work.write("old", b"3" * 7, "ab")


def _rename_over(work: Work) -> None:
    work.write("tmp", b"4" * 30_000)
    work.rename("tmp", "old")


def _exchange(work: Work) -> None:
    work.write("other", b"5")
    work.flush()
    work.exchange("old", "other")


def _delete(work: Work) -> None:
    work.write("next", b"6" * 40_000)
    work.unlink("old")


def _on_disk(work: Work) -> None:
    work.write("file", b"7" * 60_000)


def _cold(work: Work) -> None:
    _written(work)
    work.chill("old")


def _cold_large(work: Work) -> None:
    work.write("large", os.urandom(1 << 20) * (LARGE >> 20))
    work.chill("large")


def _read(work: Work) -> None:
    for name, data in work.files.items():
        assert (work.top / name).read_bytes() == data


def _evict(work: Work) -> None:
    """The command meets the dead daemon; the program does not."""
    work.mnt.cli("evict", work.top / "old", "--from", "nvme", check=False)
    _read(work)


def _kill(work: Work) -> None:
    """With a file open for writing, and one just closed."""
    with (work.top / "open").open("wb") as file:
        file.write(b"8" * 50_000)
        file.flush()
        work.mnt.strike()
        file.write(b"9")
        file.flush()
    work.files["open"] = b"8" * 50_000 + b"9"
    _write(work)


def _restart(work: Work) -> None:
    with (work.top / "open").open("wb", buffering=0) as file:
        file.write(b"8" * 50_000)
        work.mnt.cli("restart", work.mnt.path)
        file.write(b"9")
    work.files["open"] = b"8" * 50_000 + b"9"


@dataclass(frozen=True)
class Case:
    point: Point
    before: Step
    during: Step
    times: int = 1
    folder: str = ""
    """Below the file's directory at the root of the mount, for the rule that applies."""

    def __str__(self) -> str:
        return f"{self.during.__name__.strip('_')}-{self.point.name}-{self.times}"


CASES = [
    *(
        Case(point, _nothing, _write)
        for point in (
            At.CREATE_UNRECORDED,
            At.CREATE_RECORDED,
            At.OPEN_UNANSWERED,
            At.CLOSE_UNRECORDED,
            At.CLOSE_RECORDED,
            At.CATALOG_COMMITTED,
            At.DRAIN_COPIED,
            At.PUBLISH_READY,
            At.DRAIN_NAMED,
            At.DRAIN_RECORDED,
            At.PUBLISH_COPIED,
            At.PUBLISH_PLANNED,
            At.PUBLISH_SYNCED,
            At.PUBLISH_LOGGED,
            At.PUBLISH_CONTENT,
            At.PUBLISH_STEPPED,
            At.PUBLISH_TAKEN,
            At.PUBLISH_DURABLE,
            At.PUBLISH_RECORDED,
        )
    ),
    *(
        Case(point, _written, _rewrite)
        for point in (
            At.REWRITE_UNRECORDED,
            At.REWRITE_RECORDED,
            At.CLOSE_RECORDED,
            At.DRAIN_NAMED,
            At.DRAIN_RECORDED,
            At.REMOVE_SYNCED,
            At.REMOVE_DONE,
            At.PUBLISH_CONTENT,
            At.PUBLISH_DURABLE,
        )
    ),
    *(
        Case(point, _written, _append)
        for point in (At.APPEND_RECORDED, At.CLOSE_UNRECORDED, At.DRAIN_RECORDED)
    ),
    *(
        Case(point, _written, _rename_over, times)
        for point, times in (
            (At.RENAME_UNRECORDED, 1),
            (At.RENAME_RECORDED, 1),
            (At.NAME_FORGOTTEN, 1),
            (At.HELD_RELEASED, 1),
            (At.PUBLISH_STEPPED, 1),
            (At.PUBLISH_DURABLE, 1),
        )
    ),
    *(Case(point, _written, _exchange) for point in (At.RENAME_RECORDED, At.PUBLISH_EXCHANGE)),
    *(
        Case(point, _written, _delete, times)
        for point, times in (
            (At.UNLINK_UNRECORDED, 1),
            (At.UNLINK_RECORDED, 1),
            (At.NAME_FORGOTTEN, 1),
            (At.HELD_RELEASED, 1),
            (At.REMOVE_SYNCED, 1),
            (At.REMOVE_DONE, 1),
            (At.PUBLISH_STEPPED, 2),
            (At.PUBLISH_RECORDED, 1),
        )
    ),
    *(Case(point, _nothing, _on_disk, 1, "ondisk") for point in (At.SETTLE_SYNCED, At.SETTLE_RECORDED)),
    *(Case(point, _cold, _read) for point in (At.RECALL_COPIED, At.RECALL_NAMED, At.RECALL_RECORDED)),
    *(
        Case(point, _cold_large, _read)
        for point in (At.FILL_BEGUN, At.FILL_FETCHED, At.FILL_NAMED, At.FILL_RECORDED)
    ),
    *(Case(point, _written, _evict) for point in (At.EVICT_RECORDED, At.REMOVE_SYNCED)),
    *(
        Case(point, _nothing, during)
        for during in (_kill, _restart)
        for point in (At.RESTART_ADOPTED, At.RESTART_SETTLED, At.RESTART_RESENT)
    ),
]
"""What each operation goes through, at the first pass or a later one."""


def top_of(mnt: TestMount, case: Case) -> Path:
    made = mnt.path / case.folder / str(case) if case.folder else mnt.path / str(case)
    made.mkdir(parents=True)
    return made


def is_on_archive(work: Work) -> bool:
    return tree(work.mnt.archive / work.top.relative_to(work.mnt.path)) == work.files


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_daemon_killed_between_two_steps_is_not_noticed(mnt: TestMount, points: Points, case: Case) -> None:
    work = Work(mnt, top_of(mnt, case))
    case.before(work)
    points.arm(case.point, time=case.times)
    case.during(work)
    if not points.reached:
        work.flush()
    eventually(lambda: points.reached)
    assert tree(work.top) == work.files
    work.flush()
    assert tree(work.top) == work.files
    # A delete in the archive is not what a flush of files waits for.
    eventually(lambda: is_on_archive(work))


@pytest.mark.parametrize(
    "point", [At.ORPHANS_FOUND, At.ORPHANS_REMOVED, At.REPORT_WRITTEN], ids=lambda point: point.name
)
def test_a_daemon_killed_while_it_removes_what_another_left_is_not_noticed(
    mnt: TestMount, points: Points, point: Point
) -> None:
    work = Work(mnt, mnt.path / point.name)
    work.top.mkdir()
    _written(work)
    points.arm(At.EVICT_RECORDED, point)
    _evict(work)
    eventually(lambda: points.reached)
    _read(work)
    end(mnt)
    assert [file.name for file in mnt.state.iterdir() if file.name.startswith(".")] == []


# Keeper and daemon are killed.


ENDS = [
    At.KEEPER_REAPED,
    At.KEEPER_HANDED_OVER,
    At.UMOUNT_DRAINED,
    At.UMOUNT_FOLDED,
    At.COPY_NAMED,
    At.COPY_UNDECLARED,
    At.UMOUNT_KEPT,
]


@pytest.mark.parametrize("point", ENDS, ids=lambda point: point.name)
def test_a_mount_whose_end_was_cut_short_goes_on_from_its_memory(mnt: TestMount, points: Points, point: Point) -> None:
    """The keeper dies, or the daemon when it has no keeper to start another: nothing is lost, nothing to report."""
    work = Work(mnt, mnt.path / point.name)
    work.top.mkdir()
    known = recovered(mnt)
    _written(work)
    remember(mnt)
    if point is At.KEEPER_REAPED or point is At.KEEPER_HANDED_OVER:
        mnt.cli("pause", mnt.path)
    _rewrite(work)
    points.arm(point)
    if point is At.KEEPER_REAPED:
        os.kill(mnt.daemon_pid(), signal.SIGKILL)
    elif point is At.KEEPER_HANDED_OVER:
        mnt.cli("restart", mnt.path, check=False)
    else:
        mnt.cli("umount", mnt.path, check=False)
    eventually(lambda: points.reached)
    bury(mnt)
    mnt.mount()
    assert tree(work.top) == work.files
    work.flush()
    assert is_on_archive(work)
    assert since(mnt, known) == []
    end(mnt)


# A rebuild of the catalog is killed.


REBUILDS = [point for point in POINTS if point.name.startswith("REBUILD")]


@pytest.mark.parametrize("point", REBUILDS, ids=lambda point: point.name)
def test_a_rebuild_that_was_killed_is_done_by_the_next(mnt: TestMount, points: Points, point: Point) -> None:
    work = Work(mnt, mnt.path / point.name)
    work.top.mkdir()
    _written(work)
    _rename_over(work)
    end(mnt)
    for file in mnt.state.glob(f"{CATALOG}*"):
        file.unlink()
    points.arm(point)
    assert mnt.cli("fsck", "--rebuild", mnt.config, check=False).code == -signal.SIGKILL
    assert points.reached
    if point is not At.REBUILD_RENAMED:
        mnt.cli("fsck", "--rebuild", mnt.config)
    mnt.mount()
    assert tree(work.top) == work.files
    end(mnt)


def test_every_point_is_struck() -> None:
    struck = {case.point for case in CASES} | {point for point, _ in LOSSES} | {*ENDS, *REBUILDS}
    struck |= {point for point in POINTS if point.name.startswith(("ROLLBACK", "ORPHANS", "REPORT"))}
    struck |= {*COPIES, *COLLECTIONS}
    assert struck == set(POINTS)
