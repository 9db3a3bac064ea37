"""`kill -9` of the daemon at seeded random moments: the program on the mount sees no error and loses no byte."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.mount.conftest import eventually
from tierfs.testing.mounting import TestMount

KILLS = int(os.environ.get("TIERFS_TEST_KILLS", "20"))
"""For each of the five kinds of work: a hundred in all."""

MEDIAN_PAUSE, LONGEST_PAUSE = 1.0, 5.0
"""Seconds that an operation which meets a dead daemon may take. The promise is half a second; this leaves room for a
slow and busy machine, where the work itself competes with the daemon's start."""

_libc = ctypes.CDLL(None, use_errno=True)

Work = Callable[[Path, random.Random, threading.Event], dict[str, str]]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def exchange(one: Path, two: Path) -> None:
    if _libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(two), 2):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))


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


def changes(top: Path, rng: random.Random, stop: threading.Event) -> dict[str, str]:
    """Operations that done twice would fail, or undo themselves."""
    expected: dict[str, str] = {}
    number = 0
    while not stop.is_set():
        number += 1
        here = top / str(number)
        here.mkdir()
        expected[f"{number}/one"] = save(here / "one", b"%d" % number, rng)
        expected[f"{number}/two"] = save(here / "two", b"%d" % -number, rng)
        (here / "three").hardlink_to(here / "one")
        (here / "symlink").symlink_to("two")
        exchange(here / "one", here / "two")
        os.setxattr(here / "one", "user.a", b"1", os.XATTR_CREATE)
        os.setxattr(here / "one", "user.a", b"2", os.XATTR_REPLACE)
        os.removexattr(here / "one", "user.a")
        os.mkfifo(here / "fifo")
        os.close(os.open(here / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.truncate(here / "new", 1)
        (here / "new").chmod(0o640)
        assert (here / "three").stat().st_nlink == 2
        assert here.stat().st_nlink == 2
        assert (here / "symlink").read_bytes() == b"%d" % number
        expected[f"{number}/new"] = hashlib.blake2b(b"\0").hexdigest()
        expected[f"{number}/one"], expected[f"{number}/two"] = expected[f"{number}/two"], expected[f"{number}/one"]
        expected[f"{number}/three"] = expected[f"{number}/two"]
        expected[f"{number}/symlink"] = expected[f"{number}/two"]
    return expected


def dcp_saves(top: Path, rng: random.Random, stop: threading.Event) -> dict[str, str]:
    """Two ranks save distributed checkpoints and delete old ones until told to stop; they load and compare the rest."""
    end = top.parent.parent / "stop"  # not on the mount
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("torch_job.py"), "dcp-rotate", top, end]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        while not stop.wait(0.1) and process.poll() is None:
            pass
        end.touch()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output[-4000:]
    return found(top)


WORKS: list[Work] = [
    saves,
    renames,
    deletes,
    changes,
    pytest.param(dcp_saves, marks=pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")),
]


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_killed_daemon_goes_unnoticed(passthrough_mnt: TestMount, pauses: list[float], work: Work) -> None:
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
        eventually(lambda: failure or any(top.iterdir()), seconds=90)
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.02, 0.5))
            pauses.append(mnt.strike())
    finally:
        stop.set()
        worker.join(90)
    assert not worker.is_alive(), "the work hangs"
    assert not failure, repr(failure)
    assert mnt.status()["daemon_restarts"] == KILLS
    assert statistics.median(pauses) < MEDIAN_PAUSE
    assert max(pauses) < LONGEST_PAUSE
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


def test_killed_while_cold_files_are_read(passthrough_mnt: TestMount, pauses: list[float]) -> None:
    mnt = passthrough_mnt
    rng = random.Random(20)
    content = {mnt.path / f"{n}.pt": rng.randbytes(40 << 20) for n in range(3)}
    for path, data in content.items():
        path.write_bytes(data)
    mnt.flush()
    wrong: list[object] = []

    def read() -> None:
        for path, data in content.items():
            try:
                if path.read_bytes() != data:
                    wrong.append(path)
            except OSError as error:
                wrong.append(error)

    for _ in range(4):
        for tier in ("memory", "nvme"):
            mnt.evict(*content, tier=tier)
        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(rng.uniform(0, 0.15))
        pauses.append(mnt.strike())
        reader.join(60)
        assert not reader.is_alive(), "the reader hangs"
        assert wrong == []
    assert max(pauses) < LONGEST_PAUSE


def test_an_idle_mount_is_back_at_once(passthrough_mnt: TestMount, pauses: list[float]) -> None:
    pauses.append(passthrough_mnt.strike())
    assert pauses[0] < LONGEST_PAUSE


def test_restart_goes_on_with_the_program_and_the_rules_on_disk(passthrough_mnt: TestMount) -> None:
    mnt = passthrough_mnt
    before = mnt.status()
    with (mnt.path / "file").open("wb", buffering=0) as file, (mnt.path / "gone").open("w+b", buffering=0) as gone:
        file.write(b"a")
        gone.write(b"unlinked")
        (mnt.path / "gone").unlink()
        policy = yaml.safe_load(mnt.config.read_text())
        mnt.config.write_text(yaml.safe_dump({**policy, "rules": [{"match": "*.log", "ack": "nvme"}]}, sort_keys=False))
        mnt.cli("restart", mnt.path)
        file.write(b"b")
        assert os.pread(gone.fileno(), 8, 0) == b"unlinked"
    after = mnt.status()
    assert after["keeper_pid"] == before["keeper_pid"]
    assert after["daemon_pid"] != before["daemon_pid"]
    assert (mnt.path / "file").read_bytes() == b"ab"
    (mnt.path / "new.log").write_bytes(b"by the new rule")
    assert os.getxattr(mnt.path / "new.log", "user.tierfs.tier") == b"nvme"
    mnt.kill_daemon()
    (mnt.path / "newer.log").write_bytes(b"by the new rule")
    assert os.getxattr(mnt.path / "newer.log", "user.tierfs.tier") == b"nvme"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"rulez": []}, "rulez"), ({"mode": "auto"}, "mode changed"), ({"allow_other": False}, "allow_other changed")],
)
def test_a_restart_that_could_not_succeed_is_refused(
    passthrough_mnt: TestMount, change: dict[str, object], complaint: str
) -> None:
    mnt = passthrough_mnt
    former, text = mnt.daemon_pid(), mnt.config.read_text()
    mnt.config.write_text(yaml.safe_dump({**yaml.safe_load(text), **change}, sort_keys=False))
    refused = mnt.cli("restart", mnt.path, check=False)
    mnt.config.write_text(text)
    assert refused.code == 2
    assert complaint in refused.err
    assert mnt.daemon_pid() == former
    (mnt.path / "file").write_bytes(b"goes on")
