"""The command line's end of the control socket: plain blocking sockets, no trio."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from tierfs.control.protocol import (
    MAX_LINE,
    Failure,
    Json,
    MountRecord,
    Ok,
    Progress,
    decode_reply,
    encode_request,
    list_mounts,
    mount_table,
    process_state,
)
from tierfs.errors import MountError, NotDurableInTime, TierfsError, UsageError

CONNECT_SECONDS = 5.0
"""How long a daemon that is being restarted may take to answer again."""
STOPPED_SECONDS = 2.0
"""How long a daemon may be stopped (SIGSTOP), or dead and not gone, until a call with a timeout gives up early."""
LINKS_MAX = 40
"""Symlinks followed in one path, as many as the kernel follows."""
_ATTEMPTS = 3
_NOT_REPEATED = frozenset({"restart"})
"""Operations that end the daemon: the connection's end says that they worked."""

ProgressCallback = Callable[[int, int, str], object]


class _Interrupted(Exception):
    """The daemon went away in the middle of the answer."""


def call(
    mount: MountRecord | str | Path,
    op: str,
    args: Json | None = None,
    *,
    on_progress: ProgressCallback | None = None,
    timeout: float | None = None,
) -> Json:
    """Ask the daemon of ``mount`` (a record or mountpoint) and return its answer.

    A daemon that is restarted meanwhile is asked again: every operation can be repeated. ``timeout`` bounds the whole
    call in seconds. Raises UsageError (no such mount, or the daemon found the arguments wrong), NotDurableInTime,
    MountError (no answer) or a TierfsError with the daemon's message and exit code.
    """
    record = mount if isinstance(mount, MountRecord) else _record_at(os.path.abspath(mount))
    line = encode_request(op, args or {})
    deadline = None if timeout is None else time.monotonic() + timeout
    for _ in range(_ATTEMPTS):
        try:
            with _connect(record, deadline) as connection:
                return _converse(connection, record, line, on_progress, deadline)
        except _Interrupted:
            if op in _NOT_REPEATED:
                return {}
    raise MountError(f"{record.mountpoint}: the daemon ended {_ATTEMPTS} times before it answered; {_see_log(record)}")


def find_mount(path: str | Path) -> tuple[MountRecord, str]:
    """The mount that ``path`` lies on, and the path relative to its mountpoint ("" for the mountpoint itself).

    A symlink at the end of ``path`` is not followed, unless the path is on no mount otherwise. UsageError when no
    mount is there.
    """
    mounts = {record.mountpoint: record for record in list_mounts()}
    absolute = os.path.abspath(path)
    for candidate in _readings(absolute, mounts):
        for ancestor in _upwards(candidate):
            if ancestor in mounts:
                relative = os.path.relpath(candidate, ancestor)
                return mounts[ancestor], "" if relative == "." else relative
    plain = os.path.join(_resolve(os.path.dirname(absolute), mounts), os.path.basename(absolute))
    types = mount_table()
    for ancestor in _upwards(plain):
        if types.get(ancestor) == "fuse.tierfs":
            raise UsageError(f"{path}: the tierfs mount {ancestor} was made by another user; run this as that user")
    raise UsageError(f"{path} is not on a tierfs mount; `tierfs status` lists them")


def _record_at(mountpoint: str) -> MountRecord:
    record, relative = find_mount(mountpoint)
    if relative:
        raise UsageError(f"{mountpoint} is not a mountpoint but lies in the mount {record.mountpoint}")
    return record


def _readings(absolute: str, mounts: Container[str]) -> Iterator[str]:
    """What a path may mean, the likeliest first; a symlink is followed only when the one before is on no mount."""
    yield absolute
    yield os.path.join(_resolve(os.path.dirname(absolute), mounts), os.path.basename(absolute))
    yield _resolve(absolute, mounts)


def _resolve(path: str, mounts: Container[str]) -> str:
    """``path`` without symlinks on the way to the first of ``mounts``; what is in that stays as it is: a look there
    would wait for the daemon, which may be what does not answer."""
    done, rest, links = "/", [name for name in reversed(path.split("/")) if name], 0
    while rest:
        name = rest.pop()
        if name == "..":
            done = os.path.dirname(done)
        elif name != ".":
            here = os.path.join(done, name)
            if here in mounts:
                return os.path.normpath(os.path.join(here, *reversed(rest)))
            try:
                target = os.readlink(here)
            except OSError:
                done = here
                continue
            links += 1
            if links > LINKS_MAX:
                return path
            done = "/" if target.startswith("/") else done
            rest += [name for name in reversed(target.split("/")) if name]
    return done


