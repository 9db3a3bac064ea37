"""The daemon's side of /dev/fuse: reads requests, has them answered, writes the replies.

Most requests are answered on the spot, in the order in which they come. One that has to wait (for a recall, for a copy
to become durable) goes on in a task of its own. The only other way in is `fuse.adapter`, for mounts without a keeper.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import NamedTuple, Protocol

import trio

from tierfs.errors import FsError, TierfsError
from tierfs.fs.caller import Caller
from tierfs.fuse import wire
from tierfs.fuse.handover import HandleTable, KeeperSession, OpenHandle
from tierfs.points import At, reach

log = logging.getLogger("tierfs.fuse")

SPIN = 100e-6
"""Seconds for which to ask for the next request before going to sleep, while requests come in quick succession. What it
costs is less than what it saves: on a virtual machine the pair of wake-ups that a sleeping daemon takes per request
costs both sides several times as much (docs/CONCURRENCY.md)."""
SUCCESSION = 1e-3
"""Requests at most this many seconds after the last reply are in quick succession."""
KILL_LOOK = 0.1
"""Seconds between looks at whether somebody who waits and got a signal is being killed."""
SLICE = 5e-3
"""Seconds after which the daemon's other tasks get their turn, however many requests there are."""

ORDINARY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINVAL, errno.ERANGE})
"""Errors of system calls that programs ask for, and nobody needs to read in the log."""


class Request(NamedTuple):
    opcode: int
    unique: int
    ino: int
    uid: int
    gid: int
    body: bytes
    pid: int = 0
    """The thread that waits for the answer; 0: one of another pid namespace, or none."""
    former: OpenHandle | None = None
    """What a former daemon opened for this request before it was killed, unanswered."""

    @property
    def caller(self) -> Caller:
        unique = self.unique
        return Caller(self.uid, self.gid, unique & ~wire.UNIQUE_RESEND, unique & wire.UNIQUE_RESEND != 0)


class Opened(NamedTuple):
    """The answer to OPEN and CREATE."""

    fh: int
    ino: int
    flags: int
    """Of the open(2)."""
    backing_id: int
    noflush: bool
    entry: bytes = b""
    """What comes before the fuse_open_out."""


Answer = bytes | Opened
Handler = Callable[[Request], Answer | Coroutine[object, object, Answer]]
"""Answers at once, or returns the coroutine that will. Raises FsError, or OSError with the errno to answer."""


class Handlers(Protocol):
    """Who answers: fuse.requests.Requests."""

    handlers: dict[int, Handler]
    """Opcode → its handler; another opcode gets ENOSYS."""

    def forget(self, inos: list[int]) -> None:
        """The kernel knows these inodes no more."""

    def closed(self, fh: int) -> None:
        """Undo an open whose caller is gone."""

    def outdated(self) -> list[int]:
        """Inodes of whose new attributes the kernel must hear."""


