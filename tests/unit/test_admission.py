"""Who may write where: room that is promised, bytes that a reboot would take, and who waits for how long."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
from assembled import Parts, assemble

from tierfs.errors import FsError
from tierfs.fs.admission import FRESH, LOOK, PATIENCE, STALL, WAITING, NoRelief
from tierfs.fs.caller import Caller
from tierfs.fs.space import LEAST
from tierfs.plan.placement import role_of
from tierfs.types import ROOT_INO, Replica, ReplicaState, Usage

MIB = 1 << 20
ME = Caller(0, 0)


@dataclass
class Drains(NoRelief):
    """A migrator that does what the test says."""

    going: bool = True
    bytes: int = 0
    pressed: int = 0
    asked: list[str] = field(default_factory=list)

    def expected(self) -> bool:
        return self.going

    def copied(self) -> int:
        return self.bytes

    def press(self, more: int) -> None:
        self.pressed += more

    def drop(self, tier: str, size: int) -> bool:
        self.asked.append(tier)
        return False


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path, limits="{unsynced: 32MiB}")
    yield made
    made.close()


@pytest.fixture
def drains(parts: Parts) -> Drains:
    made = Drains()
    parts.files.admission.relief = made
    return made


def run(use: Callable[[], Coroutine[object, object, object]]) -> float:
    """Seconds of the virtual clock that it took."""

    async def timed() -> float:
        began = trio.current_time()
        await use()
        return trio.current_time() - began

    return trio.run(timed, clock=trio.testing.MockClock(autojump_threshold=0))


def learn(parts: Parts, suffix: str, size: int) -> None:
    parts.files.space.learned.learn(role_of(0, (b"any." + suffix.encode(),)), size)


async def create(parts: Parts, name: str) -> tuple[int, str]:
    """(handle, tier)"""
    fh, _ = await parts.filesystem.create(ROOT_INO, name.encode(), 0o644, os.O_RDWR, ME)
    return fh, parts.files.handles[fh].inode.replica.tier


def fill(parts: Parts, fh: int, size: int) -> None:
    os.pwrite(parts.files.handles[fh].inode.fd, b"x" * size, 0)


def durable(parts: Parts, name: str, tier: str = "nvme") -> None:
    """What a drain does to the catalog."""
    found = parts.names.lookup(ROOT_INO, name.encode())
    assert found is not None
    replica = Replica(found.ino, found.version, tier, ReplicaState.DURABLE, "", found.size, b"d" * 16)
    with parts.catalog.transaction():
        parts.catalog.put_replica(replica)


# room


def test_files_created_at_once_do_not_count_on_the_same_room(tmp_path: Path) -> None:
    """Sixteen ranks begin their shards before the first byte of any is written."""
    parts = assemble(tmp_path)  # memory of 64 MiB, up to 85 %
    learn(parts, "pt", 20 * MIB)

    async def ranks() -> None:
        tiers = [(await create(parts, f"{rank}.pt"))[1] for rank in range(4)]
        assert tiers == ["memory", "memory", "nvme", "nvme"]

    run(ranks)
    parts.close()


def test_a_promise_shrinks_as_the_file_grows_and_ends_with_it(tmp_path: Path) -> None:
    parts = assemble(tmp_path)
    learn(parts, "pt", 20 * MIB)
    space = parts.files.space

    async def use() -> None:
        fh, _ = await create(parts, "a.pt")
        assert (space.coming("memory"), space.grown("memory")) == (20 * MIB, 0)
        fill(parts, fh, 5 * MIB)
        parts.files.measure()
        assert (space.coming("memory"), space.grown("memory")) == (15 * MIB, 5 * MIB)
        assert space.usage("memory").used == 5 * MIB
        assert space.outlook("memory").used == 20 * MIB
        parts.files.release(fh)
        assert (space.coming("memory"), space.grown("memory"), space.usage("memory").used) == (0, 0, 5 * MIB)

    run(use)
    parts.close()


def test_a_size_set_ahead_is_a_promise(tmp_path: Path) -> None:
    """safetensors."""
    parts = assemble(tmp_path)

    async def use() -> None:
        fh, _ = await create(parts, "a")
        os.ftruncate(parts.files.handles[fh].inode.fd, 50 * MIB)
        parts.files.measure()
        assert parts.files.space.coming("memory") == 50 * MIB
        assert (await create(parts, "b"))[1] == "memory"
        learn(parts, "pt", 20 * MIB)
        assert (await create(parts, "c.pt"))[1] == "nvme"
        os.ftruncate(parts.files.handles[fh].inode.fd, 1 << 40)  # a sparse file that nobody means to fill
        parts.files.measure()
        assert parts.files.space.coming("memory") < 50 * MIB

    run(use)
    parts.close()


def test_clean_copies_leave_for_a_file_that_they_would_keep_out(tmp_path: Path) -> None:
    parts = assemble(tmp_path)
    learn(parts, "pt", 40 * MIB)

    async def use() -> None:
        fh, _ = await create(parts, "old")
        fill(parts, fh, 30 * MIB)
        parts.files.release(fh)
        durable(parts, "old")
        assert (await create(parts, "new.pt"))[1] == "memory"

    run(use)
    parts.close()


# what a reboot would take


def test_over_the_limit_a_create_waits_for_the_drains(parts: Parts, drains: Drains) -> None:
    learn(parts, "pt", 20 * MIB)

    async def use() -> None:
        fh, tier = await create(parts, "a.pt")
        assert tier == "memory"
        fill(parts, fh, 20 * MIB)
        parts.files.release(fh)
        async with trio.open_nursery() as nursery:

            async def drain() -> None:
                await trio.sleep(STALL / 2)
                assert drains.pressed == 1, "drains hurry while somebody waits"
                assert parts.names.lookup(ROOT_INO, b"a.pt") is not None, "others are served meanwhile"
                durable(parts, "a.pt")

            nursery.start_soon(drain)
            _, tier = await create(parts, "b.pt")
            assert tier == "memory"
        assert drains.pressed == 0

    assert STALL / 2 <= run(use) < STALL


def test_a_create_that_waits_goes_one_tier_down_when_drains_are_paused(parts: Parts, drains: Drains) -> None:
    learn(parts, "pt", 20 * MIB)

    async def use() -> None:
        await create(parts, "a.pt")
        async with trio.open_nursery() as nursery:

            async def pause() -> None:
                await trio.sleep(0.5)
                drains.going = False

            nursery.start_soon(pause)
            assert (await create(parts, "b.pt"))[1] == "nvme"
        assert (await create(parts, "c.pt"))[1] == "nvme", "and at once"

    assert run(use) < 0.5 + 2 * LOOK


def test_drains_that_do_not_get_on_are_not_waited_for(parts: Parts, drains: Drains) -> None:
    learn(parts, "pt", 20 * MIB)

    async def use() -> None:
        await create(parts, "a.pt")
        assert (await create(parts, "b.pt"))[1] == "nvme"

    assert STALL <= run(use) < STALL + 3 * LOOK


def test_slow_drains_are_waited_for_only_so_long(parts: Parts, drains: Drains) -> None:
    learn(parts, "pt", 20 * MIB)

    async def use() -> None:
        await create(parts, "a.pt")
        async with trio.open_nursery() as nursery:

            async def creep() -> None:
                while True:
                    await trio.sleep(STALL / 2)
                    drains.bytes += 1

            nursery.start_soon(creep)
            assert (await create(parts, "b.pt"))[1] == "nvme"
            nursery.cancel_scope.cancel()

    assert PATIENCE <= run(use) < PATIENCE + 3 * LOOK


def test_what_alone_exceeds_the_limit_does_not_wait(parts: Parts, drains: Drains) -> None:
    learn(parts, "pt", 33 * MIB)

    async def use() -> None:
        assert (await create(parts, "a.pt"))[1] == "nvme"

    assert run(use) == 0


def test_only_so_many_wait(parts: Parts, drains: Drains) -> None:
    learn(parts, "pt", 20 * MIB)

    async def use() -> None:
        await create(parts, "a.pt")
        async with trio.open_nursery() as nursery:
            for number in range(WAITING):
                nursery.start_soon(create, parts, f"{number}.pt")
            await trio.testing.wait_all_tasks_blocked()
            assert parts.files.admission.waiting == WAITING
            with trio.fail_after(LOOK / 2):
                assert (await create(parts, "more.pt"))[1] == "nvme"

    run(use)


def test_without_a_tier_below_a_file_waits_and_then_is_let_in(tmp_path: Path) -> None:
    parts = assemble(tmp_path, limits="{unsynced: 32MiB}", disks=())
    drains = parts.files.admission.relief = Drains()
    learn(parts, "pt", 20 * MIB)

    async def use() -> None:
        await create(parts, "a.pt")
        assert (await create(parts, "b.pt"))[1] == "memory"
        drains.going = False
        assert (await create(parts, "c.pt"))[1] == "memory", "never an error while a tier has room"

    assert STALL <= run(use) < STALL + 3 * LOOK
    parts.close()


def test_what_is_durable_does_not_count_and_evicting_it_changes_nothing(parts: Parts, drains: Drains) -> None:
    admission = parts.files.admission

    async def use() -> None:
        for name in ("a", "b"):
            fh, _ = await create(parts, name)
            fill(parts, fh, 10 * MIB)
            parts.files.release(fh)
        durable(parts, "a")
        await trio.sleep(1)
        assert admission.unsynced() == 10 * MIB
        clean = next(r for r in parts.catalog.replicas_on("memory") if r.ino == parts.names.lookup(ROOT_INO, b"a").ino)  # type: ignore[union-attr]
        with parts.catalog.transaction():
            parts.files.forget_replica(clean)
        assert admission.unsynced() == 10 * MIB, "although nothing was counted anew"
        await trio.sleep(1)
        assert admission.unsynced() == 10 * MIB

    run(use)


def test_a_clean_file_opened_for_writing_counts_again(parts: Parts, drains: Drains) -> None:
    """Its whole content is a version that nothing but memory has."""

    async def use() -> None:
        for name, size in (("a.x", 30), ("b.y", 20)):
            fh, _ = await create(parts, name)
            fill(parts, fh, size * MIB)
            parts.files.release(fh)
            if name == "a.x":
                durable(parts, name)
                await trio.sleep(2 * FRESH)
        drains.going = False
        found = parts.names.lookup(ROOT_INO, b"a.x")
        assert found is not None
        fh = await parts.files.open(found.ino, os.O_RDWR)
        inode = parts.files.handles[fh].inode
        assert inode.replica.tier == "nvme"
        assert os.pread(inode.fd, 30 * MIB, 0) == b"x" * 30 * MIB
        durable_there = [r for r in parts.catalog.replicas(found.ino) if r.state is ReplicaState.DURABLE]
        assert [r.version for r in durable_there] == [found.version], "the durable version stays beside it"

    trio.run(use)  # the clock of its threads


# every tier full


def test_no_truncating_open_while_every_tier_is_full(
    parts: Parts, drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would throw away could not be replaced by a single byte."""
    drains.going = False

    async def use() -> None:
        fh, _ = await create(parts, "a")
        fill(parts, fh, MIB)
        parts.files.release(fh)
        durable(parts, "a")
        found = parts.names.lookup(ROOT_INO, b"a")
        assert found is not None
        with parts.catalog.transaction():  # evicted: nothing would be freed by the truncation
            parts.catalog.remove_replica(next(r for r in parts.catalog.replicas(found.ino) if r.tier == "memory"))
        with monkeypatch.context() as full:
            full.setattr(parts.files.space, "outlook", lambda tier: Usage(MIB, MIB, LEAST - 1))
            with pytest.raises(FsError, match="every tier is full"):
                await parts.files.open(found.ino, os.O_WRONLY | os.O_TRUNC)
            assert parts.catalog.attributes(found.ino) == found, "as it was"
        fh = await parts.files.open(found.ino, os.O_WRONLY | os.O_TRUNC)
        parts.files.release(fh)

    run(use)
