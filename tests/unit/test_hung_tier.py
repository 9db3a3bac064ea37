"""The whole daemon but its kernel, while a tier fails or hangs for ten minutes: nothing else waits, and in the end
everything is where it belongs. On a virtual clock; the hang itself is a thread that does not return."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from assembled import assemble
from trio.testing import MockClock

from tierfs.errors import FsError, TierError
from tierfs.fs.caller import Caller
from tierfs.fs.space import RemoteProbe
from tierfs.migrator import migrator
from tierfs.migrator.outage import Breaker
from tierfs.testing.faulty import Faults, by_root, faulty, install_data
from tierfs.types import ROOT_INO, ReplicaState

SIZE = 2 << 20
TEN_MINUTES = 600.0


def clock_of(world: World) -> MockClock:
    """Jumps when nothing happens any more, in threads either, but for those that hang."""
    clock = MockClock(autojump_threshold=0.001)
    jump = clock._autojump

    def jump_when_idle() -> None:
        if not world.busy():
            jump()

    clock._autojump = jump_when_idle  # type: ignore[method-assign]
    return clock


class World:
    """The parts, with a switch for each tier."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.faults = {name: Faults(seed=3, active=lambda: False) for name in ("nvme", "archive")}
        self.hung: set[str] = set()
        for name, faults in self.faults.items():
            faults.hangs = lambda name=name: name in self.hung  # type: ignore[misc]
        self.parts = assemble(top, lambda tier: faulty(tier, self.faults[tier.name]), limits="{tier_timeout: 20s}")
        monkeypatch.setattr(migrator, "WATCH_SECONDS", 5.0)
        monkeypatch.setattr(migrator, "WATCH_WRITERS_SECONDS", 5.0)
        space = self.parts.files.space
        self.probes = {name: RemoteProbe(space.probes[name]) for name in self.faults}
        space.probes = {**space.probes, **self.probes}
        install_data(by_root({f"{top}/{name}/": faults for name, faults in self.faults.items()}), monkeypatch.setattr)

    def busy(self) -> bool:
        lanes = self.parts.migrator.lanes
        stuck = {tier for tier in self.hung if self.faults[tier].inside}
        others = trio.to_thread.current_default_thread_limiter().borrowed_tokens
        threads = {tier: lane.busy for tier, lane in lanes.items()}
        for tier, limiter in self.parts.migrator.recaller._limiters.items():
            threads[tier] += limiter.borrowed_tokens
        for tier, probe in self.probes.items():
            threads[tier] += probe._limiter.borrowed_tokens
        return others > 0 or any(count for tier, count in threads.items() if tier not in stuck)

    def break_down(self, tier: str, code: int) -> None:
        faults = self.faults[tier]
        faults.rate, faults.errors, faults.active = 1.0, [code], lambda: True

    def repair(self) -> None:
        self.hung.clear()
        for faults in self.faults.values():
            faults.active = lambda: False

    def write(self, name: str, data: bytes) -> int:
        files = self.parts.files
        fh, attributes = self.parts.names.create(ROOT_INO, name.encode(), 0o644, os.O_RDWR, Caller(0, 0))
        self.parts.write(fh, 0, data)
        files.release(fh)
        return attributes.ino

    async def read(self, ino: int) -> bytes:
        fh = await self.parts.files.open(ino, os.O_RDONLY)
        try:
            return await self.parts.filesystem.read(fh, 0, SIZE)
        finally:
            self.parts.files.release(fh)

    def durable(self, ino: int) -> set[str]:
        return {r.tier for r in self.parts.catalog.replicas(ino) if r.state is ReplicaState.DURABLE}

    async def until(self, holds: Callable[[], bool]) -> None:
        with trio.fail_after(TEN_MINUTES):
            while not holds():  # noqa: ASYNC110 - asks the catalog, which tells nobody
                await trio.sleep(1)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with trio.open_nursery() as nursery:
                for probe in self.probes.values():
                    await nursery.start(probe.watch)
                nursery.start_soon(self.parts.migrator.run)
                try:
                    await main()
                finally:
                    self.repair()
                    with trio.move_on_after(60):
                        await self.until(lambda: not any(lane.hangs for lane in self.parts.migrator.lanes.values()))
                    nursery.cancel_scope.cancel()

        trio.run(whole, clock=clock_of(self))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    made.parts.close()


def data(seed: int) -> bytes:
    return random.Random(seed).randbytes(SIZE)


