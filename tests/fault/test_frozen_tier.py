"""The daemon is killed while a thread of it is in a call into a frozen filesystem, from which no signal wakes it."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.mount.conftest import eventually, loop_disk, make_base, need_mode
from tierfs.control.protocol import process_state
from tierfs.testing.mounting import TestMount, mounted

LIMIT = 120.0
MIB = 1 << 20
NOISE = [r"the daemon \(process \d+\) is dead, but \d+ of its threads wait", "tier archive: "]


@contextmanager
def frozen(where: Path) -> Iterator[None]:
    """Nothing is written to this filesystem meanwhile: calls that would write do not return."""
    subprocess.run(["fsfreeze", "-f", where], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", where], check=True)


@pytest.fixture
def archive() -> Iterator[Path]:
    need_mode("passthrough")
    if not shutil.which("fsfreeze", path="/sbin:/usr/sbin:/bin:/usr/bin"):
        pytest.skip("needs fsfreeze")
    base = make_base("tierfs-test-")
    try:
        with loop_disk(base, "archive", 256 * MIB) as where:
            if not os.path.ismount(where):
                pytest.skip("needs loop devices")
            yield where
    finally:
        shutil.rmtree(base, ignore_errors=True)


def waiting(pid: int) -> set[str]:
    """Threads of the process that wait where no signal reaches them."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                found.add(task.name)
    return found


def stays_in_the_kernel(pid: int, looks: int = 25) -> bool:
    """Whether one thread is there at so many looks: a disk that works lets it go."""
    return bool(set.intersection(*(waiting(pid) for _ in range(looks) if not time.sleep(0.01))))


def test_a_daemon_killed_in_a_call_into_a_frozen_tier_is_followed_when_that_answers(archive: Path) -> None:
    """Until then open files are read and written, `status` and the log say what it waits for; nothing is lost."""
    base = make_base("tierfs-test-")
    try:
        with (
            mounted(base, mode="passthrough", archive=archive / "tier", allow_log=NOISE) as mnt,
            mnt.abort_after(LIMIT),
        ):
            kill_while_frozen(mnt, archive)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def kill_while_frozen(mnt: TestMount, archive: Path) -> None:
    (mnt.path / "read").write_bytes(b"r" * MIB)
    mnt.flush()
    with (mnt.path / "open").open("w+b", buffering=0) as file, (mnt.path / "read").open("rb", buffering=0) as reader:
        file.write(b"1" * MIB)
        mapped = mmap.mmap(file.fileno(), MIB)
        file.write(b"1" * MIB)  # the first write after a stat, which mmap makes, asks the daemon
        daemon = mnt.daemon_pid()
        with frozen(archive):
            (mnt.path / "drained").write_bytes(b"d" * 4 * MIB)
            eventually(lambda: stays_in_the_kernel(daemon), "nobody waits for the archive")
            os.kill(daemon, signal.SIGKILL)
            eventually(lambda: process_state(daemon) == b"Z")
            file.write(b"2" * 8 * MIB)
            assert os.pread(file.fileno(), MIB, 2 * MIB) == b"2" * MIB
            assert os.pread(reader.fileno(), MIB, 0) == b"r" * MIB
            mapped[:3] = b"map"
            started = time.monotonic()
            status = mnt.cli("status", mnt.path, check=False)
            assert (status.code, time.monotonic() - started < 9) == (1, True)
            assert "waits in the kernel for a tier that does not answer" in status.err
            eventually(lambda: "threads wait in the kernel" in mnt.log)
            assert process_state(daemon) == b"Z"
        eventually(lambda: process_state(daemon) == b"", "the dead daemon stays")
        (mnt.path / "new").write_bytes(b"n" * MIB)
        assert mnt.daemon_pid() != daemon
        file.write(b"3" * MIB)
        mapped.close()
    mnt.flush()
    expected = {"open": b"map" + b"1" * (2 * MIB - 3) + b"2" * 8 * MIB + b"3" * MIB, "drained": b"d" * 4 * MIB}
    for name, content in {**expected, "new": b"n" * MIB, "read": b"r" * MIB}.items():
        assert (mnt.path / name).read_bytes() == (mnt.archive / name).read_bytes() == content
