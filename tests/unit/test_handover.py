"""What outlives a daemon: the table of open handles, and the keeper's state."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tierfs.errors import MountError
from tierfs.fuse.handover import HandleTable, KeeperState, OpenHandle


def handle(fh: int, backing_id: int = 0) -> OpenHandle:
    return OpenHandle(fh, 1000 + fh, os.O_RDWR, backing_id, 2 * fh)


@pytest.fixture
def table() -> Iterator[HandleTable]:
    made = HandleTable.create()
    yield made
    made.close()


def again(table: HandleTable) -> HandleTable:
    """The table as the next daemon finds it."""
    return HandleTable(table.fd)


def test_next_daemon_finds_what_is_open(table: HandleTable) -> None:
    for fh in range(1, 5):
        table.add(handle(fh, backing_id=fh + 10))
    table.remove(2)
    table.remove(2)
    assert sorted(again(table).handles(), key=lambda h: h.fh) == [handle(1, 11), handle(3, 13), handle(4, 14)]
    assert again(table).last_backing_id == 14


def test_handles_are_entered_once(table: HandleTable) -> None:
    table.add(handle(1))
    later = again(table)
    later.add(handle(1))
    later.remove(1)
    assert again(table).handles() == []


def test_thousands_of_handles(table: HandleTable) -> None:
    for fh in range(1, 5001):
        table.add(handle(fh))
    for fh in range(1, 5001, 2):
        table.remove(fh)
    size = os.fstat(table.fd).st_size
    for fh in range(5001, 7501):
        table.add(handle(fh))
    assert os.fstat(table.fd).st_size == size, "free entries are used again"
    assert {h.fh for h in again(table).handles()} == {*range(2, 5001, 2), *range(5001, 7501)}


def test_daemon_killed_at_any_moment_leaves_whole_entries(table: HandleTable) -> None:
    """The child adds and removes without end; whenever it is killed, each entry that counts is one that it made."""
    for delay in (0.001, 0.002, 0.003, 0.005, 0.008):
        pid = os.fork()
        if not pid:
            mine = again(table)
            for fh in range(1, 1 << 60):
                mine.add(handle(fh, backing_id=fh & 0xFFFF))
                if fh > 10:
                    mine.remove(fh - 10)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for found in again(table).handles():
            assert found == handle(found.fh, backing_id=found.fh & 0xFFFF)
            again(table).remove(found.fh)


def test_who_serves_is_seen_by_the_keeper(table: HandleTable) -> None:
    assert table.serving == 0
    again(table).serving = 4711
    assert table.serving == 4711


def test_table_of_another_version_is_refused(table: HandleTable) -> None:
    os.pwrite(table.fd, b"\x02", 8)
    with pytest.raises(MountError, match="umount"):
        again(table)


def test_keeper_state_survives_an_execution() -> None:
    device, handles = os.memfd_create("device"), os.memfd_create("handles")
    state = KeeperState(device, handles, 3)
    assert KeeperState.load(state.store()) == state
    assert not os.get_inheritable(device)
    os.close(device)
    os.close(handles)