class Device:
    def __init__(self, session: KeeperSession, handlers: Handlers) -> None:
        self._fd = session.device_fd
        self._table: HandleTable = session.handles
        self._resumed = session.restarts > 0
        self._server = handlers
        self._handlers = handlers.handlers
        self._former = {handle.unique: handle for handle in session.handles.handles()} if self._resumed else {}
        """handles whose open may not have been answered, by request"""
        self._ended = False
        self._stop = trio.CancelScope()
        self._started = 0
        """coroutines that were started in this burst"""
        self._waiting: dict[int, tuple[int, trio.CancelScope]] = {}
        """unique → (the thread that waits, what ends its waiting)"""
        self._buffer = bytearray(wire.BUFFER_SIZE)
        self._replied = 0.0
        self._spin_until = 0.0

    async def serve(self) -> None:
        """Answer until the mount ends, or `terminate`."""
        if self._resumed:
            self._write(wire.NOTIFY_RESEND)
            reach(At.RESTART_RESENT)
        self._table.serving = os.getpid()
        with self._stop:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                while not self._ended:
                    if self._burst():
                        await trio.lowlevel.checkpoint()
                    elif not self._ended:
                        await trio.lowlevel.wait_readable(self._fd)
                nursery.cancel_scope.cancel()

    def terminate(self) -> None:
        self._stop.cancel()

    def close(self) -> None:
        """Nothing of the kernel's is this object's own: the keeper closes /dev/fuse."""

    def _burst(self) -> bool:
        """Answer what is there, and what follows it closely. False: nothing comes any more, sleep; True: other tasks
        are to run in between."""
        buffer, clock = [self._buffer], time.perf_counter
        until = clock() + SLICE
        self._started = 0
        while True:
            try:
                length = os.readv(self._fd, buffer)
            except BlockingIOError:
                now = clock()
                if now >= self._spin_until:
                    return False
                if now >= until:
                    return True
                continue
            except OSError as error:
                if error.errno == errno.ENODEV:
                    self._ended = True
                    return False
                if error.errno in (errno.EINTR, errno.ENOENT):  # ENOENT: its caller went before it was read
                    continue
                raise
            quick = clock() - self._replied < SUCCESSION
            self._answer(length)
            self._replied = now = clock()
            self._spin_until = now + SPIN if quick else 0.0
            if self._started or now >= until:
                return True

    def _answer(self, length: int) -> None:
        _, opcode, unique, ino, uid, gid, pid, _ = wire.IN_HEADER.unpack_from(self._buffer)
        body = bytes(memoryview(self._buffer)[wire.IN_HEADER.size : length])
        former = self._former.pop(unique & ~wire.UNIQUE_RESEND, None) if unique & wire.UNIQUE_RESEND else None
        request = Request(opcode, unique, ino, uid, gid, body, pid, former)
        if opcode in wire.UNANSWERED:
            self._take_note(request)
            return
        handler = self._handlers.get(opcode)
        if handler is None:
            self._write(wire.error_reply(unique, errno.ENOSYS))
            return
        try:
            answer = handler(request)
        except Exception as error:
            self._write(wire.error_reply(unique, errno_of(error, opcode)))
            return
        finally:
            if opcode == wire.Op.RELEASE:  # gone for the kernel whatever the answer is
                self._table.remove(wire.U64.unpack_from(body)[0])
        if isinstance(answer, (bytes, Opened)):
            self._reply(request, answer)
        else:
            self._started += 1
            self._nursery.start_soon(self._finish, request, answer)

    async def _finish(self, request: Request, waiting: Coroutine[object, object, Answer]) -> None:
        unique = request.unique
        with trio.CancelScope() as scope:
            self._waiting[unique] = request.pid, scope
            try:
                answer = await waiting
            except Exception as error:
                self._write(wire.error_reply(unique, errno_of(error, request.opcode)))
                return
            finally:
                del self._waiting[unique]
        if scope.cancelled_caught:
            self._write(wire.error_reply(unique, errno.EINTR))
            return
        self._reply(request, answer)
        self._replied = time.perf_counter()

    async def _end_with(self, unique: int) -> None:
        """Somebody who waits for an answer got a signal. Only a deadly one ends the waiting, as on a local filesystem;
        the kernel tells of the first signal alone, so look again for as long as it lasts."""
        while unique in self._waiting:
            pid, scope = self._waiting[unique]
            if is_being_killed(pid):
                scope.cancel()
                return
            await trio.sleep(KILL_LOOK)

    def _reply(self, request: Request, answer: Answer) -> None:
        unique = request.unique
        if isinstance(answer, Opened):
            self._reply_opened(unique, answer)
            return
        self._write(wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(answer), 0, unique) + answer)
        for ino in self._server.outdated():
            self._write(wire.attributes_outdated(ino))

    def _reply_opened(self, unique: int, opened: Opened) -> None:
        fh, ino, flags, backing_id, noflush, entry = opened
        self._table.add(OpenHandle(fh, ino, flags, backing_id, unique & ~wire.UNIQUE_RESEND))
        reach(At.OPEN_UNANSWERED)
        body = entry + wire.open_out(fh, wire.FOPEN_NOFLUSH if noflush else 0, backing_id)
        if not self._write(wire.reply(unique, body)):
            self._server.closed(fh)
            self._table.remove(fh)

    def _take_note(self, request: Request) -> None:
        try:
            if request.opcode == wire.Op.INTERRUPT:
                self._nursery.start_soon(self._end_with, wire.U64.unpack_from(request.body)[0])
            elif request.opcode == wire.Op.FORGET:
                self._server.forget([request.ino])
            elif request.opcode == wire.Op.BATCH_FORGET:
                self._server.forget(wire.parse_batch_forget(request.body))
        except Exception:
            log.exception("opcode %d failed", request.opcode)

    def _write(self, packet: bytes) -> bool:
        """False when the kernel no longer waits for this reply."""
        try:
            os.write(self._fd, packet)
        except OSError as error:
            if error.errno == errno.ENODEV:
                self._ended = True
            elif error.errno not in (errno.ENOENT, errno.EINTR):
                log.error("a reply of %d bytes was refused by the kernel: %s", len(packet), error)
            return False
        return True


def is_being_killed(pid: int) -> bool:
    """Whether SIGKILL awaits this thread (proc(5), SigPnd and ShdPnd) or it is gone; False for pid 0."""
    if not pid:
        return False
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            pending = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    except OSError:
        return True
    return any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending)


def errno_of(error: Exception, opcode: int) -> int:
    """What to answer instead; logged unless it is of the caller's own making."""
    if isinstance(error, FsError):
        return error.errno
    try:
        name = wire.Op(opcode).name.lower()
    except ValueError:
        name = f"opcode {opcode}"
    if isinstance(error, TierfsError):
        log.error("%s: %s", name, error)
        return error.errno
    if isinstance(error, OSError):
        if error.errno not in ORDINARY:
            log.error("%s: %s", name, error)
        return error.errno or errno.EIO
    log.error("%s failed", name, exc_info=error)
    return errno.EIO
