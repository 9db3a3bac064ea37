"""The keeper: owns the mount, starts daemons, and outlives them.

It opens /dev/fuse, mounts, answers the kernel's INIT, and from then on only holds the descriptor: the daemons that it
forks read and answer the requests themselves. While no daemon lives the kernel's requests wait. It does nothing that
could fail: no threads, no trio, no SQLite.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tierfs.errors import MountError
from tierfs.fuse import wire
from tierfs.fuse.handover import HandleTable, KeeperSession, KeeperState
from tierfs.points import At, reach

MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2

FREE_CRASHES, BACKOFF_WINDOW = 3, 10.0
MAX_CRASHES, CRASH_WINDOW = 10, 60.0
BACKOFF, MAX_BACKOFF = 0.1, 5.0
STOP_AGAIN = 1
"""Seconds after which a daemon started while the mount is being stopped is told to stop, too."""
STRAGGLE_SECONDS = 5.0
"""Between two looks whether the daemon is dead and not gone. Nothing tells of that, and it is only said."""
INIT_SECONDS = 10.0
"""How long the kernel may take to begin the conversation; it does so within mount(2)."""

Serve = Callable[[KeeperSession], int]
Successor = Callable[[KeeperState], None]
"""Executes the program anew in this process, which goes on from the given state: it returns by OSError only."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP)


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


def unmount_fuse(mountpoint: Path, number: str | None) -> None:
    """Take the mount with this `mount_number` away, whoever has files open on it; no error when it is gone."""
    if number is not None and mount_number(mountpoint) == number:
        ctypes.CDLL(None).umount2(os.fsencode(mountpoint), MNT_DETACH)


def answer_init(device: int) -> None:
    """Agree with the kernel on the protocol. Raises MountError when it lacks what the keeper needs."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    if not poll.poll(INIT_SECONDS * 1000):
        raise MountError("the kernel did not begin the FUSE conversation")
    init = wire.parse_init(os.read(device, wire.BUFFER_SIZE))
    missing = wire.missing_features(init)
    if missing:
        raise MountError(f"this kernel's FUSE has no {' and no '.join(missing)}; use mode: userspace")
    os.write(device, wire.init_reply(init))


def is_connected(device: int) -> bool:
    """Whether the kernel still has the mount of this /dev/fuse descriptor."""
    poll = select.poll()
    poll.register(device, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def run_keeper(
    mountpoint: Path,
    *,
    allow_other: bool,
    serve: Serve,
    log: logging.Logger,
    successor: Successor | None = None,
    resume: KeeperState | None = None,
) -> int:
    """Mount and start daemons with ``serve`` (in a forked child, its return value the exit code) until the mount ends.
    The keeper's exit code. With ``resume`` go on with the mount of this process's former program; ``successor`` begins
    the next one. Call in the main thread: handles SIGTERM and SIGINT (stop) and SIGHUP (``successor``, or else just a
    new daemon). Raises MountError when it cannot mount."""
    mountpoint = Path(os.path.realpath(mountpoint))
    device = resume.device_fd if resume else mount_fuse(mountpoint, allow_other=allow_other)
    number = mount_number(mountpoint)
    try:
        if resume is None:
            answer_init(device)
        handles = HandleTable(resume.handles_fd) if resume else HandleTable.create()
        keeper = Keeper(mountpoint, device, handles, serve, log, successor, resume.restarts if resume else 0)
        return keeper.run()
    finally:
        unmount_fuse(mountpoint, number)
        os.close(device)


def _ends(pid: int, seconds: float) -> bool:
    """Whether a child ends in time, with all its threads. Raises OSError."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(fd)


