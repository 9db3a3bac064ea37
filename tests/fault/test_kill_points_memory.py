"""Keeper and daemon are killed at a point between two steps, and the memory tier is lost with them: the tree is a legal
older one, and the report of the recovery tells exactly what changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fault.killing import Points, bury, end, exchange, remember, tree
from tests.mount.conftest import eventually
from tierfs.points import POINTS, At, Point
from tierfs.testing.mounting import TestMount

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs passthrough and a tmpfs of its own")

Seen = dict[str, tuple[str, int] | None]
"""Path → (file, version); None: reading it gives EIO."""


def recovered(mnt: TestMount) -> list[dict[str, Any]]:
    found = mnt.cli("recover", mnt.config, "--json").json()
    assert isinstance(found, list)
    return found


def since(mnt: TestMount, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports that came after ``known``; the oldest are given up as new ones come."""
    return [report for report in recovered(mnt) if report not in known and amiss(report)]


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
    found = [told(report, history.top.name) for report in reports]
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
    known = recovered(mnt)
    points.arm(point, time=time, both=True)
    history = play(top)
    eventually(lambda: points.reached)
    lose_memory(mnt)
    mnt.mount()
    check_recovered(mnt, history, since(mnt, known))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "point", [At.ROLLBACK_BEGUN, At.ROLLBACK_REPORTED, At.ROLLBACK_COMMITTED], ids=lambda point: point.name
)
def test_a_recovery_that_was_killed_is_done_by_the_next_mount(mnt: TestMount, points: Points, point: Point) -> None:
    top = prepare(mnt, f"twice-{point.name}")
    known = recovered(mnt)
    mnt.cli("pause", mnt.path)  # so that there is something to take back
    points.arm(At.UNLINK_RECORDED, both=True)
    history = play(top)
    eventually(lambda: points.reached)
    lose_memory(mnt)
    points.arm(point)
    assert mnt.cli("mount", mnt.config, mnt.path, check=False).code != 0
    assert points.reached
    mnt.mount()
    found = since(mnt, known)
    if point is At.ROLLBACK_REPORTED:  # it was told before it was done, and then again
        assert len(found) == 2
        assert told(found[0], top.name) == told(found[1], top.name)
    check_recovered(mnt, history, found[-1:])
