"""The process is killed at the points that only an archive with layout chunks has (tierfs.points): the program sees
every byte, and so does who restores from the archive alone. And at those of a publish that go another way there."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.killing import LIMIT, NOISE, Points, tree
from tests.mount.conftest import Mounter, eventually
from tierfs.points import At, Point
from tierfs.testing.mounting import TestMount

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs passthrough and a tmpfs of its own")

COPIES = [At.CHUNK_WRITTEN, At.CHUNK_NAMED, At.CHUNKS_SYNCED, At.PUBLISH_READY, At.PUBLISH_CONTENT, At.PUBLISH_RECORDED]
COLLECTIONS = [At.COLLECT_MARKED, At.COLLECT_REMOVED]


@pytest.fixture(scope="module")
def shared(mounter: Mounter, points: Points) -> Iterator[TestMount]:
    stored = {"layout": "chunks", "codec": "lz4"}
    with mounter("passthrough", stored=stored, allow_log=NOISE) as made:
        yield made


@pytest.fixture
def mnt(shared: TestMount) -> Iterator[TestMount]:
    with shared.abort_after(LIMIT):
        yield shared


def flush(top: Path) -> None:
    for path in top.iterdir():
        os.setxattr(path, "user.tierfs.flush", b"")


@pytest.mark.parametrize("point", COPIES, ids=lambda point: point.name)
def test_a_daemon_killed_while_it_stores_chunks_is_not_noticed(
    mnt: TestMount, points: Points, tmp_path: Path, point: Point
) -> None:
    top = mnt.path / point.name
    top.mkdir()
    data = {name: random.Random(f"{point.name}{name}").randbytes(700_000) for name in ("a", "b")}
    (top / "a").write_bytes(b"before")
    flush(top)
    points.arm(point, time=1)
    for name, content in data.items():
        (top / name).write_bytes(content)
    flush(top)
    eventually(lambda: points.reached)
    assert tree(top) == data
    mnt.cli("gc", mnt.config)
    mnt.cli("export", mnt.archive, point.name, tmp_path / "out")
    assert tree(tmp_path / "out") == data


@pytest.mark.parametrize("point", COLLECTIONS, ids=lambda point: point.name)
def test_a_collection_beside_a_mount_that_is_killed_costs_no_file_anything(
    mnt: TestMount, points: Points, tmp_path: Path, point: Point
) -> None:
    top = mnt.path / point.name
    top.mkdir()
    data = {"kept": random.Random(point.name).randbytes(500_000)}
    (top / "kept").write_bytes(data["kept"])
    (top / "gone").write_bytes(random.Random("gone" + point.name).randbytes(3_000_000))
    flush(top)
    (top / "gone").unlink()
    eventually(lambda: not (mnt.archive / point.name / "gone").exists())
    points.arm(point)
    assert mnt.cli("gc", mnt.config, check=False).code == -signal.SIGKILL
    assert points.reached
    assert mnt.cli("gc", mnt.config, "--json").json()["removed"]
    assert mnt.cli("gc", mnt.config, "--json").json()["removed"] == 0
    mnt.cli("export", mnt.archive, point.name, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(top) == data
