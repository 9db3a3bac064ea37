"""The keeper: owns /dev/fuse and the mount, forwards packets to the daemon, and outlives it.

It knows three things about the traffic: the INIT request (to play it to the next daemon), the table of open
handles (which the kernel keeps over a restart), and which replies to patch for passthrough. It imports
nothing that could fail: no pyfuse3, no trio, no SQLite.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tierfs.errors import MountError
from tierfs.fuse import wire
from tierfs.fuse.session import KeeperSession, KeeperState, OpenHandle

BUFFER = 2 << 20
"""Room for any packet: max_write is 1 MiB, and libfuse never sends more than that and a header."""
SOCKET_BUFFER = 8 << 20
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2

FREE_CRASHES, BACKOFF_WINDOW = 3, 10.0
MAX_CRASHES, CRASH_WINDOW = 10, 60.0
BACKOFF, MAX_BACKOFF = 0.1, 5.0
STOP_AGAIN = 1
"""Seconds after which a daemon started while the mount is being stopped is told to stop, too."""

Serve = Callable[[KeeperSession], int]
Successor = Callable[[KeeperState], None]
"""Executes the program anew in this process, which goes on from the given state: it returns by OSError only."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP)


class _Unmounted(Exception):
    """The kernel closed the connection."""


def mount_fuse(mountpoint: Path, *, allow_other: bool) -> int:
    """Mount at ``mountpoint``; the /dev/fuse descriptor. Raises MountError."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise MountError(f"/dev/fuse: {error.strerror}; is the fuse module loaded?") from error
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions"
    if allow_other:
        options += ",allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    if libc.mount(b"tierfs", os.fsencode(mountpoint), b"fuse.tierfs", flags, options.encode()):
        code = ctypes.get_errno()
        os.close(device)
        raise MountError(f"mounting {mountpoint}: {os.strerror(code)}")
    return device


def mount_number(mountpoint: Path) -> str | None:
    """The device number (``0:minor``) of the FUSE mount on top of ``mountpoint``; asks the mount nothing."""
    escaped = os.fsencode(mountpoint)
    for character in b"\\ \t\n":
        escaped = escaped.replace(bytes([character]), b"\\%03o" % character)
    number = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split(b" ")
        if fields[4] == escaped:
            number = fields[2].decode() if b" - fuse.tierfs " in line else None
    return number


def run_keeper(
    mountpoint: Path,
    *,
    allow_other: bool,
    serve: Serve,
    log: logging.Logger,
    successor: Successor | None = None,
    resume: KeeperState | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Mount, start daemons with ``serve`` (in a forked child, its return value the exit code) and forward until the
    mount ends. The keeper's exit code. ``on_ready`` is called in the keeper once the first daemon answers the kernel.
    With ``resume`` go on with the mount of this process's former program; ``successor`` begins the next one.
    Call in the main thread: handles SIGTERM and SIGINT (stop) and SIGHUP (``successor``, or else just a new daemon).
    Raises MountError when it cannot mount."""
    mountpoint = Path(os.path.realpath(mountpoint))
    device = resume.device_fd if resume else mount_fuse(mountpoint, allow_other=allow_other)
    number = mount_number(mountpoint)
    try:
        return Keeper(mountpoint, device, serve, log, successor, resume, on_ready).run()
    finally:
        if number is not None and mount_number(mountpoint) == number:
            ctypes.CDLL(None).umount2(os.fsencode(mountpoint), MNT_DETACH)
        os.close(device)


