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
from tierfs.fuse.session import KeeperSession, OpenHandle

BUFFER = 2 << 20
SOCKET_BUFFER = 8 << 20
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2

FREE_CRASHES, CRASH_WINDOW, MAX_CRASHES = 3, 60.0, 10

Serve = Callable[[KeeperSession], int]


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


def run_keeper(mountpoint: Path, *, allow_other: bool, serve: Serve, log: logging.Logger) -> int:
    """Mount, start daemons with ``serve`` (in a forked child, its return value the exit code) and forward until the
    mount ends. The keeper's exit code. Raises MountError when it cannot mount."""
    device = mount_fuse(mountpoint, allow_other=allow_other)
    try:
        return Keeper(mountpoint, device, serve, log).run()
    finally:
        os.close(device)
        ctypes.CDLL(None).umount2(os.fsencode(mountpoint), MNT_DETACH)


class Keeper:
    def __init__(self, mountpoint: Path, device: int, serve: Serve, log: logging.Logger) -> None:
        self._mountpoint = mountpoint
        self._device = device
        self._serve = serve
        self._log = log
        self._channel: socket.socket | None = None
        self._daemon = 0
        self._restarts = 0
        self._planned = False
        self._stopping = False
        self._init_request: bytes | None = None
        self._initialised = False
        self._handles: dict[int, OpenHandle] = {}
        self._highest_backing_id = 0
        self._crashes: deque[float] = deque()
        self._waiting: dict[int, tuple[int, int, int]] = {}
        """unique → (opcode, nodeid, flags or fh), for the replies that matter"""
        self._undelivered: deque[bytes] = deque()
        """packets that the daemon has not taken: its socket was full, or it died and they have no reply"""

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_restart)
        self._start()
        while True:
            try:
                self._forward()
            except _Unmounted:
                return self._finish()
            code = self._reap()
            if self._stopping:
                return code
            if not self._initialised:
                self._log.error("the daemon ended with code %d before the mount was ready", code)
                return code or 1
            if not self._may_restart(code):
                return 1
            self._restarts += 1
            self._start()

    # signals

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True
        self._signal_daemon(signal.SIGTERM)

    def _on_restart(self, _signal: int, _frame: FrameType | None) -> None:
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
        session = KeeperSession(
            device_fd=self._device,
            channel_fd=theirs.fileno(),
            keeper_pid=os.getpid(),
            restarts=self._restarts,
            handles=list(self._handles.values()),
            highest_backing_id=self._highest_backing_id,
        )
        self._daemon = os.fork()
        if not self._daemon:
            code = 1
            try:
                ours.close()
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                code = self._serve(session)
            except BaseException:
                self._log.exception("the daemon failed")
            finally:
                logging.shutdown()
                os._exit(code)
        theirs.close()
        self._channel = ours
        self._waiting.clear()
        if self._init_request is not None:
            self._replay_init()
        ours.setblocking(False)

    def _replay_init(self) -> None:
        """A new daemon on an old connection: play the kernel's INIT, swallow the reply, have the rest sent again."""
        assert self._channel is not None
        assert self._init_request is not None
        try:
            self._channel.send(self._init_request)
            if not self._channel.recv(BUFFER):
                return
        except OSError:
            return
        if self._restarts:
            os.write(self._device, wire.NOTIFY_RESEND)

    def _reap(self) -> int:
        _, status = os.waitpid(self._daemon, 0)
        self._daemon = 0
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        return os.waitstatus_to_exitcode(status)

    def _may_restart(self, code: int) -> bool:
        if self._planned:
            self._planned = False
            self._log.info("restarting the daemon as asked")
            return True
        now = time.monotonic()
        self._crashes.append(now)
        while self._crashes[0] < now - CRASH_WINDOW:
            self._crashes.popleft()
        self._log.info("the daemon died (code %d), starting it again", code)
        if len(self._crashes) > MAX_CRASHES:
            self._log.error(
                "the daemon died %d times within a minute; unmounting %s", len(self._crashes), self._mountpoint
            )
            return False
        if len(self._crashes) > FREE_CRASHES:
            time.sleep(min(5.0, 0.1 * 2 ** (len(self._crashes) - FREE_CRASHES)))
        return True

    def _finish(self) -> int:
        """Unmounted: the daemon sees the end of its channel, drains what is left and ends."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        _, status = os.waitpid(self._daemon, 0)
        return os.waitstatus_to_exitcode(status)

    # forwarding

    def _forward(self) -> None:
        """Move packets until the daemon is gone (returns) or the mount is (_Unmounted)."""
        channel = self._channel
        assert channel is not None
        device, daemon = self._device, channel.fileno()
        buffer = bytearray(BUFFER)
        view = memoryview(buffer)
        poll = select.epoll()
        poll.register(device, select.EPOLLIN)
        poll.register(daemon, select.EPOLLIN)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd == daemon:
                        if self._undelivered and not self._deliver(channel):
                            poll.modify(daemon, select.EPOLLIN | select.EPOLLOUT)
                        elif not self._undelivered:
                            poll.modify(daemon, select.EPOLLIN)
                        if not self._replies(channel, buffer, view):
                            return
                    elif not self._undelivered and self._request(channel, buffer, view):
                        poll.modify(daemon, select.EPOLLIN | select.EPOLLOUT)
        finally:
            poll.close()

    def _request(self, channel: socket.socket, buffer: bytearray, view: memoryview) -> bool:
        """Take one request from the kernel to the daemon; True when it could not be delivered."""
        try:
            length = os.readv(self._device, [buffer])
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                return False
            raise _Unmounted from error
        opcode, unique, nodeid = wire.OPCODE_UNIQUE_NODE.unpack_from(buffer, 4)
        wire.U32.pack_into(buffer, wire.IN_PID, wire.request_stamp(unique))
        if opcode == wire.OPEN or opcode == wire.CREATE:
            self._waiting[unique] = (opcode, nodeid, wire.U32.unpack_from(buffer, wire.IN_BODY)[0])
        elif opcode == wire.RELEASE:
            self._waiting[unique] = (opcode, nodeid, wire.U64.unpack_from(buffer, wire.IN_BODY)[0])
        elif opcode == wire.INIT:
            missing = wire.missing_features(view[:length])
            if missing:
                raise MountError(f"this kernel's FUSE has no {' and no '.join(missing)}; use mode: userspace")
            self._init_request = bytes(view[:length])
            self._waiting[unique] = (opcode, 0, 0)
        try:
            channel.send(view[:length])
        except BlockingIOError:
            self._undelivered.append(bytes(view[:length]))
            return True
        except OSError:
            if opcode in wire.NO_REPLY and opcode != wire.INTERRUPT:
                self._undelivered.append(bytes(view[:length]))
        return False

    def _deliver(self, channel: socket.socket) -> bool:
        """Hand over what waited; True when all of it went."""
        try:
            while self._undelivered:
                channel.send(self._undelivered[0])
                self._undelivered.popleft()
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _replies(self, channel: socket.socket, buffer: bytearray, view: memoryview) -> bool:
        """Take one reply from the daemon to the kernel; False when the daemon is gone."""
        try:
            length = channel.recv_into(buffer)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not length:
            return False
        if self._waiting:
            _, failed, unique = wire.OUT_HEADER.unpack_from(buffer)
            waiting = self._waiting.pop(unique, None)
            if waiting is not None and not failed:
                self._answered(waiting, buffer)
        try:
            os.write(self._device, view[:length])
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise _Unmounted from error
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EINTR):
                self._log.error("a reply was refused by the kernel: %s", error)
        return True

    def _answered(self, waiting: tuple[int, int, int], buffer: bytearray) -> None:
        opcode, nodeid, value = waiting
        if opcode == wire.RELEASE:
            self._handles.pop(value, None)
            return
        if opcode == wire.INIT:
            wire.patch_init(buffer)
            self._initialised = True
            return
        if opcode == wire.CREATE:
            (nodeid,) = wire.U64.unpack_from(buffer, wire.OUT_BODY)
            fh = wire.patch_open(buffer, wire.CREATE_OPEN_OUT)
        else:
            fh = wire.patch_open(buffer, wire.OUT_BODY)
        backing_id = fh & 0xFFFFFFFF
        self._handles[fh] = OpenHandle(fh, nodeid, value, backing_id)
        self._highest_backing_id = max(self._highest_backing_id, backing_id)
