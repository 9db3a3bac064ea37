"""A WAL that grew large is folded soon after the start, while requests are served: daemons that are killed again and
again before their first sync would let it grow for ever."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from assembled import Parts, assemble

from tierfs.catalog import database
from tierfs.fs.caller import Caller
from tierfs.migrator import migrator as migrating
from tierfs.types import ROOT_INO


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def wal(parts: Parts) -> int:
    return os.stat(f"{parts.catalog.path}-wal").st_size


def grow(parts: Parts, to: int) -> int:
    """Make directories until the WAL is as large as that: how many."""
    made = 0
    while wal(parts) < to:
        parts.names.make(ROOT_INO, b"%d" % made, stat.S_IFDIR | 0o755, Caller(0, 0))
        made += 1
        if not made % 100:
            parts.catalog.commit()
    return made


async def start(parts: Parts, seconds: float) -> None:
    with trio.move_on_after(seconds) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator.run)
            while wal(parts) > 1 << 20:  # noqa: ASYNC110 - what it looks at is on the disk, and is soon written again
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught, "it was not folded"


def test_it_is_folded_at_once_when_it_is_large(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrating, "SYNC_SECONDS", 1000.0)
    monkeypatch.setattr(database, "CHECKPOINT_BYTES", 1 << 20)
    made = grow(parts, (1 << 20) + 1)
    trio.run(start, parts, 30)
    assert len(parts.catalog.entries(ROOT_INO, 0, 1 << 20)) == made


def test_a_small_one_has_time(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced at a start for its own sake: the first requests have waited already."""
    synced: list[int] = []
    monkeypatch.setattr(database, "CHECKPOINT_BYTES", 1 << 20)
    monkeypatch.setattr(parts.catalog, "sync", lambda: synced.append(1))
    grow(parts, 1)

    async def use() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator._sync_now_and_then)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(use)
    assert synced == []
