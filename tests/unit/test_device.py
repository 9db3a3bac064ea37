"""The daemon's loop over /dev/fuse, with a socket in the kernel's place."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Coroutine

import pytest
import trio
import trio.lowlevel
import trio.testing

from tierfs.errors import FsError, TierError
from tierfs.fuse import device, wire
from tierfs.fuse.device import Answer, Device, Handler, Opened, Request
from tierfs.fuse.handover import HandleTable, KeeperSession, OpenHandle

FIRST, SECOND = 100, 101
"""Opcodes of this test's own"""


class Kernel:
    """The other end of the device, and the handlers."""

    def __init__(self, *, restarts: int = 0, handles: HandleTable | None = None) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.theirs = theirs
        self.handlers: dict[int, Handler] = {}
        self.forgotten: list[int] = []
        self.undone: list[int] = []
        self.old: list[int] = []
        self.table = handles or HandleTable.create()
        self.session = KeeperSession(theirs.fileno(), self.table, os.getpid(), restarts)

    def forget(self, inos: list[int]) -> None:
        self.forgotten += inos

    def closed(self, fh: int) -> None:
        self.undone.append(fh)

    def outdated(self) -> list[int]:
        found, self.old = self.old, []
        return found

    def ask(self, opcode: int, unique: int, body: bytes = b"", ino: int = 1) -> None:
        self.ours.send(wire.IN_HEADER.pack(40 + len(body), opcode, unique, ino, 1000, 100, 4242, 0) + body)

    async def answer(self) -> tuple[int, int, bytes]:
        """(unique, errno, body) of the next packet."""
        await trio.lowlevel.wait_readable(self.ours)
        packet = self.ours.recv(1 << 20)
        length, error, unique = wire.OUT_HEADER.unpack_from(packet)
        assert length == len(packet)
        return unique, -error, packet[16:]

    def run(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        served = Device(self.session, self)

        async def main() -> None:
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(served.serve)
                    await work()
                    served.terminate()

        trio.run(main)
        self.ours.close()
        self.theirs.close()


def test_answers_come_in_order_while_another_request_waits() -> None:
    kernel, go = Kernel(), trio.Event()

    async def slow(request: Request) -> bytes:
        await go.wait()
        return b"slow"

    kernel.handlers = {FIRST: slow, SECOND: lambda request: request.body + b"!"}

    async def work() -> None:
        kernel.ask(FIRST, 2)
        kernel.ask(SECOND, 4, b"a")
        kernel.ask(SECOND, 6, b"b")
        assert await kernel.answer() == (4, 0, b"a!")
        assert await kernel.answer() == (6, 0, b"b!")
        go.set()
        assert await kernel.answer() == (2, 0, b"slow")

    kernel.run(work)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "waiting"])
