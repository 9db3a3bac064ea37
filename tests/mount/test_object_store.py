"""An archive in an object store below a real mount: checkpoints go there as plain objects, and come back whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.mount.conftest import MODES, TEST_LIMIT, Mounter
from tests.mount.object_store import credentials, fresh_url, objects, server
from tests.mount.test_archive import tree
from tests.servers import Asked, Reply, Server, between, s3_error
from tierfs.testing.mounting import TestMount
from tierfs.tiers.objects import ObjectBlobs

__all__ = ["credentials", "server"]

Stored = Callable[..., contextlib.AbstractContextManager[TestMount]]


@pytest.fixture
def url(credentials: None) -> str:
    return fresh_url()


@pytest.fixture
def bucket(url: str, server: Server) -> ObjectBlobs:
    """What any other program sees there."""
    return ObjectBlobs.open("archive", url, endpoint=server.endpoint)


@pytest.fixture
def stored(mounter: Mounter, url: str, server: Server) -> Stored:
    """A mount whose archive is in the object store; what `mounted` takes."""

    @contextlib.contextmanager
    def mount(mode: str = "passthrough", **options: object) -> Iterator[TestMount]:
        endpoint = options.pop("endpoint", server.endpoint)
        archive = {"kind": "object", "url": url, "endpoint": endpoint}
        with mounter(mode, stored=archive, **options) as made, made.abort_after(TEST_LIMIT):
            yield made

    return mount


def chill(mnt: TestMount, *paths: Path) -> None:
    """The files are on the archive alone."""
    mnt.flush()
    mnt.evict(*paths)
    if mnt.nvme is not None:
        mnt.evict(*paths, tier="nvme")
    for path in paths:
        replicas = mnt.info(path)["replicas"]
        assert isinstance(replicas, list)
        assert [replica["tier"] for replica in replicas] == ["archive"]


def files(mnt: TestMount) -> dict[str, bytes]:
    return {str(path.relative_to(mnt.path)): path.read_bytes() for path in mnt.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_goes_to_the_store_as_it_is_and_comes_back_bit_for_bit(
    stored: Stored, bucket: ObjectBlobs, mode: str
) -> None:
    state = {f"layer.{n}": torch.randn(1024, 1024) for n in range(6)}
    with stored(mode) as mnt:
        mnt.cli("check", mnt.config)
        step = mnt.path / "step-1"
        step.mkdir()
        torch.save(state, step / "model.pt")
        torch.save({"step": 1}, step / "trainer.pt")
        want = files(mnt)
        assert len(want["step-1/model.pt"]) > 16 << 20
        chill(mnt, step / "model.pt", step / "trainer.pt")
        assert objects(bucket) == want
        loaded = torch.load(step / "model.pt")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
        assert files(mnt) == want


def test_renames_links_and_deletes_follow_and_are_restored_from_the_store_alone(
    stored: Stored, bucket: ObjectBlobs, url: str, server: Server, tmp_path: Path
) -> None:
    with stored() as mnt:
        (mnt.path / "tmp").mkdir()
        (mnt.path / "tmp" / "model.pt").write_bytes(random.Random(1).randbytes(17 << 20))
        (mnt.path / "tmp" / "small").write_bytes(b"small")
        (mnt.path / "other").write_bytes(b"other")
        os.symlink("tmp", mnt.path / "latest")
        mnt.flush()
        (mnt.path / "tmp").rename(mnt.path / "step-2")
        os.link(mnt.path / "step-2" / "small", mnt.path / "linked")
        (mnt.path / "other").unlink()
        mnt.flush()
        assert objects(bucket) == {name: data for name, data in files(mnt).items() if not name.startswith("latest")}
        listed = mnt.cli("ls", url, "-r", "--endpoint", server.endpoint, "--json").out
        assert sorted(item["path"] for item in json.loads(listed)) == sorted(
            str(path.relative_to(mnt.path)) for path in mnt.path.rglob("*")
        )
        mnt.cli("export", url, ".", tmp_path / "out", "--endpoint", server.endpoint)
        assert tree(tmp_path / "out") == tree(mnt.path)
        assert (tmp_path / "out" / "linked").samefile(tmp_path / "out" / "step-2" / "small")
        assert "no archive" in mnt.cli("ls", url + "x", "--endpoint", server.endpoint, check=False).err
        chill(mnt, mnt.path / "step-2" / "model.pt", mnt.path / "linked")
        (mnt.path / "step-2" / "model.pt").rename(mnt.path / "renamed.pt")
        os.chmod(mnt.path / "renamed.pt", 0o640)
        mnt.flush()
        assert objects(bucket)["renamed.pt"] == random.Random(1).randbytes(17 << 20)
        assert (mnt.path / "renamed.pt").read_bytes() == random.Random(1).randbytes(17 << 20)
        for name in ("renamed.pt", "linked", "step-2/small"):
            (mnt.path / name).unlink()
        (mnt.path / "step-2").rmdir()
        mnt.flush()
        assert objects(bucket) == {}


@pytest.mark.parametrize("mode", MODES)
def test_a_large_file_is_read_while_it_comes(stored: Stored, mode: str) -> None:
    data = random.Random(2).randbytes(100 << 20)
    with stored(mode, memory="1GiB") as mnt:
        path = mnt.path / "large"
        path.write_bytes(data)
        chill(mnt, path)
        with path.open("rb") as file:
            file.seek(90 << 20)
            assert file.read(1 << 20) == data[90 << 20 : 91 << 20]
            file.seek(0)
            assert file.read() == data
        assert path.read_bytes() == data


def test_the_server_is_killed_in_the_middle_of_a_drain_and_comes_back(
    stored: Stored, bucket: ObjectBlobs, server: Server
) -> None:
    noise = ["tier archive"]
    data = {f"{n}.pt": random.Random(n).randbytes(20 << 20) for n in range(4)}
    with stored(memory="1GiB", nvme=None, allow_log=noise) as mnt:
        (mnt.path / "first").write_bytes(b"first")
        mnt.flush()
        for name, content in data.items():
            (mnt.path / name).write_bytes(content)
            if name == "1.pt":
                server.kill()
        assert files(mnt) == {**data, "first": b"first"}
        server.start()
        mnt.flush(timeout=150)
        chill(mnt, *(mnt.path / name for name in data))
        assert objects(bucket) == {**data, "first": b"first"}
        assert files(mnt) == {**data, "first": b"first"}


def test_the_daemon_is_killed_while_it_drains(stored: Stored, bucket: ObjectBlobs) -> None:
    noise = ["ended with code", "daemon .* died", "was killed"]
    with stored(allow_log=noise) as mnt:
        for number in range(4):
            (mnt.path / f"{number}.pt").write_bytes(random.Random(number).randbytes(20 << 20))
            mnt.strike()
        want = files(mnt)
        chill(mnt, *(mnt.path / name for name in want))
        assert objects(bucket) == want
        assert files(mnt) == want


def test_the_memory_is_lost_and_the_store_has_what_was_durable(stored: Stored) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a tmpfs of its own")
    first, second = (random.Random(n).randbytes(20 << 20) for n in range(2))
    with stored(nvme=None, allow_log=[r"(rolled back|lost|undone): "]) as mnt:
        path = mnt.path / "model.pt"
        path.write_bytes(first)
        mnt.flush()
        mnt.cli("pause", mnt.path)
        path.write_bytes(second)
        mnt.umount("--no-drain")
        subprocess.run(["umount", "-l", mnt.memory], check=True)
        mnt.mount()
        assert path.read_bytes() == first
        path.write_bytes(second)
        chill(mnt, path)
        assert path.read_bytes() == second


def test_a_lost_catalog_is_made_again_from_the_store(stored: Stored) -> None:
    with stored(nvme=None) as mnt:
        (mnt.path / "d").mkdir()
        for number in range(1, 6):
            (mnt.path / "d" / f"{number}").write_bytes(random.Random(number).randbytes(200_000 * number))
        os.symlink("d", mnt.path / "latest")
        want = files(mnt)
        mnt.umount()
        assert mnt.cli("fsck", "--data", mnt.config).code == 0
        for file in mnt.state.glob("catalog*"):
            file.unlink()
        mnt.cli("fsck", "--rebuild", mnt.config)
        mnt.mount()
        assert files(mnt) == want
        assert os.readlink(mnt.path / "latest") == "d"


def test_a_server_that_is_not_there_is_told_before_anything_is_mounted(
    mounter: Mounter, url: str, tmp_path: Path
) -> None:
    archive = {"kind": "object", "url": url, "endpoint": "http://127.0.0.1:1"}
    with pytest.raises(AssertionError, match=r"127\.0\.0\.1:1"), mounter("passthrough", stored=archive):
        pass


def test_a_server_that_errs_delays_and_spoils_costs_time_and_no_byte(
    stored: Stored, bucket: ObjectBlobs, server: Server
) -> None:
    dice = random.Random(4)
    lock = threading.Lock()

    def fault(asked: Asked) -> Reply | None:
        with lock:
            thrown = dice.random()
        if thrown < 0.15:
            return s3_error(503, "SlowDown")
        if thrown < 0.18:
            raise ConnectionResetError
        return None

    def spoil(asked: Asked, reply: Reply) -> Reply:
        with lock:
            thrown = dice.random()
        if asked.method != "GET" or len(reply.body) < 1 << 20 or thrown > 0.2:
            return reply
        if thrown < 0.1:
            return dataclasses.replace(reply, cut=len(reply.body) // 2)
        return dataclasses.replace(reply, body=b"?" + reply.body[1:])

    noise = ["tier archive", "those that were written", "bytes written to it"]
    with between(server) as proxy, stored(endpoint=proxy.endpoint, nvme=None, allow_log=noise) as mnt:
        proxy.fault = fault
        (mnt.path / "d").mkdir()
        for number in range(3):
            (mnt.path / "d" / f"{number}.pt").write_bytes(random.Random(number).randbytes(18 << 20))
            (mnt.path / f"small-{number}").write_bytes(b"small %d" % number)
        (mnt.path / "d").rename(mnt.path / "e")
        want = files(mnt)
        mnt.flush(timeout=100)
        assert objects(bucket) == want
        chill(mnt, *(mnt.path / name for name in want))
        proxy.spoil = spoil
        got = {}
        for name, data in want.items():
            with contextlib.suppress(OSError):  # bytes that were spoiled: never given out
                got[name] = (mnt.path / name).read_bytes()
                assert got[name] == data
        proxy.spoil = lambda asked, reply: reply
        proxy.fault = lambda asked: None
        assert len(got) >= 3
        mnt.cli("scrub", mnt.path, "--tier", "archive", check=False)
        assert files(mnt) == want


def test_no_operation_waits_for_a_server_that_does_not_answer(
    stored: Stored, bucket: ObjectBlobs, server: Server
) -> None:
    sending = threading.Event()
    hangs = threading.Event()
    hangs.set()
    with between(server) as proxy:

        def fault(asked: Asked) -> Reply | None:
            if asked.is_part and hangs.is_set():
                sending.set()
                proxy.closing.wait(60)
                raise ConnectionResetError
            return None

        proxy.fault = fault
        with stored(endpoint=proxy.endpoint, nvme=None, allow_log=["tier archive"]) as mnt:
            path = mnt.path / "model.pt"
            path.write_bytes(random.Random(5).randbytes(40 << 20))
            assert sending.wait(60)
            began = time.monotonic()
            path.write_bytes(b"another")  # cuts off what is being sent from where it is mapped
            assert path.read_bytes() == b"another"
            (mnt.path / "new").write_bytes(b"new")
            path.rename(mnt.path / "renamed")
            assert time.monotonic() - began < 10
            hangs.clear()
            proxy.closing.set()
            mnt.flush(timeout=120)
            assert objects(bucket) == {"renamed": b"another", "new": b"new"}


def test_a_daemon_starts_again_while_the_server_is_away(stored: Stored, bucket: ObjectBlobs, server: Server) -> None:
    noise = ["tier archive", "ended with code", "daemon .* died", "was killed"]
    data = {name: random.Random(name).randbytes(20 << 20) for name in ("a", "b")}
    with stored(nvme=None, allow_log=noise) as mnt:
        (mnt.path / "a").write_bytes(data["a"])
        mnt.flush()
        server.kill()
        mnt.kill_daemon()
        (mnt.path / "b").write_bytes(data["b"])
        assert files(mnt) == data
        server.start()
        mnt.flush(timeout=150)
        assert objects(bucket) == data
