"""A flush ends with the copy that it waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from assembled import Parts, assemble

from tierfs.fs.caller import Caller
from tierfs.types import ROOT_INO, Replica, ReplicaState


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def test_a_copy_that_ends_between_two_looks_is_noticed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush looks at the queue at most so often; what happens in the pause must not wait for the next thing that
    happens."""
    fh, attributes = parts.names.create(ROOT_INO, b"f", 0o644, os.O_RDWR, Caller(0, 0))
    parts.files.release(fh)

    async def sync() -> None:
        """Without a thread, during which this clock would go on."""

    monkeypatch.setattr(parts.migrator, "sync", sync)

    async def use() -> float:
        async with trio.open_nursery() as nursery:
            started = trio.current_time()
            nursery.start_soon(parts.migrator.flush, ROOT_INO, "nvme", 60.0)
            await trio.testing.wait_all_tasks_blocked()
            with parts.catalog.transaction():
                parts.catalog.put_replica(
                    Replica(attributes.ino, attributes.version, "nvme", ReplicaState.DURABLE, "2-1", 0, None)
                )
            parts.migrator._advanced()
        return trio.current_time() - started

    assert trio.run(use, clock=trio.testing.MockClock(autojump_threshold=0)) < 0.1


@pytest.mark.parametrize("rule", ["ack: ssd, drain: none", "drain: ssd", "drain: none"])
def test_a_file_that_a_full_tier_sent_below_its_rules_end_becomes_durable_there(tmp_path: Path, rule: str) -> None:
    parts = assemble(tmp_path, disks=("ssd", "hdd"), rules=f'[{{match: "**", {rule}}}]')
    parts.files.admission.place = lambda *args, **options: "hdd"  # type: ignore[method-assign]

    async def use() -> int:
        fh, attributes = parts.names.create(ROOT_INO, b"f", 0o644, os.O_RDWR, Caller(0, 0))
        parts.write(fh, 0, b"content")
        parts.files.release(fh)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator.run)
            with trio.fail_after(20):
                await parts.migrator.wait_durable(attributes.ino, attributes.version, "hdd")
                await parts.migrator.flush(ROOT_INO, "archive", 20.0)
            nursery.cancel_scope.cancel()
        return attributes.ino

    found = parts.catalog.replicas(trio.run(use))
    assert [(replica.tier, replica.state) for replica in found] == [("hdd", ReplicaState.DURABLE)]
    parts.close()


def test_a_file_that_fsync_waits_for_goes_before_all_that_was_closed_earlier(parts: Parts) -> None:
    count = 600

    async def use() -> int:
        for number in range(count + 1):
            fh, attributes = parts.names.create(ROOT_INO, b"%d" % number, 0o644, os.O_RDWR, Caller(0, 0))
            parts.write(fh, 0, b"content")
            parts.files.release(fh)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator.run)
            with trio.fail_after(20):
                await parts.migrator.wait_durable(attributes.ino, attributes.version, "nvme")
            left = len(parts.catalog.wanted_drains(count))
            nursery.cancel_scope.cancel()
        return left

    assert trio.run(use) > count // 2
    assert not parts.migrator.queue.awaited