@pytest.mark.parametrize(
    ("error", "code", "logged"),
    [
        (FsError(errno.ENOTEMPTY), errno.ENOTEMPTY, ""),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC, ""),
        (OSError(errno.EROFS, "read-only"), errno.EROFS, "lookup: [Errno 30] read-only"),
        (TierError("tier nvme: gone", errno=errno.EIO), errno.EIO, "lookup: tier nvme: gone"),
        (KeyError("a fault"), errno.EIO, "lookup failed"),
    ],
    ids=["refused", "full", "read-only", "tier", "fault"],
)
def test_every_error_becomes_an_errno(
    error: Exception, code: int, logged: str, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel()

    def fail(request: Request) -> Answer:
        raise error

    async def fail_later(request: Request) -> Answer:
        await trio.lowlevel.checkpoint()
        raise error

    kernel.handlers = {wire.Op.LOOKUP: fail_later if waits else fail, SECOND: lambda request: b"on"}

    async def work() -> None:
        kernel.ask(wire.Op.LOOKUP, 2)
        assert await kernel.answer() == (2, code, b"")
        kernel.ask(SECOND, 4)
        assert await kernel.answer() == (4, 0, b"on")

    kernel.run(work)
    assert [record.getMessage() for record in caplog.records] == ([logged] if logged else [])


def test_unknown_requests_are_refused_and_forgets_are_not_answered() -> None:
    kernel = Kernel()

    async def work() -> None:
        kernel.ask(wire.Op.FORGET, 2, struct.pack("<Q", 1), ino=7)
        kernel.ask(wire.Op.BATCH_FORGET, 4, struct.pack("<IIQQQQ", 2, 0, 8, 1, 9, 1))
        kernel.ask(wire.Op.INTERRUPT, 6, struct.pack("<Q", 2))
        kernel.ask(FIRST, 8)
        assert await kernel.answer() == (8, errno.ENOSYS, b"")

    kernel.run(work)
    assert kernel.forgotten == [7, 8, 9]


def test_caller_and_number_of_a_request_reach_the_handler() -> None:
    kernel = Kernel()
    seen: list[tuple[object, ...]] = []

    def note(request: Request) -> bytes:
        caller = request.caller
        seen.append((request.ino, caller.uid, caller.gid, caller.request, caller.resent))
        return b""

    kernel.handlers = {FIRST: note}

    async def work() -> None:
        for unique in (2, 2 | wire.UNIQUE_RESEND):
            kernel.ask(FIRST, unique, ino=5)
            assert await kernel.answer() == (unique, 0, b"")

    kernel.run(work)
    assert seen == [(5, 1000, 100, 2, False), (5, 1000, 100, 2, True)]


def test_handle_is_in_the_table_from_before_the_answer_until_its_release() -> None:
    kernel = Kernel()
    during: list[list[OpenHandle]] = []

    def release(request: Request) -> bytes:
        during.append(kernel.table.handles())
        raise FsError(errno.EIO)

    kernel.handlers = {wire.Op.OPEN: lambda r: Opened(3, r.ino, os.O_RDWR, 9, True), wire.Op.RELEASE: release}

    async def work() -> None:
        kernel.ask(wire.Op.OPEN, 2, ino=5)
        assert await kernel.answer() == (2, 0, wire.open_out(3, wire.FOPEN_NOFLUSH, 9))
        kernel.ask(wire.Op.RELEASE, 4, struct.pack("<Q16x", 3))
        assert await kernel.answer() == (4, errno.EIO, b"")

    kernel.run(work)
    assert during == [[OpenHandle(3, 5, os.O_RDWR, 9, 2)]]
    assert kernel.table.handles() == []


def test_new_daemon_has_everything_sent_again_and_knows_what_was_opened() -> None:
    table = HandleTable.create()
    table.add(OpenHandle(3, 5, os.O_RDWR, 0, 2))
    kernel = Kernel(restarts=1, handles=table)
    formers: list[OpenHandle | None] = []

    def opened(request: Request) -> Opened:
        formers.append(request.former)
        return Opened(request.former.fh if request.former else 4, request.ino, os.O_RDWR, 0, False)

    kernel.handlers = {wire.Op.OPEN: opened}

    async def work() -> None:
        assert await kernel.answer() == (0, -7, b"")  # FUSE_NOTIFY_RESEND
        for unique, fh in ((2 | wire.UNIQUE_RESEND, 3), (4 | wire.UNIQUE_RESEND, 4)):
            kernel.ask(wire.Op.OPEN, unique, ino=5)
            assert await kernel.answer() == (unique, 0, wire.open_out(fh))

    kernel.run(work)
    assert formers == [OpenHandle(3, 5, os.O_RDWR, 0, 2), None]
    assert sorted(handle.fh for handle in table.handles()) == [3, 4]


def test_open_that_nobody_waits_for_any_more_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    write = os.write

    def refuse(fd: int, data: bytes) -> int:
        if fd == kernel.theirs.fileno() and wire.OUT_HEADER.unpack_from(data)[2] == 2:
            raise OSError(errno.ENOENT, "no such request")
        return write(fd, data)

    monkeypatch.setattr(device.os, "write", refuse)
    kernel.handlers = {wire.Op.OPEN: lambda r: Opened(3, r.ino, os.O_RDWR, 0, False), SECOND: lambda r: b""}

    async def work() -> None:
        kernel.ask(wire.Op.OPEN, 2)
        kernel.ask(SECOND, 4)
        assert await kernel.answer() == (4, 0, b"")

    kernel.run(work)
    assert kernel.undone == [3]
    assert kernel.table.handles() == []


def test_kernel_is_told_of_new_attributes_after_the_answer() -> None:
    kernel = Kernel()
    kernel.old = [6]
    kernel.handlers = {FIRST: lambda r: b""}

    async def work() -> None:
        kernel.ask(FIRST, 2)
        assert await kernel.answer() == (2, 0, b"")
        assert await kernel.answer() == (0, -2, struct.pack("<Qqq", 6, -1, 0))

    kernel.run(work)


def test_other_tasks_get_their_turn_under_a_stream_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer brings the next request at once: without slices no other task would run again."""
    kernel = Kernel()
    count, wanted = 0, 3
    turns = 0

    def more(request: Request) -> bytes:
        nonlocal count
        count += 1
        if turns < wanted:
            kernel.ours.recv(1 << 20) if count > 1 else None
            kernel.ask(FIRST, request.unique + 2)
        return b""

    kernel.handlers = {FIRST: more}

    async def work() -> None:
        nonlocal turns
        kernel.ask(FIRST, 2)
        for _ in range(wanted):
            await trio.lowlevel.checkpoint()
            turns += 1

    kernel.run(work)
    assert turns == wanted


def test_deadly_signals_end_the_waiting_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    looks: list[int] = []

    def look(pid: int) -> bool:
        looks.append(pid)
        return len(looks) == 3

    async def wait(request: Request) -> bytes:
        await trio.sleep_forever()
        return b""

    monkeypatch.setattr(device, "is_being_killed", look)
    monkeypatch.setattr(device, "KILL_LOOK", 0.001)
    kernel.handlers = {wire.Op.FSYNC: wait, SECOND: lambda r: b""}

    async def work() -> None:
        kernel.ask(wire.Op.FSYNC, 2)
        kernel.ask(wire.Op.INTERRUPT, 1, struct.pack("<Q", 2))
        assert await kernel.answer() == (2, errno.EINTR, b"")
        kernel.ask(wire.Op.INTERRUPT, 3, struct.pack("<Q", 2))  # too late: answered before
        kernel.ask(SECOND, 4)
        assert await kernel.answer() == (4, 0, b"")

    kernel.run(work)
    assert looks == [4242] * 3


def test_who_is_being_killed() -> None:
    assert not device.is_being_killed(os.getpid())
    assert not device.is_being_killed(0)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert device.is_being_killed(pid), "gone"


def test_ends_with_the_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()

    def gone(fd: int, buffers: list[bytearray]) -> int:
        raise OSError(errno.ENODEV, "no such device")

    monkeypatch.setattr(device.os, "readv", gone)
    trio.run(Device(kernel.session, kernel).serve)
    kernel.ours.close()
    kernel.theirs.close()