def _is_dead(pid: int) -> bool:
    """Whether the child's first thread has ended. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


class Keeper:
    def __init__(
        self,
        mountpoint: Path,
        device: int,
        handles: HandleTable,
        serve: Serve,
        log: logging.Logger,
        successor: Successor | None,
        restarts: int,
    ) -> None:
        self._mountpoint = mountpoint
        self._device = device
        self._handles = handles
        self._serve = serve
        self._log = log
        self._successor = successor
        self._restarts = restarts
        self._daemon = 0
        self._planned = False
        self._stopping = False
        self._was_ready = restarts > 0
        """whether any daemon of this mount ever served"""
        self._crashes: deque[float] = deque()
        """when daemons died, since the last one that served until it was killed from outside"""

    def run(self) -> int:
        former = {
            number: signal.signal(number, self._on_restart if number == signal.SIGHUP else self._on_stop)
            for number in _SIGNALS
        }
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked by `_hand_over` when this is a successor
        try:
            return self._run()
        finally:
            signal.alarm(0)
            for number, handler in former.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        while True:
            self._start()
            code = self._reap()
            reach(At.KEEPER_REAPED)
            served = self._handles.serving != 0
            self._was_ready = self._was_ready or served
            if code == 0:
                return 0
            if self._stopping and code in (-signal.SIGTERM, -signal.SIGINT):
                return 1
            if not self._was_ready:
                self._log.error("the daemon ended with code %d before the mount was ready", code)
                return code if code > 0 else 1
            if not is_connected(self._device):
                self._log.error("the daemon ended with code %d after the mount", code)
                return 1
            planned = self._planned
            if not self._may_restart(code, served):
                return 1
            self._restarts += 1
            if planned and self._successor is not None:
                self._hand_over(self._successor)

    def _hand_over(self, successor: Successor) -> None:
        """Become the program as it is on disk now. Returns when that fails: then this one goes on."""
        kept = (self._device, self._handles.fd)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the successor has its handlers
        for fd in kept:
            os.set_inheritable(fd, True)
        try:
            reach(At.KEEPER_HANDED_OVER)
            successor(KeeperState(*kept, self._restarts))
        except OSError as error:
            self._log.error("cannot execute the program again (%s); the loaded one goes on", error)
        finally:
            for fd in kept:
                os.set_inheritable(fd, False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    # signals

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True
        self._signal_daemon(signal.SIGTERM)

    def _on_restart(self, _signal: int, _frame: FrameType | None) -> None:
        if self._handles.serving and not self._stopping:
            self._planned = True
            self._signal_daemon(signal.SIGKILL)

    def _signal_daemon(self, number: int) -> None:
        if self._daemon:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._daemon, number)

    # the daemon's life

    def _start(self) -> None:
        self._handles.serving = 0
        self._daemon = self._fork()
        if self._stopping:
            signal.alarm(STOP_AGAIN)

    def _fork(self) -> int:
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            # The table as the former daemon left it; this process's view of it is as old as the keeper.
            code = self._serve(KeeperSession(self._device, HandleTable(self._handles.fd), keeper, self._restarts))
        except BaseException:
            self._log.exception("the daemon failed")
        finally:
            logging.shutdown()
            os._exit(code)

    def _reap(self) -> int:
        """Wait for the daemon's end; its exit code, negative for a signal.

        That is the end of all its threads. One that is in the kernel, in a call into a tier that hangs, cannot be
        killed before the tier answers. Until then there must be no other daemon: the call may yet take effect, behind
        what that one would do, and the dead one's locks on the catalog stand (docs/DURABILITY.md)."""
        with contextlib.suppress(OSError):
            dead = 0
            while not _ends(self._daemon, STRAGGLE_SECONDS):
                dead += _is_dead(self._daemon)
                if dead != 2:  # at the first look it may be on its way out
                    continue
                self._log.warning(
                    "the daemon (process %d) is dead, but %d of its threads wait in the kernel for a tier that does "
                    "not answer: the next daemon starts when it does; until then files that are open are read and "
                    "written, everything else waits",
                    self._daemon,
                    len(os.listdir(f"/proc/{self._daemon}/task")) - 1,
                )
        _, status = os.waitpid(self._daemon, 0)
        self._daemon = 0
        return os.waitstatus_to_exitcode(status)

    def _may_restart(self, code: int, served: bool) -> bool:
        if self._planned:
            self._planned = False
            self._log.info("restarting the daemon as asked")
            return True
        if code == -signal.SIGKILL and served:
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
