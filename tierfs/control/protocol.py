"""The control socket's lines, and where a mount's socket and record lie. docs/ARCHITECTURE.md, section control."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierfs.errors import UsageError

MAX_LINE = 16 << 20
"""Longest line either side sends or accepts, in bytes, newline included."""

SOCKET_NAME = "control.sock"
RECORD_NAME = "mount.json"

Json = dict[str, Any]

# Lines


@dataclass(frozen=True, slots=True)
class Request:
    op: str
    args: Json


@dataclass(frozen=True, slots=True)
class Progress:
    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True)
class Ok:
    result: Json


@dataclass(frozen=True, slots=True)
class Failure:
    message: str
    exit_code: int
    details: Json | None = None
    """More than the message says, for programs."""


Reply = Progress | Ok | Failure


def encode_request(op: str, args: Json) -> bytes:
    """One request line. UsageError when it is longer than MAX_LINE."""
    return _encode({**args, "op": op})


def encode_reply(reply: Reply) -> bytes:
    """One reply line. UsageError when it is longer than MAX_LINE, ValueError or TypeError when it is no JSON."""
    match reply:
        case Progress(done, total, what):
            return _encode({"progress": {"done": done, "total": total, "what": what}})
        case Ok(result):
            return _encode({"ok": result})
        case Failure(message, exit_code, details):
            more = {} if details is None else {"details": details}
            return _encode({"error": {"message": message, "exit_code": exit_code, **more}})


def decode_request(line: bytes) -> Request:
    """Read a request line; UsageError when it is none."""
    value = _decode(line)
    op = value.pop("op", None)
    if not isinstance(op, str) or not op:
        raise UsageError("control request without an op")
    return Request(op, value)


def decode_reply(line: bytes) -> Reply:
    """Read a reply line; UsageError when it is none."""
    match _decode(line):
        case {"progress": {"done": int(done), "total": int(total), "what": str(what)}}:
            return Progress(done, total, what)
        case {"ok": dict(result)}:
            return Ok(result)
        case {"error": {"message": str(message), "exit_code": int(exit_code), **more}}:
            details = more.get("details")
            return Failure(message, exit_code, details if isinstance(details, dict) else None)
        case _:
            raise UsageError("control reply of an unknown form")


def _encode(value: Json) -> bytes:
    line = json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise UsageError(f"control message of {len(line)} bytes; the longest is {MAX_LINE}")
    return line


def _decode(line: bytes) -> Json:
    if len(line) > MAX_LINE:
        raise UsageError(f"control message of more than {MAX_LINE} bytes")
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise UsageError("control message that is not JSON") from None
    if not isinstance(value, dict):
        raise UsageError("control message that is not a JSON object")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# Directories


def runtime_directory() -> Path:
    """Where this user's mounts are recorded. ``TIERFS_RUNTIME_DIR`` wins (tests, containers)."""
    chosen = os.environ.get("TIERFS_RUNTIME_DIR")
    if chosen:
        return Path(os.path.abspath(chosen))
    if os.geteuid() == 0:
        return Path("/run/tierfs")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.path.isabs(session):
        return Path(session) / "tierfs"
    login = Path(f"/run/user/{os.geteuid()}")
    return login / "tierfs" if login.is_dir() else Path(tempfile.gettempdir()) / f"tierfs-{os.geteuid()}"


def mount_directory(mountpoint: str | Path) -> Path:
    """The directory of one mount's socket and record: its quoted mountpoint, or a digest when that is too long."""
    raw = os.fsencode(mountpoint)
    name = urllib.parse.quote(raw, safe="")
    if len(name) > 255:
        name = name[:180] + "-" + hashlib.sha256(raw).hexdigest()
    return runtime_directory() / name


def prepare_directory(directory: Path) -> None:
    """Make ``directory`` and its parent, both 0700 and ours; UsageError when somebody else's is there."""
    for path in (directory.parent, directory):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise UsageError(f"{path} is not a directory of uid {os.geteuid()}; remove it or set TIERFS_RUNTIME_DIR")
    directory.chmod(0o700)


# Records


@dataclass(frozen=True, slots=True)
class MountRecord:
    """One mount, as its daemon wrote it down. ``source`` is what the mount table shows as its device."""

    mountpoint: str
    config: str
    state: str
    keeper_pid: int | None
    daemon_pid: int
    mode: str
    source: str = "tierfs"

    @property
    def directory(self) -> Path:
        return mount_directory(self.mountpoint)

    @property
    def socket(self) -> Path:
        return self.directory / SOCKET_NAME

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.daemon_pid,) if self.keeper_pid is None else (self.keeper_pid, self.daemon_pid)

    def write(self) -> None:
        """Write mount.json atomically. It need not survive a crash of the machine: the mount does not either."""
        prepare_directory(self.directory)
        temporary = self.directory / f".{RECORD_NAME}.{os.getpid()}"
        temporary.write_bytes(_encode(dataclasses.asdict(self)))
        temporary.replace(self.directory / RECORD_NAME)

    @classmethod
    def read(cls, directory: Path) -> MountRecord:
        """The record in ``directory``. OSError when it cannot be read, UsageError when it is damaged."""
        value = _decode((directory / RECORD_NAME).read_bytes())
        match value:
            case {
                "mountpoint": str(mountpoint),
                "config": str(config),
                "state": str(state),
                "keeper_pid": int() | None as keeper_pid,
                "daemon_pid": int(daemon_pid),
                "mode": str(mode),
            }:
                source = str(value.get("source", "tierfs"))
                return cls(mountpoint, config, state, keeper_pid, daemon_pid, mode, source)
            case _:
                raise UsageError(f"{directory / RECORD_NAME} is damaged; remove it")

    def remove(self) -> None:
        """Forget an ended mount, unless a new one has taken its place."""
        with contextlib.suppress(OSError, UsageError):
            if MountRecord.read(self.directory) == self:
                (self.directory / RECORD_NAME).unlink()
                (self.directory / SOCKET_NAME).unlink(missing_ok=True)
                self.directory.rmdir()


def list_mounts() -> list[MountRecord]:
    """This user's mounts, by mountpoint. Left out are those whose processes have ended and that are not mounted."""
    mounted = mount_table()
    found: list[MountRecord] = []
    top = runtime_directory()
    try:
        directories = sorted(top.iterdir()) if _ours(top) else []
    except (FileNotFoundError, NotADirectoryError):
        return []
    for directory in directories:
        try:
            if not _ours(directory):
                continue
            record = MountRecord.read(directory)
        except (OSError, UsageError):
            continue
        if record.mountpoint in mounted or any(pid_alive(pid) for pid in record.pids):
            found.append(record)
    return sorted(found, key=lambda record: record.mountpoint)


def _ours(directory: Path) -> bool:
    """Whether what is in a directory can be believed: nobody else put it there. OSError when there is none."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH


def pid_alive(pid: int) -> bool:
    """Whether the process runs; one that is only waiting to be reaped does not."""
    return process_state(pid) not in (b"Z", b"X", b"")


def process_state(pid: int) -> bytes:
    """The letter that proc(5) gives the process's state; empty when there is none, "?" when it is not ours to know."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except OSError:
        return b"?"


def mount_table() -> dict[str, str]:
    """Mountpoint → filesystem type, from /proc/self/mountinfo; where several are stacked, the topmost."""
    table: dict[str, str] = {}
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            left, _, right = line.partition(b" - ")
            point = left.split()[4]
            for code in (b"040", b"011", b"012", b"134"):
                point = point.replace(b"\\" + code, bytes([int(code, 8)]))
            table[os.fsdecode(point)] = os.fsdecode(right.split()[0])
    return table
