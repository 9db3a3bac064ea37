"""`kill -9` of the daemon at seeded random moments: the program on the mount sees no error and loses no byte."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tierfs.testing.mounting import MountFailure, TestMount

KILLS = int(os.environ.get("TIERFS_TEST_KILLS", "6"))

Work = Callable[[Path, random.Random, threading.Event], dict[str, str]]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def save(path: Path, data: bytes, rng: random.Random) -> str:
    with path.open("wb", buffering=0) as file:
        at = 0
        while at < len(data):
            step = rng.choice([4096, 100_000, 1 << 20])
            at += file.write(data[at : at + step])
    assert path.stat().st_size == len(data)
    return hashlib.blake2b(data).hexdigest()


def saves(top: Path, rng: random.Random, stop: threading.Event) -> dict[str, str]:
    expected = {}
    while not stop.is_set():
        name = f"{rng.randrange(8)}.pt"
        expected[name] = save(top / name, rng.randbytes(rng.randrange(8 << 20)), rng)
    return expected


def renames(top: Path, rng: random.Random, stop: threading.Event) -> dict[str, str]:
    expected: dict[str, str] = {}
    number = 0
    while not stop.is_set():
        number += 1
        (top / "tmp").mkdir()
        content = save(top / "tmp" / "shard", rng.randbytes(200_000), rng)
        (top / "tmp").rename(top / f"step-{number}")
        expected[f"step-{number}/shard"] = content
        (top / "pointer.tmp").write_text(str(number))
        (top / "pointer.tmp").rename(top / "pointer")
        assert (top / "pointer").read_text() == str(number)
        assert not (top / "pointer.tmp").exists()
    expected["pointer"] = hashlib.blake2b(str(number).encode()).hexdigest()
    return expected


def deletes(top: Path, rng: random.Random, stop: threading.Event) -> dict[str, str]:
    expected: dict[str, str] = {}
    number = 0
    while not stop.is_set():
        number += 1
        (top / f"step-{number}").mkdir()
        name = f"step-{number}/model"
        expected[name] = save(top / name, rng.randbytes(100_000), rng)
        if number > 3:
            former = f"step-{number - 3}"
            (top / former / "model").unlink()
            (top / former).rmdir()
            del expected[f"{former}/model"]
            assert not (top / former).exists()
    return expected


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("work", [saves, renames, deletes], ids=lambda work: work.__name__)
def test_killed_daemon_goes_unnoticed(passthrough_mnt: TestMount, work: Work) -> None:
    mnt = passthrough_mnt
    rng = random.Random(f"{work.__name__} 20")
    top = mnt.path / "run"
    top.mkdir()
    stop, outcome, failure = threading.Event(), {}, []

    def run() -> None:
        try:
            outcome.update(work(top, random.Random(rng.random()), stop))
        except BaseException as error:
            failure.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    try:
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.05, 0.6))
            mnt.kill_daemon()
    finally:
        stop.set()
        worker.join(60)
    assert not worker.is_alive(), "the work hangs"
    assert not failure, repr(failure)
    assert mnt.status()["daemon_restarts"] == KILLS
    assert found(top) == outcome
    mnt.flush()
    assert found(mnt.archive / "run") == outcome


def found(top: Path) -> dict[str, str]:
    return {str(path.relative_to(top)): digest(path) for path in top.rglob("*") if path.is_file()}


def test_open_files_go_on(passthrough_mnt: TestMount) -> None:
    mnt = passthrough_mnt
    (mnt.path / "read").write_bytes(b"r" * 100_000)
    with (mnt.path / "read").open("rb") as reader, (mnt.path / "write").open("w+b", buffering=0) as writer:
        gone = (mnt.path / "gone").open("w+b", buffering=0)
        gone.write(b"unlinked")
        (mnt.path / "gone").unlink()
        writer.write(b"before ")
        mnt.kill_daemon()
        writer.write(b"after")
        os.fsync(writer.fileno())
        assert reader.read() == b"r" * 100_000
        assert os.pread(gone.fileno(), 8, 0) == b"unlinked"
        assert os.fstat(gone.fileno()).st_nlink == 0
        os.ftruncate(writer.fileno(), 9)
        gone.close()
    assert (mnt.path / "write").read_bytes() == b"before af"
    assert not (mnt.path / "gone").exists()


def test_killed_while_draining(passthrough_mnt: TestMount) -> None:
    mnt = passthrough_mnt
    content = {f"{n}.pt": os.urandom(24 << 20) for n in range(6)}
    for name, data in content.items():
        (mnt.path / name).write_bytes(data)
    for _ in range(3):
        mnt.kill_daemon()
        time.sleep(0.1)
    mnt.flush()
    for name, data in content.items():
        assert (mnt.archive / name).read_bytes() == data


def test_back_within_half_a_second(passthrough_mnt: TestMount) -> None:
    """The program's own view: a create that meets the dead daemon takes at most half a second (1.5 s on a busy CI)."""
    mnt = passthrough_mnt
    os.kill(mnt.daemon_pid(), signal.SIGKILL)
    started = time.monotonic()
    (mnt.path / "file").write_bytes(b"x")
    assert time.monotonic() - started < 1.5


def test_restart_on_purpose(passthrough_mnt: TestMount) -> None:
    mnt = passthrough_mnt
    former = mnt.daemon_pid()
    with (mnt.path / "file").open("wb", buffering=0) as file:
        file.write(b"a")
        mnt.cli("restart", mnt.path)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                if mnt.daemon_pid() != former:
                    break
            except MountFailure:
                time.sleep(0.05)
        file.write(b"b")
    assert mnt.daemon_pid() != former
    assert (mnt.path / "file").read_bytes() == b"ab"
