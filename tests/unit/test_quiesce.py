"""Copies of a file stop, and none starts, before somebody cuts it off or writes to it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble

from tierfs.errors import SourceChanged
from tierfs.fs.caller import Caller
from tierfs.migrator import migrator as migrating
from tierfs.migrator.throttle import Throttle
from tierfs.migrator.transfer import Copied, Transfer
from tierfs.types import ROOT_INO


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def test_no_copy_starts_while_somebody_waits(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one copy wakes both who waits for it and the planner, which still wants the copy; in either order
    no thread may be in the file when the waiting ends."""
    fh, attributes = parts.names.create(ROOT_INO, b"f", 0o644, os.O_RDWR, Caller(0, 0))
    parts.write(fh, 0, b"x" * (2 << 20))
    parts.files.release(fh)
    inside: list[int] = []
    started = trio.Event()

    def copy(*args: object, **kwargs: object) -> Copied:
        """Reads until it is told to stop, as a long copy does."""
        transfer = args[4]
        assert isinstance(transfer, Transfer)
        inside.append(1)
        trio.from_thread.run_sync(lambda: started.set())
        transfer.cancel.wait(20)
        inside.pop()
        raise SourceChanged("cancelled")

    monkeypatch.setattr(migrating, "copy_to_store", copy)
    monkeypatch.setattr(migrating, "BREATH", 0.0)

    async def use() -> None:
        nonlocal started
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator.run)
            for _ in range(10):
                with trio.fail_after(10):
                    await started.wait()
                    started = trio.Event()
                    await parts.migrator.quiesce(attributes.ino)
                assert not parts.migrator.running
                assert not inside
            nursery.cancel_scope.cancel()
            for transfer in parts.migrator.running.values():
                transfer.cancel.set()

    trio.run(use)


def test_who_stops_a_copy_does_not_wait_for_its_turn() -> None:
    throttle = Throttle(1)
    cancel = threading.Event()
    throttle(1000, cancel)
    waiting = threading.Thread(target=throttle, args=(1000, cancel), daemon=True)
    waiting.start()
    started = time.monotonic()
    cancel.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert time.monotonic() - started < 5
