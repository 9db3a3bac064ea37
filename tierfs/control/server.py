"""The daemon's end of the control socket: one request per connection, answered by a handler under trio.

A client that closes its connection (or only its sending side) takes its request back: the handler is cancelled.

Nobody keeps others out. Connections are accepted at once; one that has sent no request is *idle* and has little time,
and of too many idle ones the longest idle is dropped. Requests that take long wait for others of their own kind only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import trio

from tierfs.control.protocol import (
    MAX_LINE,
    Failure,
    Json,
    Ok,
    Progress,
    Reply,
    decode_request,
    encode_reply,
    prepare_directory,
)
from tierfs.errors import TierfsError, UsageError

ProgressCallback = Callable[[int, int, str], Awaitable[None]]
Handler = Callable[[Json, ProgressCallback], Awaitable[Json]]

MAX_IDLE = 128
"""Connections that have not sent their request; one more costs the longest idle its own."""
MAX_RUNNING = 32
"""Requests of one operation that are carried out at the same time; more wait for these."""
MAX_REQUESTS = 512
"""Requests that are carried out or wait; more are refused."""
REQUEST_SECONDS = 10.0
"""A client may take so long to send its request."""
IO_TIMEOUT = 30.0
"""Seconds that a client may take to accept a reply."""

log = logging.getLogger("tierfs.control")


async def serve_control(
    path: Path,
    handlers: Mapping[str, Handler],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on the Unix socket ``path`` (0600, in a directory made 0700) until cancelled; it replaces a stale socket.

    Started once it accepts. OSError when the socket cannot be made.
    """
    prepare_directory(path.parent)
    clients = _Clients(handlers)
    with _listening(path) as raw:
        listener = trio.socket.from_stdlib_socket(raw)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                try:
                    connection, _ = await listener.accept()
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED):
                        raise
                    clients.drop_longest_idle()
                    await trio.sleep(0.1)
                else:
                    nursery.start_soon(_serve, trio.SocketStream(connection), clients, clients.arrived())


