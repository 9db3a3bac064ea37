"""Somebody removes the tiers' directories for temporary files while the daemon runs: drains go on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble

from tierfs.fs.caller import Caller
from tierfs.types import ROOT_INO


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def write(parts: Parts, name: bytes, content: bytes) -> None:
    fh, _ = parts.names.create(ROOT_INO, name, 0o644, os.O_RDWR, Caller(0, 0))
    parts.write(fh, 0, content)
    parts.files.release(fh)


def remove_private(top: Path) -> None:
    shutil.rmtree(top / "nvme" / "tmp")
    shutil.rmtree(top / "archive" / ".tierfs" / "tmp")


def test_drains_go_on_when_private_directories_are_removed(parts: Parts, tmp_path: Path) -> None:
    async def use() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator.run)
            with trio.fail_after(30):
                for number in range(2):
                    write(parts, b"%d" % number, b"content")
                    await parts.migrator.flush(ROOT_INO, "nvme", 30.0)
                    await parts.migrator.flush(ROOT_INO, "archive", 30.0)
                    remove_private(tmp_path)
                write(parts, b"last", b"content")
                await parts.migrator.flush(ROOT_INO, "archive", 30.0)
            nursery.cancel_scope.cancel()

    trio.run(use)
    assert (tmp_path / "archive" / "last").read_bytes() == b"content"


def test_a_copy_that_waited_in_a_removed_private_directory_is_made_again(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        async with trio.open_nursery() as nursery:
            monkeypatch.setattr(parts.migrator.archive, "ready_prefix", lambda operations, ready: ())
            nursery.start_soon(parts.migrator.run)
            with trio.fail_after(30):
                write(parts, b"f", b"content")
                while not parts.migrator.ready:
                    with trio.move_on_after(0.1):
                        await parts.migrator.progress().wait()
                remove_private(tmp_path)
                monkeypatch.undo()
                parts.migrator.kick()
                await parts.migrator.flush(ROOT_INO, "archive", 30.0)
            nursery.cancel_scope.cancel()

    trio.run(use)
    assert (tmp_path / "archive" / "f").read_bytes() == b"content"
