"""The command line's end of the control socket: plain blocking sockets, no trio."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
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
)
from tierfs.errors import MountError, NotDurableInTime, TierfsError, UsageError

CONNECT_SECONDS = 5.0
"""How long a daemon that is being restarted may take to answer again."""
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
    absolute = os.path.abspath(path)
    plain = os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))
    mounts = {record.mountpoint: record for record in list_mounts()}
    for candidate in (absolute, plain, os.path.realpath(absolute)):
        for ancestor in _upwards(candidate):
            if ancestor in mounts:
                relative = os.path.relpath(candidate, ancestor)
                return mounts[ancestor], "" if relative == "." else relative
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
            return _connect_once(record)
        except PermissionError:
            raise MountError(f"{record.mountpoint}: permission denied; the mount belongs to another user") from None
        except OSError as error:
            if time.monotonic() >= until:
                raise MountError(
                    f"{record.mountpoint}: the daemon does not answer ({error.strerror}); {_see_log(record)}"
                ) from None
        time.sleep(0.05)


def _connect_once(record: MountRecord) -> socket.socket:
    """Through the directory's descriptor: a socket's path has at most 107 bytes."""
    directory = os.open(record.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{record.socket.name}")
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
        _limit(connection, deadline)
        connection.sendall(request)
        while True:
            end = data.find(b"\n")
            while end < 0:
                if len(data) > MAX_LINE:
                    raise MountError(f"{record.mountpoint}: the daemon's answer is too long")
                _limit(connection, deadline)
                part = connection.recv(1 << 16)
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
        raise MountError(f"{record.mountpoint}: the daemon did not answer in time; {_see_log(record)}") from None
    except OSError as error:
        raise _Interrupted from error


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)


def _error(message: str, exit_code: int) -> TierfsError:
    kind = {UsageError.exit_code: UsageError, NotDurableInTime.exit_code: NotDurableInTime}.get(exit_code, TierfsError)
    error = kind(message)
    error.exit_code = exit_code
    return error


def _see_log(record: MountRecord) -> str:
    return f"see {os.path.join(record.state, 'tierfs.log')}"