class _Clients:
    """Who is connected, and what is carried out for them."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = handlers
        self._idle: dict[trio.CancelScope, None] = {}
        """Ends the reading of a request; longest idle first."""
        self._slots: dict[str, trio.Semaphore] = {}
        self._requests = 0

    def arrived(self) -> trio.CancelScope:
        """Another connection, idle until `asked`: the scope for reading its request."""
        while len(self._idle) >= MAX_IDLE:
            self.drop_longest_idle()
        scope = trio.CancelScope(deadline=trio.current_time() + REQUEST_SECONDS)
        self._idle[scope] = None
        return scope

    def asked(self, scope: trio.CancelScope) -> None:
        """Its request is complete, or will never be."""
        self._idle.pop(scope, None)

    def drop_longest_idle(self) -> None:
        for scope in self._idle:
            scope.cancel()
            del self._idle[scope]
            return

    @contextlib.asynccontextmanager
    async def slot(self, op: str) -> AsyncIterator[None]:
        """For carrying out one request. TierfsError when there are too many."""
        if self._requests >= MAX_REQUESTS:
            raise TierfsError(f"{MAX_REQUESTS} requests are under way on this mount; try again when some are done")
        self._requests += 1
        try:
            async with self._slots.setdefault(op, trio.Semaphore(MAX_RUNNING)):
                yield
        finally:
            self._requests -= 1


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket at ``path``. Bound under another name and renamed, so that clients never find it half made;
    reached through the directory's descriptor, as a socket's path has at most 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = f".sock.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raw.bind(f"/proc/self/fd/{directory}/{temporary}")
        os.chmod(f"/proc/self/fd/{directory}/{temporary}", 0o600)
        raw.listen(128)
        raw.setblocking(False)
        os.rename(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        ours = os.stat(path.name, dir_fd=directory).st_ino
        try:
            yield raw
        finally:
            with contextlib.suppress(OSError):
                if os.stat(path.name, dir_fd=directory).st_ino == ours:
                    os.unlink(path.name, dir_fd=directory)
    finally:
        raw.close()
        os.close(directory)


async def _serve(stream: trio.SocketStream, clients: _Clients, reading: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async with stream:
            try:
                reply = await _answer(stream, clients, reading)
            finally:
                clients.asked(reading)
            if reply is not None:
                await _send(stream, reply)


async def _answer(stream: trio.SocketStream, clients: _Clients, reading: trio.CancelScope) -> Reply | None:
    """Read one request and run it. None when the client is gone, or was idle for too long."""
    _, uid, _ = struct.unpack("iII", stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (0, os.geteuid()):
        log.warning("refused a control connection from uid %d", uid)
        return Failure("permission denied: the mount belongs to another user", 1)
    line = None
    try:
        with reading:
            line = await _read_line(stream)
        clients.asked(reading)
        if line is None:
            return None
        request = decode_request(line)
        handler = clients.handlers.get(request.op)
        if handler is None:
            raise UsageError(f"the daemon knows no control request {request.op!r}")
        async with clients.slot(request.op):
            return await _run(stream, request.op, handler, request.args)
    except TierfsError as error:
        return Failure(str(error), error.exit_code)


async def _run(stream: trio.SocketStream, op: str, handler: Handler, args: Json) -> Reply | None:
    """The handler's reply; None when the client went away first."""
    reporter = _Reporter(stream)
    reply: Reply | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some(4096):
                    pass
            nursery.cancel_scope.cancel()

        async def report() -> None:
            try:
                await reporter.run()
            except trio.BrokenResourceError:
                nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        async with trio.open_nursery() as working:
            working.start_soon(report)
            try:
                reply = Ok(await handler(args, reporter))
            except TierfsError as error:
                reply = Failure(str(error), error.exit_code, None if error.details is None else dict(error.details))
            except Exception:
                log.exception("control request %s failed", op)
                reply = Failure(f"internal error in {op}; the daemon's log has the details", 1)
            finally:
                reporter.finish()
        nursery.cancel_scope.cancel()
    return reply


class _Reporter:
    """The ``progress`` that a handler calls. Only the newest report is kept until it can be sent, so that a slow
    client never holds a handler up; the call itself records it, awaiting the result is a checkpoint."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._pending: Progress | None = None
        self._wake = trio.Event()
        self._finished = False

    def __call__(self, done: int, total: int, what: str) -> Awaitable[None]:
        self._pending = Progress(int(done), int(total), what)
        self._wake.set()
        return _Checkpoint()

    def finish(self) -> None:
        self._finished = True
        self._wake.set()

    async def run(self) -> None:
        """Send reports until finished; never leaves half a line before the reply."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            if self._pending is not None:
                pending, self._pending = self._pending, None
                await _send(self._stream, pending)
            elif self._finished:
                return
            if self._finished:
                self._wake.set()


class _Checkpoint:
    def __await__(self) -> Generator[Any, Any, None]:
        return trio.lowlevel.checkpoint().__await__()  # noqa: ASYNC105


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    """One line; None when the client closed before its end, UsageError when it is too long."""
    data = bytearray()
    while not data.endswith(b"\n") and b"\n" not in data[-65536:]:
        part = await stream.receive_some(65536)
        if not part:
            return None
        data += part
        if len(data) > MAX_LINE:
            raise UsageError(f"control message of more than {MAX_LINE} bytes")
    return bytes(data[: data.index(b"\n") + 1])


async def _send(stream: trio.SocketStream, reply: Reply) -> None:
    """BrokenResourceError when the client does not take it."""
    try:
        line = encode_reply(reply)
    except (UsageError, ValueError, TypeError):
        log.exception("a control reply could not be written")
        line = encode_reply(Failure("internal error: the reply could not be written; the daemon's log has more", 1))
    with trio.move_on_after(IO_TIMEOUT) as scope:
        await stream.send_all(line)
    if scope.cancelled_caught:
        raise trio.BrokenResourceError("the client does not read")
