"""An archive that fails for a moment costs an open nothing but time; what cannot pass is said at once."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from assembled import Parts, assemble
from test_direct import ME, cold, read, run

from tierfs.errors import FsError, TierError
from tierfs.migrator import tries
from tierfs.tiers.tree import TreeStore

DATA = b"cold" * 1000


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path, limits="{read_timeout: 2s}")
    yield made
    made.close()


def fail(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> list[int]:
    """The archive cannot open a file so many times; what is returned grows with each."""
    failed: list[int] = []
    real = TreeStore.open_first

    def flaky(self: TreeStore, *args: Any) -> int:
        if len(failed) < times:
            failed.append(code)
            raise TierError.of("archive", "open", OSError(code, ""))
        return real(self, *args)

    monkeypatch.setattr(TreeStore, "open_first", flaky)
    return failed


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS])
def test_an_archive_that_fails_a_few_times_is_asked_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, code: int, flags: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tries, "RETRY_FIRST", 0.01)

    async def use() -> None:
        ino = await cold(parts, data=DATA)
        failed = fail(monkeypatch, code, 5)
        fh = await parts.files.open(ino, flags)
        assert failed == [code] * 5
        assert await read(parts, fh, len(DATA)) == DATA
        parts.files.release(fh)

    run(parts, use)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "it is no news"


def test_one_that_goes_on_failing_gives_eio_when_the_time_is_over(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        ino = await cold(parts, data=DATA)
        fail(monkeypatch, errno.ESTALE, 1 << 30)
        began = time.monotonic()
        with pytest.raises(FsError) as refused:
            await parts.files.open(ino, os.O_RDONLY)
        assert refused.value.errno == errno.EIO
        assert 0.3 < time.monotonic() - began < 5
        assert not parts.files.inodes

    run(parts, use)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "tier archive: open: Stale file handle; given up"
    ]


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_what_cannot_pass_is_said_at_once(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def use() -> None:
        ino = await cold(parts, data=DATA)
        if how == "gone":
            (tmp_path / "archive" / "f").unlink()
        else:
            (tmp_path / "archive" / "f").write_bytes(DATA[:-1] + b"x")

        monkeypatch.setattr(tries, "RETRY_FIRST", 1000.0)
        with pytest.raises(FsError) as refused:
            await parts.files.open(ino, os.O_RDONLY)
        assert refused.value.errno == errno.EIO

    run(parts, use)


def test_a_file_deleted_while_its_archive_fails_is_not_waited_for(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        ino = await cold(parts, data=DATA)
        fail(monkeypatch, errno.ESTALE, 1 << 30)
        found: list[int | None] = []

        async def open_it() -> None:
            with pytest.raises(FsError) as refused:
                await parts.files.open(ino, os.O_RDONLY)
            found.append(refused.value.errno)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            await trio.testing.wait_all_tasks_blocked()
            parts.names.unlink(1, b"f", ME)
        assert found == [errno.ENOENT]

    run(parts, use)
