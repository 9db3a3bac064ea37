"""The process is killed at every point between two steps (tierfs.points, docs/DURABILITY.md), for every operation.

With the daemon alone gone, or with keeper and daemon gone and the mount made anew, the program sees every byte. With
the memory tier gone as well the tree is a legal older one, and the report of the recovery tells exactly what changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import Mounter, eventually
from tierfs.control.protocol import MountRecord, mount_directory
from tierfs.fsck import check_all
from tierfs.points import POINTS, At, Point
from tierfs.policy.load import load_policy
from tierfs.report import read_reports
from tierfs.state import CATALOG
from tierfs.testing.mounting import TestMount, is_mounted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs passthrough and a tmpfs of its own")
LIMIT = 120.0
NOISE = [r"(rolled back|lost|undone): ", "ended with code", "daemon .* died", "was killed", "keeper was killed"]
RULES = [{"match": "ondisk/**", "ack": "nvme"}, {"match": "**"}]
LARGE = 72 << 20
"""Above `open_files.GRADUAL`: opened while it is recalled."""
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


# The daemon is killed.


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


@pytest.mark.parametrize("point", [At.ORPHANS_FOUND, At.ORPHANS_REMOVED], ids=lambda point: point.name)
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


@pytest.mark.parametrize("point", ENDS, ids=lambda point: point.name)
def test_a_mount_whose_end_was_cut_short_goes_on_from_its_memory(mnt: TestMount, points: Points, point: Point) -> None:
    """The keeper dies, or the daemon when it has no keeper to start another: nothing is lost, nothing to report."""
    work = Work(mnt, mnt.path / point.name)
    work.top.mkdir()
    reports = len(read_reports(mnt.state))
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
    assert [report for report in recovered(mnt)[reports:] if amiss(report)] == []
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


# The memory tier is lost as well.

Seen = dict[str, tuple[str, int] | None]
"""Path → (file, version); None: reading it gives EIO."""


def recovered(mnt: TestMount) -> list[dict[str, Any]]:
    found = mnt.cli("recover", mnt.config, "--json").json()
    assert isinstance(found, list)
    return found


def amiss(report: Mapping[str, Any]) -> bool:
    return bool(report["rolled_back"] or report["lost"] or report["undone"])


@dataclass
class Told:
    """A report, as far as it can be told from what was seen on the mount."""

    lost: set[str] = field(default_factory=set)
    rolled_back: set[tuple[str, int]] = field(default_factory=set)
    undone: set[tuple[str, str, str | None]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.lost or self.rolled_back or self.undone)


def told(report: Mapping[str, Any], top: str) -> Told:
    def short(path: str) -> str:
        return path.removeprefix(f"{top}/")

    return Told(
        {short(entry["path"]) for entry in report["lost"]},
        {(short(entry["path"]), entry["to_size"]) for entry in report["rolled_back"]},
        {
            (entry["operation"], short(entry["path"]), entry["to"] and short(entry["to"]))
            for entry in report["undone"]
        },
    )


def content(file: str, version: int) -> bytes:
    """Of a length of its own for each version, and long enough to be torn."""
    return f"{file} {version}\n".encode() * (5000 + 100 * version)


class InputOutputError(Exception):
    pass


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise (InputOutputError if error.errno == errno.EIO else error) from error


def observe(top: Path) -> Seen:
    seen: Seen = {}
    for path in sorted(top.iterdir()):
        seen[path.name] = None
        with contextlib.suppress(InputOutputError):
            data = read(path)
            file, version = data.partition(b"\n")[0].decode().split()
            assert data == content(file, int(version)), f"{path.name} is torn"
            seen[path.name] = file, int(version)
    return seen



@dataclass
class History:
    """What a program does, and what the tree is after each call. The last one may not have been answered."""

    top: Path
    states: list[Seen]

    def write(self, name: str, version: int) -> None:
        self.states.append({**self.states[-1], name: (name, version)})
        with (self.top / name).open("wb", buffering=0) as file:
            file.write(content(name, version))

    def rename(self, old: str, new: str) -> None:
        expected = dict(self.states[-1])
        expected[new] = expected.pop(old)
        self.states.append(expected)
        (self.top / old).rename(self.top / new)

    def exchange(self, one: str, two: str) -> None:
        now = self.states[-1]
        self.states.append({**now, one: now[two], two: now[one]})
        exchange(self.top / one, self.top / two)

    def unlink(self, name: str) -> None:
        self.states.append({path: entry for path, entry in self.states[-1].items() if path != name})
        (self.top / name).unlink()

    def flush(self) -> None:
        for name in self.states[-1]:
            os.setxattr(self.top / name, "user.tierfs.flush", b"")


BEFORE: Seen = {name: (name, 1) for name in ("a", "b", "kept", "old", "target")}


def play(top: Path) -> History:
    """Until it is done, or the mount is gone."""
    history = History(top, [BEFORE])
    with contextlib.suppress(OSError):
        history.write("kept", 2)
        history.write("new", 1)
        history.write("tmp", 1)
        history.rename("tmp", "target")
        history.unlink("old")
        history.exchange("a", "b")
        history.flush()
    return history


def changes(before: Seen, after: Seen) -> Told:
    """What the report says that makes ``after`` of ``before``."""
    home = {entry[0]: path for path, entry in before.items() if entry}
    told = Told()
    for path, entry in after.items():
        file = entry[0] if entry else path  # one that was lost is where it was made
        was = before[home[file]] if file in home else None
        if entry is None:
            told.lost.add(path)
        elif was and was[1] > entry[1]:
            told.rolled_back.add((path, len(content(*entry))))
        if file not in home:
            told.undone.add(("replace" if path in before else "unlink", path, None))
        elif home[file] != path:
            told.undone.add(("rename", path, home[file]))
    return told


def check_legal(after: Seen, states: list[Seen]) -> None:
    """Whole files, nothing older than what was durable, and nothing that was deleted or replaced is gone while
    something written before that is lost."""
    last = states[-1]
    assert {"a", "b", "kept", "target"} <= after.keys() <= {*BEFORE, "new", "tmp"}
    assert all(after[name] for name in ("a", "b", "kept", "target"))
    assert {after["a"], after["b"]} == {("a", 1), ("b", 1)}
    if after["target"] != ("target", 1):
        assert (after["target"], after["kept"], after["new"]) == (("tmp", 1), ("kept", 2), ("new", 1))
    if "old" not in after or after["a"] != ("a", 1):
        assert after == last or after == states[-2]


LOSSES = [
    *(
        (point, 1)
        for point in POINTS
        if point.name.startswith(("CREATE", "OPEN", "REWRITE", "CLOSE", "RENAME", "UNLINK", "NAME", "DRAIN", "PUBLISH"))
    ),
    *((point, 1) for point in (At.HELD_RELEASED, At.REMOVE_SYNCED, At.REMOVE_DONE, At.CATALOG_COMMITTED)),
    (At.CLOSE_RECORDED, 2),
    (At.PUBLISH_READY, 3),
    (At.DRAIN_NAMED, 2),
    (At.DRAIN_RECORDED, 2),
    (At.DRAIN_RECORDED, 3),
    (At.PUBLISH_STEPPED, 2),
    (At.PUBLISH_STEPPED, 3),
    (At.REMOVE_DONE, 2),
]


def prepare(mnt: TestMount, name: str) -> Path:
    """Files that are durable everywhere, in a directory of the mount."""
    top = mnt.path / name
    top.mkdir()
    for file in BEFORE:
        (top / file).write_bytes(content(file, 1))
    for file in BEFORE:
        os.setxattr(top / file, "user.tierfs.flush", b"")
    remember(mnt)
    return top


def lose_memory(mnt: TestMount) -> None:
    bury(mnt)
    subprocess.run(["umount", mnt.memory], check=True)


def check_recovered(mnt: TestMount, history: History, reports: list[dict[str, Any]]) -> None:
    after = observe(history.top)
    check_legal(after, history.states)
    found = [told(report, history.top.name) for report in reports if amiss(report)]
    assert found in [[changes(state, after)] if changes(state, after) else [] for state in history.states[-2:]]
    for path, entry in after.items():
        if entry is None:
            (history.top / path).unlink()
    mnt.flush()
    expected = {path: content(*entry) for path, entry in after.items() if entry}
    assert tree(history.top) == tree(mnt.archive / history.top.name) == expected
    end(mnt)


def is_slow(point: Point, time: int) -> bool:
    """Not much differs from another one."""
    return time > 1 or point.name.startswith(("OPEN", "CREATE", "REWRITE"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("point", "time"),
    [
        pytest.param(point, time, marks=[pytest.mark.slow] if is_slow(point, time) else [], id=f"{point.name}-{time}")
        for point, time in LOSSES
    ],
)
def test_the_memory_tier_lost_at_any_step_leaves_a_legal_older_tree(
    mnt: TestMount, points: Points, point: Point, time: int
) -> None:
    top = prepare(mnt, f"lost-{point.name}-{time}")
    reports = len(read_reports(mnt.state))
    points.arm(point, time=time, both=True)
    history = play(top)
    eventually(lambda: points.reached)
    lose_memory(mnt)
    mnt.mount()
    check_recovered(mnt, history, recovered(mnt)[reports:])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "point", [At.ROLLBACK_BEGUN, At.ROLLBACK_REPORTED, At.ROLLBACK_COMMITTED], ids=lambda point: point.name
)
def test_a_recovery_that_was_killed_is_done_by_the_next_mount(mnt: TestMount, points: Points, point: Point) -> None:
    top = prepare(mnt, f"twice-{point.name}")
    reports = len(read_reports(mnt.state))
    mnt.cli("pause", mnt.path)  # so that there is something to take back
    points.arm(At.UNLINK_RECORDED, both=True)
    history = play(top)
    eventually(lambda: points.reached)
    lose_memory(mnt)
    points.arm(point)
    assert mnt.cli("mount", mnt.config, mnt.path, check=False).code != 0
    assert points.reached
    mnt.mount()
    found = [report for report in recovered(mnt)[reports:] if amiss(report)]
    if point is At.ROLLBACK_REPORTED:  # it was told before it was done, and then again
        assert len(found) == 2
        assert told(found[0], top.name) == told(found[1], top.name)
    check_recovered(mnt, history, found[-1:])


def test_every_point_is_struck() -> None:
    struck = {case.point for case in CASES} | {point for point, _ in LOSSES} | {*ENDS, *REBUILDS}
    struck |= {point for point in POINTS if point.name.startswith(("ROLLBACK", "ORPHANS"))}
    assert struck == set(POINTS)