@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_a_hung_tier_costs_nothing_but_time(world: World, tier: str) -> None:
    other = ({"nvme", "archive"} - {tier}).pop()
    parts, faults = world.parts.migrator, world.faults[tier]

    async def main() -> None:
        first = world.write("first", data(0))
        await world.until(lambda: world.durable(first) == {"nvme", "archive"})
        before = threading.active_count()
        world.hung.add(tier)
        held = [world.write(f"f{n}", data(n)) for n in range(1, 12)]
        if tier == "nvme":
            await world.until(lambda: all(world.durable(ino) == {other} for ino in held))
        else:
            await world.until(lambda: all("nvme" in world.durable(ino) for ino in held))
        await world.until(lambda: parts.outages.state(tier) is not Breaker.CLOSED)
        assert parts.outages.silent(tier)
        most = 0
        with trio.move_on_after(TEN_MINUTES):
            while True:
                most = max(most, faults.inside)
                assert await world.read(held[0]) == data(1)
                assert parts.outages.state(other) is Breaker.CLOSED
                await trio.sleep(5)
        assert 1 <= most <= parts.lanes[tier].threads + 1, "calls and the look at its space"
        assert threading.active_count() - before < 40
        world.repair()
        await world.until(lambda: all(world.durable(ino) == {"nvme", "archive"} for ino in [first, *held]))
        for n, ino in enumerate([first, *held]):
            assert (world.top / "archive" / ("first" if not n else f"f{n}")).read_bytes() == data(n)
            assert await world.read(ino) == data(n)
        await world.until(lambda: parts.outages.state(tier) is Breaker.CLOSED)
        assert not any(lane.hangs for lane in parts.lanes.values())

    world.run(main)


@pytest.mark.parametrize("tier", ["nvme", "archive"])
@pytest.mark.parametrize("how", ["open", "truncate"])
def test_who_writes_to_a_file_does_not_wait_for_its_hung_copy(world: World, tier: str, how: str) -> None:
    """The copy's thread hangs in the tier with the file mapped: it must neither be waited for nor meet the cut."""
    files = world.parts.files

    async def main() -> None:
        world.faults[tier].only = frozenset({"write"})
        world.hung.add(tier)
        ino = world.write("f", data(1))
        await world.until(lambda: world.faults[tier].inside > 0)
        with trio.fail_after(5):
            if how == "truncate":
                await files.truncate(ino, 0)
            fh = await files.open(ino, os.O_RDWR)
            world.parts.write(fh, 0, data(2))
            files.release(fh)
        await trio.sleep(30)
        world.repair()
        await world.until(lambda: world.durable(ino) == {"nvme", "archive"})
        assert (world.top / "archive" / "f").read_bytes() == data(2)
        assert await world.read(ino) == data(2)

    world.run(main)


def test_reads_come_from_another_tier_than_one_that_hangs(world: World) -> None:
    """Only what is nowhere else gives EIO, after the policy's read_timeout."""
    files, evictor = world.parts.files, world.parts.migrator.evictor

    async def main() -> None:
        both, single = world.write("both", data(1)), world.write("single", data(2))
        await world.until(lambda: all(world.durable(ino) == {"nvme", "archive"} for ino in (both, single)))
        for ino in (both, single):
            assert evictor.evict(ino, 1, "memory")
        with world.parts.catalog.transaction():
            replica = world.parts.catalog.replica(single, 1, "archive")
            assert replica is not None
            world.parts.catalog.remove_replica(replica)
        world.hung.add("nvme")
        started = trio.current_time()
        assert await world.read(both) == data(1)
        assert trio.current_time() - started < 10
        started = trio.current_time()
        with world.parts.catalog.transaction():
            world.parts.files.forget_replica(
                next(r for r in world.parts.catalog.replicas(both) if r.tier == "memory")
            )
        assert await world.read(both) == data(1)
        assert trio.current_time() - started < 2, "that it hangs is known by now"
        started = trio.current_time()
        with pytest.raises((FsError, TierError, OSError)) as raised:
            await world.read(single)
        assert raised.value.errno in (errno.EIO, errno.ETIMEDOUT)
        assert trio.current_time() - started <= files.policy.limits.read_timeout + 1
        world.repair()
        await world.until(lambda: not world.parts.migrator.lanes["nvme"].hangs)
        assert await world.read(single) == data(2)

    world.run(main)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOSPC, errno.ETIMEDOUT])
@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_a_tier_that_answers_with_errors_is_asked_less_and_less(world: World, tier: str, code: int) -> None:
    async def main() -> None:
        world.break_down(tier, code)
        inos = [world.write(f"f{n}", data(n)) for n in range(4)]
        await trio.sleep(TEN_MINUTES)
        assert os.strerror(code) in world.parts.migrator.outages.last_errors[tier]
        assert sum(world.faults[tier].calls.values()) < 400, "a server that is down is not to be hammered"
        world.repair()
        await world.until(lambda: all(world.durable(ino) == {"nvme", "archive"} for ino in inos))
        await world.until(lambda: world.parts.migrator.outages.state(tier) is Breaker.CLOSED)

    world.run(main)


@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_a_tier_whose_mount_is_lost_is_left_alone_until_it_is_back(world: World, tier: str) -> None:
    where, aside = world.top / tier, world.top / "aside"

    async def main() -> None:
        first = world.write("first", data(0))
        await world.until(lambda: world.durable(first) == {"nvme", "archive"})
        where.rename(aside)
        where.mkdir()
        ino = world.write("f", data(1))
        await world.until(lambda: world.parts.migrator.outages.state(tier) is not Breaker.CLOSED)
        await trio.sleep(120)
        assert list(where.iterdir()) == [], "written beside the tier, into what is below its mountpoint"
        assert tier not in world.durable(ino)
        where.rmdir()
        shutil.copytree(aside, where)  # the same filesystem, mounted anew
        shutil.rmtree(aside)
        await world.until(lambda: world.durable(ino) == {"nvme", "archive"})
        assert await world.read(ino) == data(1)

    world.run(main)
