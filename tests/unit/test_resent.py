"""A request that a killed daemon had carried out, sent again to the next one: answered as it would have been."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace

import pyfuse3
import pytest
import trio
from assembled import assemble

from tierfs.fuse.adapter import RESENT, Adapter
from tierfs.types import ROOT_INO


def in_killed_daemon(tmp_path: Path, work: Callable[[Adapter], Coroutine[object, object, int]]) -> None:
    """``work`` in a process that is killed right after it."""
    pid = os.fork()
    if not pid:
        try:
            if trio.run(work, assemble(tmp_path).adapter) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def context(request: int, *, resent: bool = False) -> pyfuse3.RequestContext:
    return SimpleNamespace(uid=0, gid=0, pid=request | (RESENT if resent else 0))  # type: ignore[return-value]


async def setxattr(adapter: Adapter, value: bytes, flag: int, ctx: pyfuse3.RequestContext) -> int:
    """What pyfuse3 makes of setxattr(2): the errno of its answer."""
    ino = ROOT_INO
    try:
        if flag & os.XATTR_CREATE:
            try:
                await adapter.getxattr(ino, b"user.a", ctx)
            except pyfuse3.FUSEError as error:
                if error.errno != pyfuse3.ENOATTR:
                    raise
            else:
                return errno.EEXIST
        elif flag & os.XATTR_REPLACE:
            await adapter.getxattr(ino, b"user.a", ctx)
        await adapter.setxattr(ino, b"user.a", value, ctx)
    except pyfuse3.FUSEError as error:
        return error.errno
    return 0


@pytest.mark.parametrize("flag", [0, os.XATTR_CREATE, os.XATTR_REPLACE], ids=["set", "create", "replace"])
def test_setxattr(tmp_path: Path, flag: int) -> None:
    async def first(adapter: Adapter) -> int:
        if flag == os.XATTR_REPLACE:
            await setxattr(adapter, b"old", 0, context(1))
        return await setxattr(adapter, b"new", flag, context(2))

    in_killed_daemon(tmp_path, first)
    parts = assemble(tmp_path)
    adapter = parts.adapter
    assert trio.run(setxattr, adapter, b"new", flag, context(2, resent=True)) == 0
    assert parts.filesystem.get_xattr(ROOT_INO, b"user.a") == b"new"
    # Another request is judged on its own merits.
    assert trio.run(setxattr, adapter, b"newer", flag, context(3)) == (errno.EEXIST if flag == os.XATTR_CREATE else 0)
    parts.close()