def _upwards(path: str) -> Iterator[str]:
    yield path
    while path != "/":
        path = os.path.dirname(path)
        yield path


def _connect(record: MountRecord, deadline: float | None) -> socket.socket:
    until = time.monotonic() + CONNECT_SECONDS
    if deadline is not None:
        until = min(until, deadline)
    while True:
        try:
            return _connect_once(record, max(0.05, until - time.monotonic()))
        except PermissionError:
            raise MountError(f"{record.mountpoint}: permission denied; the mount belongs to another user") from None
        except OSError as error:
            if time.monotonic() >= until:
                raise MountError(
                    f"{record.mountpoint}: the daemon does not answer ({error.strerror or error}); {_what_now(record)}"
                ) from None
        time.sleep(0.05)


def _connect_once(record: MountRecord, seconds: float) -> socket.socket:
    """Through the directory's descriptor: a socket's path has at most 107 bytes. OSError when a daemon that is not
    there to accept has no room for another connection for so long."""
    directory = os.open(record.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(seconds)
        connection.connect(f"/proc/self/fd/{directory}/{record.socket.name}")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(directory)
    return connection


def _converse(
    connection: socket.socket,
    record: MountRecord,
    request: bytes,
    on_progress: ProgressCallback | None,
    deadline: float | None,
) -> Json:
    data = bytearray()
    try:
        connection.settimeout(_patience(deadline))
        connection.sendall(request)
        while True:
            end = data.find(b"\n")
            while end < 0:
                if len(data) > MAX_LINE:
                    raise MountError(f"{record.mountpoint}: the daemon's answer is too long")
                part = _receive(connection, record, deadline)
                if not part:
                    raise _Interrupted
                end = part.find(b"\n")
                end = end if end < 0 else end + len(data)
                data += part
            reply = decode_reply(bytes(data[: end + 1]))
            del data[: end + 1]
            match reply:
                case Progress(done, total, what):
                    if on_progress is not None:
                        on_progress(done, total, what)
                case Ok(result):
                    return result
                case Failure(message, exit_code, details):
                    error = _error(message, exit_code)
                    error.details = details
                    raise error
    except TimeoutError:
        raise MountError(f"{record.mountpoint}: the daemon did not answer in time; {_what_now(record)}") from None
    except OSError as error:
        raise _Interrupted from error


def _receive(connection: socket.socket, record: MountRecord, deadline: float | None) -> bytes:
    """The next bytes. With a deadline also TimeoutError, when that has passed or the daemon is stopped or dead."""
    while True:
        connection.settimeout(_patience(deadline))
        try:
            return connection.recv(1 << 16)
        except TimeoutError:
            if _stopped(record) or _straggles(record):
                raise


def _patience(deadline: float | None) -> float | None:
    """Seconds to wait until the next look at what keeps the daemon. TimeoutError when the deadline has passed."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, STOPPED_SECONDS)


def _stopped(record: MountRecord) -> bool:
    return process_state(record.daemon_pid) in (b"T", b"t")


def _straggles(record: MountRecord) -> bool:
    """Whether the daemon is dead, and one of its threads in the kernel: it answers nobody and holds its socket open."""
    if process_state(record.daemon_pid) != b"Z":
        return False
    try:
        return len(os.listdir(f"/proc/{record.daemon_pid}/task")) > 1
    except OSError:
        return False


def _error(message: str, exit_code: int) -> TierfsError:
    kind = {UsageError.exit_code: UsageError, NotDurableInTime.exit_code: NotDurableInTime}.get(exit_code, TierfsError)
    error = kind(message)
    error.exit_code = exit_code
    return error


def _what_now(record: MountRecord) -> str:
    """Where to look when the daemon of a mount does not answer."""
    if _stopped(record):
        return f"its process {record.daemon_pid} is stopped: `kill -CONT {record.daemon_pid}` lets it go on"
    if _straggles(record):
        return (
            f"its process {record.daemon_pid} is dead and waits in the kernel for a tier that does not answer; the "
            f"next one starts when that does, and files that are open go on meanwhile"
        )
    return _see_log(record)


def _see_log(record: MountRecord) -> str:
    return f"see {os.path.join(record.state, 'tierfs.log')}"
