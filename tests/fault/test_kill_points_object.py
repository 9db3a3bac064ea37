"""The process is killed at each point of a publish to an object store (tierfs.points): the program sees every byte, and
so does any other program that looks at the bucket."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests.fault.killing import LIMIT, NOISE, Points, end, exchange, tree
from tests.mount.conftest import Mounter, eventually
from tests.mount.object_store import credentials, fresh_url, objects, server
from tests.servers import Server
from tierfs.points import At, Point
from tierfs.testing.mounting import TestMount
from tierfs.tiers.objects import ObjectBlobs

__all__ = ["credentials", "server"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs passthrough and a tmpfs of its own")

PUBLISH = [
    (At.DRAIN_COPIED, 1),
    (At.PUBLISH_READY, 2),
    (At.PUBLISH_COPIED, 2),
    (At.PUBLISH_PLANNED, 1),
    (At.PUBLISH_LOGGED, 1),
    (At.PUBLISH_CONTENT, 1),
    (At.PUBLISH_CONTENT, 2),
    (At.PUBLISH_STEPPED, 2),
    (At.PUBLISH_TAKEN, 1),
    (At.PUBLISH_DURABLE, 1),
    (At.PUBLISH_RECORDED, 1),
]

SIZES = {"large": 17 << 20, "small": 5000}


@pytest.fixture(scope="module")
def shared(mounter: Mounter, points: Points, server: Server, credentials: None) -> Iterator[tuple[TestMount, str]]:
    url = fresh_url()
    stored = {"kind": "object", "url": url, "endpoint": server.endpoint}
    with mounter("passthrough", stored=stored, memory="1GiB", allow_log=NOISE) as made:
        yield made, url
        end(made)


@pytest.fixture
def mnt(shared: tuple[TestMount, str]) -> Iterator[TestMount]:
    with shared[0].abort_after(LIMIT):
        yield shared[0]


@pytest.fixture
def bucket(shared: tuple[TestMount, str], server: Server) -> ObjectBlobs:
    return ObjectBlobs.open("archive", shared[1], endpoint=server.endpoint)


@pytest.mark.parametrize(("point", "time"), PUBLISH, ids=lambda value: getattr(value, "name", str(value)))
def test_a_daemon_killed_while_it_publishes_is_not_noticed(
    mnt: TestMount, bucket: ObjectBlobs, points: Points, point: Point, time: int
) -> None:
    top = mnt.path / f"{point.name}-{time}"
    top.mkdir()
    for name in ("large", "small", "moved", "one", "two"):
        (top / name).write_bytes(b"before " + name.encode())
    mnt.flush()
    data = {name: random.Random(f"{point.name}{name}").randbytes(size) for name, size in SIZES.items()}
    points.arm(point, time=time)
    for name, content in data.items():
        (top / name).write_bytes(content)
    (top / "moved").rename(top / "target")
    exchange(top / "one", top / "two")
    for name in data:
        os.setxattr(top / name, "user.tierfs.flush", b"")
    eventually(lambda: points.reached)
    want = {**data, "target": b"before moved", "one": b"before two", "two": b"before one"}
    assert tree(top) == want
    everything = tree(mnt.path)
    assert {name: everything[f"{top.name}/{name}"] for name in want} == want
    eventually(lambda: objects(bucket) == everything)
