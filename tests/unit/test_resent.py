"""A request that a killed daemon had carried out, sent again to the next one: answered as it would have been."""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble

from tierfs.errors import FsError
from tierfs.fuse import wire
from tierfs.fuse.device import Opened, Request
from tierfs.types import ROOT_INO

Ask = Callable[[int, bytes], bytes | Opened | int]
"""(opcode, body of a request about the root) → the answer, or the errno"""


def asker(parts: Parts, unique: int, *, resent: bool = False) -> Ask:
    def ask(opcode: int, body: bytes) -> bytes | Opened | int:
        nonlocal unique
        unique += 2
        request = Request(opcode, unique | (wire.UNIQUE_RESEND if resent else 0), ROOT_INO, 0, 0, body)

        async def answer() -> bytes | Opened:
            found = parts.requests.handlers[opcode](request)
            return found if isinstance(found, (bytes, Opened)) else await found

        try:
            return trio.run(answer)
        except FsError as error:
            return error.errno

    return ask


def in_killed_daemon(tmp_path: Path, work: Callable[[Parts], object]) -> None:
    """``work`` in a process that is killed right after it."""
    pid = os.fork()
    if not pid:
        try:
            work(assemble(tmp_path))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def setxattr(value: bytes, flag: int) -> tuple[int, bytes]:
    return wire.Op.SETXATTR, struct.pack("<II", len(value), flag) + b"user.a\0" + value


MKDIR = (wire.Op.MKDIR, struct.pack("<II", 0o755, 0) + b"d\0")
CREATE = (wire.Op.CREATE, struct.pack("<IIII", os.O_WRONLY | os.O_EXCL, 0o644, 0, 0) + b"f\0")


@pytest.mark.parametrize("flag", [0, os.XATTR_CREATE, os.XATTR_REPLACE], ids=["set", "create", "replace"])
def test_setxattr(tmp_path: Path, flag: int) -> None:
    def first(parts: Parts) -> None:
        if flag == os.XATTR_REPLACE:
            assert asker(parts, 0)(*setxattr(b"old", 0)) == b""
        assert asker(parts, 100)(*setxattr(b"new", flag)) == b""

    in_killed_daemon(tmp_path, first)
    parts = assemble(tmp_path)
    assert asker(parts, 100, resent=True)(*setxattr(b"new", flag)) == b""
    assert parts.filesystem.get_xattr(ROOT_INO, b"user.a") == b"new"
    # Another request is judged on its own merits.
    assert asker(parts, 200)(*setxattr(b"newer", flag)) == (errno.EEXIST if flag == os.XATTR_CREATE else b"")
    parts.close()


@pytest.mark.parametrize(
    ("before", "request_", "refused"),
    [
        ([], MKDIR, errno.EEXIST),
        ([], (wire.Op.MKNOD, struct.pack("<IIII", 0o100644, 0, 0, 0) + b"f\0"), errno.EEXIST),
        ([], (wire.Op.MKNOD, struct.pack("<IIII", 0o010644, 0, 0, 0) + b"p\0"), errno.EEXIST),
        ([], (wire.Op.SYMLINK, b"s\0target\0"), errno.EEXIST),
        ([], CREATE, errno.EEXIST),
        ([CREATE], (wire.Op.LINK, struct.pack("<Q", 2) + b"g\0"), errno.EEXIST),
        ([CREATE], (wire.Op.UNLINK, b"f\0"), errno.ENOENT),
        ([MKDIR], (wire.Op.RMDIR, b"d\0"), errno.ENOENT),
        ([MKDIR], (wire.Op.RENAME, struct.pack("<Q", ROOT_INO) + b"d\0e\0"), errno.ENOENT),
        ([MKDIR], (wire.Op.RENAME2, struct.pack("<QII", ROOT_INO, 1, 0) + b"d\0e\0"), errno.ENOENT),
        ([setxattr(b"v", 0)], (wire.Op.REMOVEXATTR, b"user.a\0"), errno.ENODATA),
    ],
    ids=["mkdir", "mknod", "fifo", "symlink", "create", "link", "unlink", "rmdir", "rename", "rename2", "removexattr"],
)
def test_what_was_done_is_not_done_twice(
    tmp_path: Path, before: list[tuple[int, bytes]], request_: tuple[int, bytes], refused: int
) -> None:
    """The same request under a number of its own is refused; sent again, it is answered as the first time."""
    answers = tmp_path / "answer"

    def first(parts: Parts) -> None:
        ask = asker(parts, 0)
        for earlier in before:
            assert not isinstance(ask(*earlier), int)
        answer = asker(parts, 100)(*request_)
        assert not isinstance(answer, int)
        answers.write_bytes(answer if isinstance(answer, bytes) else answer.entry[:8])

    in_killed_daemon(tmp_path, first)
    parts = assemble(tmp_path)
    again = asker(parts, 100, resent=True)(*request_)
    if isinstance(again, Opened):
        assert again.entry[:8] == answers.read_bytes(), "another inode"
    else:
        assert isinstance(again, bytes)
        assert again[:8] == answers.read_bytes()[:8]
    assert asker(parts, 200)(*request_) == refused
    parts.close()