class Keeper:
    def __init__(
        self,
        mountpoint: Path,
        device: int,
        serve: Serve,
        log: logging.Logger,
        successor: Successor | None = None,
        resume: KeeperState | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._mountpoint = mountpoint
        self._device = device
        self._serve = serve
        self._log = log
        self._successor = successor
        self._on_ready = on_ready
        self._channel: socket.socket | None = None
        self._daemon = 0
        self._restarts = 0
        self._planned = False
        self._stopping = False
        self._init_request: bytes | None = None
        self._initialised = False
        self._handles: dict[tuple[int, bool], list[OpenHandle]] = {}
        """(fh, is_dir) → its opens; more than one where the daemon gives several opens the same fh"""
        self._highest_backing_id = 0
        self._crashes: deque[float] = deque()
        """when daemons died, since the last one that served until it was killed from outside"""
        self._served = False
        """whether this daemon came far enough to answer INIT"""
        self._waiting: dict[int, tuple[int, int, int]] = {}
        """unique → (opcode, nodeid, flags or fh), for the replies that matter"""
        self._undelivered: deque[bytes] = deque()
        """packets that the daemon has not taken: its socket was full, or it died and they are never sent again"""
        if resume is not None:
            self._resume(resume)

    def _resume(self, state: KeeperState) -> None:
        self._init_request = state.init_request
        self._initialised = True
        self._restarts = state.restarts
        self._highest_backing_id = state.highest_backing_id
        self._undelivered.extend(state.undelivered)
        for handle in state.handles:
            self._handles.setdefault((handle.fh, handle.is_dir), []).append(handle)

    def run(self) -> int:
        former = {
            number: signal.signal(number, self._on_restart if number == signal.SIGHUP else self._on_stop)
            for number in _SIGNALS
        }
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked by `_hand_over` when this is a successor
        try:
            return self._run()
        except _Unmounted:
            return self._finish()
        finally:
            self._finish()
            signal.alarm(0)
            for number, handler in former.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        while True:
            self._start()
            self._forward()
            code = self._reap()
            if self._stopping and code in (0, -signal.SIGTERM, -signal.SIGINT):
                return code and 1
            if not self._initialised:
                self._log.error("the daemon ended with code %d before the mount was ready", code)
                return code if code > 0 else 1
            planned = self._planned
            if not self._may_restart(code):
                return 1
            self._restarts += 1
            if planned and self._successor is not None:
                self._hand_over(self._successor)

    def _hand_over(self, successor: Successor) -> None:
        """Become the program as it is on disk now. Returns when that fails: then this one goes on."""
        assert self._init_request is not None
        state = KeeperState(
            device_fd=self._device,
            init_request=self._init_request,
            restarts=self._restarts,
            handles=[handle for same in self._handles.values() for handle in same],
            highest_backing_id=self._highest_backing_id,
            undelivered=list(self._undelivered),
        )
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the successor has its handlers
        os.set_inheritable(self._device, True)
        try:
            successor(state)
        except OSError as error:
            self._log.error("cannot execute the program again (%s); the loaded one goes on", error)
        finally:
            os.set_inheritable(self._device, False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    # signals

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True
        self._signal_daemon(signal.SIGTERM)

    def _on_restart(self, _signal: int, _frame: FrameType | None) -> None:
        if self._initialised and not self._stopping:
            self._planned = True
            self._signal_daemon(signal.SIGKILL)

    def _signal_daemon(self, number: int) -> None:
        if self._daemon:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._daemon, number)

    # the daemon's life

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SOCKET_BUFFER)
            end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BUFFER)
        ours.setblocking(False)
        handles = [handle for same in self._handles.values() for handle in same]
        session = KeeperSession(
            device_fd=self._device,
            channel_fd=theirs.fileno(),
            keeper_pid=os.getpid(),
            restarts=self._restarts,
            handles=[handle for handle in handles if not handle.is_dir],
            directories=[handle for handle in handles if handle.is_dir],
            highest_backing_id=self._highest_backing_id,
        )
        self._daemon = self._fork(session, ours)
        theirs.close()
        self._channel = ours
        self._waiting.clear()
        if self._stopping:
            signal.alarm(STOP_AGAIN)
        self._served = self._restarts > 0 and self._replay_init(ours)

    def _fork(self, session: KeeperSession, ours: socket.socket) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            ours.close()
            code = self._serve(session)
        except BaseException:
            self._log.exception("the daemon failed")
        finally:
            logging.shutdown()
            os._exit(code)

    def _replay_init(self, channel: socket.socket) -> bool:
        """A new daemon on an old connection: play the kernel's INIT, swallow the reply, have the rest sent again.
        Whether the daemon answered; one that dies meanwhile is noticed when forwarding."""
        assert self._init_request is not None
        channel.setblocking(True)
        try:
            channel.send(self._init_request)
            reply = channel.recv(BUFFER)
        except OSError:
            return False
        finally:
            channel.setblocking(False)
        if not reply:
            return False
        error = wire.OUT_HEADER.unpack_from(reply)[1]
        if error:
            self._log.error("the new daemon refused the connection: %s", os.strerror(-error))
        try:
            os.write(self._device, wire.NOTIFY_RESEND)
        except OSError as failure:
            raise _Unmounted from failure
        return not error

    def _reap(self) -> int:
        """Wait for the daemon's end; its exit code, negative for a signal."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if not self._daemon:
            return 0
        _, status = os.waitpid(self._daemon, 0)
        self._daemon = 0
        # The kernel sends again what it awaits an answer to, but no FORGET.
        forgets = (wire.FORGET, wire.BATCH_FORGET)
        self._undelivered = deque(packet for packet in self._undelivered if wire.parse_header(packet)[0] in forgets)
        return os.waitstatus_to_exitcode(status)

    def _may_restart(self, code: int) -> bool:
        if self._planned:
            self._planned = False
            self._log.info("restarting the daemon as asked")
            return True
        if code == -signal.SIGKILL and self._served:
            # No fault of the daemon's own ends like this: however often somebody does it, it is no crash loop.
            self._log.info("the daemon was killed, starting it again")
            self._crashes.clear()
            return True
        now = time.monotonic()
        crashes = self._crashes
        crashes.append(now)
        while crashes[0] < now - CRASH_WINDOW:
            crashes.popleft()
        if len(crashes) >= MAX_CRASHES:
            self._log.error(
                "the daemon died %d times within a minute (last code %d); unmounting %s",
                len(crashes),
                code,
                self._mountpoint,
            )
            return False
        self._log.info("the daemon died (code %d), starting it again", code)
        excess = sum(crash > now - BACKOFF_WINDOW for crash in crashes) - FREE_CRASHES
        if excess > 0:
            time.sleep(min(MAX_BACKOFF, BACKOFF * 2 ** (excess - 1)))
        return True

    def _finish(self) -> int:
        """Unmounted: the daemon sees the end of its channel, drains what is left and ends, however long it takes."""
        code = self._reap()
        if code:
            self._log.error("the daemon ended with code %d after the mount", code)
        return 1 if code else 0

    # forwarding

    def _forward(self) -> None:
        """Move packets until the daemon is gone (returns) or the mount is (_Unmounted). The hot path."""
        channel = self._channel
        assert channel is not None
        device, daemon = self._device, channel.fileno()
        buffer = bytearray(BUFFER)
        view = memoryview(buffer)
        buffers = [buffer]
        waiting, undelivered = self._waiting, self._undelivered
        header, pack_u32, unique_of = wire.OPCODE_UNIQUE_NODE.unpack_from, wire.U32.pack_into, wire.U64.unpack_from
        readv, write, send, recv_into = os.readv, os.write, channel.send, channel.recv_into
        noted = wire.HANDLE_OPCODES | {wire.INIT}
        truncated = socket.MSG_TRUNC
        readable, writable = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT
        with select.epoll() as epoll:
            poll = epoll.poll
            epoll.register(device, readable)
            epoll.register(daemon, readable)
            if undelivered:
                epoll.modify(device, 0)
                epoll.modify(daemon, writable)
            while True:
                for fd, events in poll():
                    if fd == device:
                        if undelivered and not events & select.EPOLLERR:
                            continue  # came in the same batch as the event after which the daemon took no more
                        try:
                            length = readv(device, buffers)
                        except OSError as error:
                            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                                continue
                            raise _Unmounted from error
                        opcode, unique, nodeid = header(buffer, 4)
                        # wire.request_stamp, spelled out
                        pack_u32(buffer, 32, (unique >> 1) & 0x3FFFFFFF | (unique >> 33) & 0x40000000)
                        if opcode in noted:
                            self._note(opcode, unique, nodeid, view[:length])
                        try:
                            send(view[:length])
                        except BlockingIOError:
                            undelivered.append(bytes(view[:length]))
                            epoll.modify(device, 0)
                            epoll.modify(daemon, writable)
                        except OSError:  # the daemon died; what awaits an answer is sent again to the next one
                            if opcode in wire.NO_REPLY:
                                undelivered.append(bytes(view[:length]))
                        continue
                    if undelivered and events & select.EPOLLOUT and self._deliver(channel):
                        epoll.modify(device, readable)
                        epoll.modify(daemon, readable)
                    try:
                        length = recv_into(buffer, 0, truncated)
                    except BlockingIOError:
                        continue
                    except ConnectionResetError:
                        continue  # said once when the daemon left requests unread; its replies can still be had
                    if not length:
                        return
                    if length > BUFFER:
                        length = self._refuse(buffer, length)
                    answered = None
                    if waiting:
                        (unique,) = unique_of(buffer, 8)
                        answered = waiting.pop(unique, None)
                        if answered is not None:
                            self._patch(answered, buffer)
                    try:
                        write(device, view[:length])
                    except OSError as error:
                        if error.errno == errno.ENODEV:
                            raise _Unmounted from error
                        if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EINTR):
                            self._log.error("a reply was refused by the kernel: %s", error)
                        continue
                    if answered is not None:
                        self._answered(answered, buffer)

    def _note(self, opcode: int, unique: int, nodeid: int, packet: memoryview) -> None:
        """Remember a request whose reply will need a look."""
        if opcode in (wire.RELEASE, wire.RELEASEDIR):
            (value,) = wire.U64.unpack_from(packet, wire.IN_BODY)
        elif opcode == wire.INIT:
            missing = wire.missing_features(packet)
            if missing:
                raise MountError(f"this kernel's FUSE has no {' and no '.join(missing)}; use mode: userspace")
            self._init_request = bytes(packet)
            value = 0
        else:
            (value,) = wire.U32.unpack_from(packet, wire.IN_BODY)
        self._waiting[unique] = (opcode, nodeid, value)

    def _deliver(self, channel: socket.socket) -> bool:
        """Hand over what waited; True when all of it went."""
        try:
            while self._undelivered:
                channel.send(self._undelivered[0])
                self._undelivered.popleft()
        except OSError:  # full again, or dead: then the end of the channel comes next
            return False
        return True

    def _refuse(self, buffer: bytearray, length: int) -> int:
        """Answer EIO in place of a reply that no kernel would take."""
        (unique,) = wire.U64.unpack_from(buffer, 8)
        self._log.error("a reply of %d bytes does not fit; answering EIO", length)
        wire.OUT_HEADER.pack_into(buffer, 0, wire.OUT_HEADER.size, -errno.EIO, unique)
        return wire.OUT_HEADER.size

    def _patch(self, answered: tuple[int, int, int], reply: bytearray) -> None:
        """Change the reply before the kernel sees it."""
        opcode = answered[0]
        if wire.OUT_HEADER.unpack_from(reply)[1]:
            return
        if opcode == wire.CREATE:
            wire.patch_open(reply, wire.CREATE_OPEN_OUT)
        elif opcode == wire.OPEN:
            wire.patch_open(reply, wire.OUT_BODY)
        elif opcode == wire.INIT:
            wire.patch_init(reply)

    def _answered(self, answered: tuple[int, int, int], reply: bytearray) -> None:
        """The kernel took the reply: keep the table of handles in step."""
        opcode, nodeid, value = answered
        failed = wire.OUT_HEADER.unpack_from(reply)[1]
        if opcode in (wire.RELEASE, wire.RELEASEDIR):  # gone even if the reply is an error
            key = (value, opcode == wire.RELEASEDIR)
            same = self._handles.get(key)
            if same:
                same.pop()
                if not same:
                    del self._handles[key]
        elif failed:
            return
        elif opcode == wire.INIT:
            self._initialised = self._served = True
            if self._on_ready is not None:
                self._on_ready()
        else:
            offset = wire.OUT_BODY
            if opcode == wire.CREATE:
                (nodeid,) = wire.U64.unpack_from(reply, wire.OUT_BODY)
                offset = wire.CREATE_OPEN_OUT
            (fh,) = wire.U64.unpack_from(reply, offset)
            is_dir = opcode == wire.OPENDIR
            backing_id = 0 if is_dir else fh & wire.BACKING_MASK
            self._handles.setdefault((fh, is_dir), []).append(OpenHandle(fh, nodeid, value, backing_id, is_dir))
            if backing_id > self._highest_backing_id:
                self._highest_backing_id = backing_id
