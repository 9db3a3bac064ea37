"""Draining a file that is still being written: it starts before the close, and what it makes is right whatever the
program does to the file meanwhile."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import MODES, TEST_LIMIT, Mounter, eventually
from tierfs.testing.mounting import TestMount

MIB = 1 << 20
SIZE = 100 * MIB


def early_bytes(mnt: TestMount) -> int:
    """Bytes in the archive's temporary area."""
    return sum(path.stat().st_blocks * 512 for path in (mnt.archive / ".tierfs" / "tmp").iterdir())


def temporaries(mnt: TestMount) -> list[Path]:
    assert mnt.nvme is not None
    return [*(mnt.archive / ".tierfs" / "tmp").iterdir(), *(mnt.nvme / "tmp").iterdir()]


def await_early(mnt: TestMount) -> None:
    eventually(lambda: early_bytes(mnt) >= SIZE // 2, "nothing was copied while the file was open")


@pytest.fixture
def data() -> bytes:
    return random.Random(3).randbytes(SIZE)


def test_copied_before_the_close(mnt: TestMount, data: bytes) -> None:
    with (mnt.path / "model.pt").open("wb", buffering=0) as file:
        file.write(data)
        await_early(mnt)
        assert not (mnt.archive / "model.pt").exists(), "published before it was closed"
        assert mnt.info(mnt.path / "model.pt")["durable"] is None
        file.write(b"the tail")
    mnt.flush()
    assert (mnt.archive / "model.pt").read_bytes() == data + b"the tail"
    assert temporaries(mnt) == []


def test_changed_behind_the_copy(mnt: TestMount, data: bytes) -> None:
    expected = bytearray(data)
    with (mnt.path / "model.pt").open("w+b", buffering=0) as file:
        file.write(data)
        await_early(mnt)
        for offset in (0, 17 * MIB + 5, SIZE - 3):
            os.pwrite(file.fileno(), b"new", offset)
            expected[offset : offset + 3] = b"new"
    mnt.flush()
    assert (mnt.archive / "model.pt").read_bytes() == expected
    mnt.evict(mnt.path / "model.pt")
    mnt.evict(mnt.path / "model.pt", tier="nvme")
    assert (mnt.path / "model.pt").read_bytes() == expected


def test_a_size_set_ahead_is_not_copied(mnt: TestMount, data: bytes) -> None:
    """safetensors: ftruncate to the full size, then writes from the front."""
    with (mnt.path / "model.safetensors").open("wb", buffering=0) as file:
        file.truncate(3 * SIZE)
        file.write(data)
        await_early(mnt)
        assert early_bytes(mnt) <= SIZE
        file.truncate(SIZE)
    mnt.flush()
    assert (mnt.archive / "model.safetensors").read_bytes() == data


@pytest.mark.parametrize("size", [0, 70 * MIB])
def test_cut_off_and_written_anew(mnt: TestMount, data: bytes, size: int) -> None:
    with (mnt.path / "model.pt").open("wb", buffering=0) as file:
        file.write(data)
        await_early(mnt)
        file.truncate(size)
        os.pwrite(file.fileno(), b"y" * 1000, size)
    mnt.flush()
    assert (mnt.archive / "model.pt").read_bytes() == data[:size] + b"y" * 1000
    eventually(lambda: temporaries(mnt) == [], "temporary files stay")


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(b"other")
    path.with_name("other").rename(path)


@pytest.mark.parametrize("away", [remove, replace])
def test_deleted_while_copied(mnt: TestMount, data: bytes, away: Callable[[Path], None]) -> None:
    with (mnt.path / "model.pt").open("w+b", buffering=0) as file:
        file.write(data)
        await_early(mnt)
        away(mnt.path / "model.pt")
        mnt.flush()
        eventually(lambda: temporaries(mnt) == [], "temporary files stay")
        assert os.pread(file.fileno(), 5, 0) == data[:5]
    mnt.flush()
    assert temporaries(mnt) == []
    if away is replace:
        assert (mnt.archive / "model.pt").read_bytes() == b"other"


def test_paused_copies_nothing_early(mnt: TestMount, data: bytes) -> None:
    mnt.cli("pause", mnt.path)
    with (mnt.path / "paused.pt").open("wb", buffering=0) as paused:
        paused.write(data)
        for _ in range(3):
            mnt.status()
            assert temporaries(mnt) == []
            time.sleep(0.3)
        mnt.cli("resume", mnt.path)
        await_early(mnt)


@pytest.mark.parametrize("moment", ["open", "closed"])
def test_killed_daemon_loses_nothing(passthrough_mnt: TestMount, data: bytes, moment: str) -> None:
    mnt = passthrough_mnt
    with (mnt.path / "model.pt").open("wb", buffering=0) as file:
        file.write(data)
        await_early(mnt)
        if moment == "open":
            mnt.kill_daemon()
        file.write(data[:1000])
    if moment == "closed":
        mnt.kill_daemon()
    mnt.flush()
    assert (mnt.archive / "model.pt").read_bytes() == data + data[:1000]


@pytest.fixture(params=MODES)
def slow_mnt(request: pytest.FixtureRequest, mounter: Mounter) -> Iterator[TestMount]:
    with mounter(request.param, extra={"limits": {"drain": "8MiB/s"}}) as mount, mount.abort_after(TEST_LIMIT):
        yield mount


def test_opening_for_writing_does_not_wait_for_the_bandwidth_limit(slow_mnt: TestMount, data: bytes) -> None:
    mnt = slow_mnt
    with (mnt.path / "model.pt").open("wb", buffering=0) as file:
        file.write(data)
        eventually(lambda: len(temporaries(mnt)) == 2, "nothing was copied while the file was open")
        started = time.monotonic()
        with (mnt.path / "model.pt").open("r+b"):
            pass
        assert time.monotonic() - started < 1.5
        started = time.monotonic()
        file.truncate(1000)
        assert time.monotonic() - started < 1.5
    mnt.flush()
    assert (mnt.archive / "model.pt").read_bytes() == data[:1000]
