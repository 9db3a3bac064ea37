"""Integrity: what is damaged is found, replaced from what is right, or listed; reads never give wrong bytes."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble

from tierfs.catalog import Catalog
from tierfs.catalog.damage import Scrub
from tierfs.errors import FsError, TierError
from tierfs.fs.caller import Caller
from tierfs.migrator.scrub import Report
from tierfs.migrator.throttle import Throttle
from tierfs.policy.model import ScrubConfig
from tierfs.testing.faulty import Faults, by_root, faulty, install_data
from tierfs.types import ROOT_INO, Replica, ReplicaState

DATA = b"0123456789abcdef" * (1 << 16)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def write(parts: Parts, name: bytes = b"f", data: bytes = DATA) -> int:
    fh, attributes = parts.names.create(ROOT_INO, name, 0o644, os.O_RDWR, Caller(0, 0))
    parts.write(fh, 0, data)
    parts.files.release(fh)
    return attributes.ino


async def read(parts: Parts, ino: int) -> bytes:
    fh = await parts.files.open(ino, os.O_RDONLY)
    try:
        return await parts.filesystem.read(fh, 0, 1 << 22)
    finally:
        parts.files.release(fh)


async def refused(parts: Parts, ino: int) -> bool:
    try:
        await read(parts, ino)
    except (FsError, TierError, OSError) as error:
        return error.errno == errno.EIO
    return False


def running(parts: Parts, main: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.migrator.run)
            with trio.fail_after(60):
                await main()
            nursery.cancel_scope.cancel()

    trio.run(whole)


async def settled(parts: Parts) -> None:
    await parts.migrator.flush(ROOT_INO, "archive", 30)
    while parts.catalog.wanted_drains(1):  # noqa: ASYNC110 - asks the catalog
        await trio.sleep(0.02)


async def scrub(parts: Parts, *tiers: str) -> Report:
    return await parts.migrator.scrubber.scrub(list(tiers or ("nvme", "archive")), None, lambda done, total: None)


def place(parts: Parts, ino: int, tier: str) -> Path:
    """The file of the replica on a tier."""
    if tier == "archive":
        path = parts.catalog.path_of(ino)
        assert path is not None
        return parts.tree.root / os.fsdecode(b"/".join(path))
    (found,) = [r for r in parts.catalog.replicas(ino) if r.tier == tier]
    fd = parts.stores[tier].open(found.key)
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


def flip(path: Path) -> None:
    """One bit, and nothing else that shows."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(777)
        byte = file.read(1)[0]
        file.seek(777)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, 1000)


def remove(path: Path) -> None:
    path.unlink()


def only_on(parts: Parts, ino: int, *tiers: str) -> None:
    """Every other replica goes, whether that is wise or not."""
    with parts.catalog.transaction():
        for replica in parts.catalog.replicas(ino):
            if replica.tier not in tiers:
                parts.files.forget_replica(replica)


def tiers(parts: Parts, ino: int) -> set[str]:
    return {r.tier for r in parts.catalog.replicas(ino) if r.state is ReplicaState.DURABLE or r.tier == "memory"}


@pytest.mark.parametrize("harm", [flip, cut, remove])
@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_a_bad_replica_is_replaced_from_a_good_one(
    parts: Parts, tier: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        ino, other = write(parts), write(parts, b"other")
        await settled(parts)
        harm(place(parts, ino, tier))
        report = await scrub(parts)
        assert (report.replaced, report.damaged, report.files) == (["f"], [], 4)
        assert report.bytes == 4 * len(DATA)
        await settled(parts)
        assert place(parts, ino, "archive").read_bytes() == DATA
        for keep in tiers(parts, ino) - {"memory"}:
            assert place(parts, ino, keep).read_bytes() == DATA
        assert "archive" in tiers(parts, ino)
        again = await scrub(parts)
        assert (again.replaced, again.damaged) == ([], [])
        assert await read(parts, other) == DATA

    running(parts, main)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith(f"tier {tier}: f ")
    assert "replaced from tier" in line


@pytest.mark.parametrize("tier", ["nvme", "archive"])
@pytest.mark.parametrize("harm", [flip, cut, remove])
def test_without_a_good_one_reads_give_eio_and_it_is_listed_once(
    parts: Parts, tier: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        ino = write(parts)
        await settled(parts)
        only_on(parts, ino, tier)
        await parts.migrator.remove_discarded()
        kept = place(parts, ino, tier)
        shutil.copy2(kept, parts.tree.root.parent / "kept")
        harm(kept)
        for _ in range(2):
            report = await scrub(parts)
            assert (report.replaced, report.damaged) == ([], ["f"])
        (found,) = parts.catalog.damaged(10)
        assert (found.ino, found.tier, parts.catalog.count_damaged()) == (ino, tier, 1)
        for _ in range(3):
            assert await refused(parts, ino)
        assert parts.migrator.running == {}
        shutil.copy2(parts.tree.root.parent / "kept", kept)
        assert await read(parts, ino) == DATA, "somebody put it back"
        assert parts.catalog.damaged(10) == []

    running(parts, main)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"tier {tier}: f ")
    assert lines[0].endswith("reading it gives EIO")


@pytest.mark.parametrize("how", ["rewritten", "deleted"])
def test_the_entry_goes_with_the_bytes(parts: Parts, how: str) -> None:
    async def main() -> None:
        ino = write(parts)
        await settled(parts)
        only_on(parts, ino, "archive")
        flip(place(parts, ino, "archive"))
        assert (await scrub(parts)).damaged == ["f"]
        if how == "deleted":
            parts.names.unlink(ROOT_INO, b"f", Caller(0, 0))
        else:
            fh = await parts.files.open(ino, os.O_WRONLY | os.O_TRUNC)
            parts.write(fh, 0, b"new" * 1000)
            parts.files.release(fh)
        assert parts.catalog.count_damaged() == 0
        await settled(parts)
        assert (await scrub(parts)).damaged == []
        if how == "rewritten":
            assert await read(parts, ino) == b"new" * 1000

    running(parts, main)


@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_what_a_recall_finds_to_be_wrong_is_replaced_without_a_scrub(parts: Parts, tier: str) -> None:
    """The read itself is served from the good one."""

    async def main() -> None:
        ino = write(parts)
        await settled(parts)
        good = "nvme" if tier == "archive" else "archive"
        only_on(parts, ino, tier, good)
        if tier == "nvme":
            cut(place(parts, ino, tier))
            assert await read(parts, ino) == DATA
        else:
            flip(place(parts, ino, tier))
            only_on(parts, ino, "archive")
            assert await refused(parts, ino)
        while not parts.catalog.damaged(1) and tier in tiers(parts, ino):  # noqa: ASYNC110 - asks the catalog
            await trio.sleep(0.05)
        assert parts.catalog.count_damaged() == (tier == "archive")

    running(parts, main)


def test_bits_that_flip_on_the_way_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(seed=5, spoil_rate=0.1, active=lambda: False)
    parts = assemble(tmp_path, lambda tier: faulty(tier, faults))
    install_data(by_root({f"{tmp_path}/nvme/": faults, f"{tmp_path}/archive/": faults}), monkeypatch.setattr)

    async def main() -> None:
        for number in range(40):
            write(parts, b"f%d" % number)
        await settled(parts)
        faults.active = lambda: True
        report = await scrub(parts)
        assert faults.struck["spoil"] > 3
        assert (report.files, report.replaced, report.damaged) == (80, [], [])
        faults.active = lambda: False

    running(parts, main)
    parts.close()


def test_a_lost_mount_is_no_damage(parts: Parts, tmp_path: Path) -> None:
    async def main() -> None:
        inos = [write(parts, b"f%d" % number) for number in range(3)]
        await settled(parts)
        (tmp_path / "archive").rename(tmp_path / "aside")
        (tmp_path / "archive").mkdir()
        report = await scrub(parts, "archive")
        assert (report.files, report.damaged, report.replaced, len(report.skipped)) == (0, [], [], 1)
        assert all("archive" in tiers(parts, ino) for ino in inos)
        (tmp_path / "archive").rmdir()
        (tmp_path / "aside").rename(tmp_path / "archive")
        assert (await scrub(parts, "archive")).files == 3

    running(parts, main)


def test_a_bad_copy_protects_nothing_from_eviction(parts: Parts) -> None:
    """As long as the archive's copy is being made again, the good one in memory must not go."""

    async def main() -> None:
        ino = write(parts)
        await settled(parts)
        only_on(parts, ino, "memory", "archive")
        flip(place(parts, ino, "archive"))
        parts.migrator.paused = True
        assert (await scrub(parts, "archive")).replaced == ["f"]
        assert not parts.migrator.evictor.evict(ino, 1, "memory")
        parts.migrator.paused = False
        parts.migrator.kick()
        await settled(parts)
        assert parts.migrator.evictor.evict(ino, 1, "memory")
        assert await read(parts, ino) == DATA

    running(parts, main)


def test_a_replica_in_use_is_replaced_once_it_is_closed(parts: Parts) -> None:
    async def main() -> None:
        ino = write(parts)
        await settled(parts)
        only_on(parts, ino, "nvme", "archive")
        fh = await parts.files.open(ino, os.O_RDONLY)
        flip(place(parts, ino, "nvme"))
        assert (await scrub(parts, "nvme")).damaged == ["f"]
        parts.files.release(fh)
        assert await read(parts, ino) == DATA, "from the archive"
        assert (await scrub(parts, "nvme")).replaced == ["f"]
        assert parts.catalog.count_damaged() == 0

    running(parts, main)


def test_an_ack_tiers_own_replica_gets_its_digest_at_the_first_reading(parts: Parts) -> None:
    async def main() -> None:
        ino = write(parts)
        await settled(parts)
        only_on(parts, ino, "nvme")
        (replica,) = parts.catalog.replicas(ino)
        with parts.catalog.transaction():
            parts.catalog.put_replica(replica._replace(digest=None))
        assert (await scrub(parts, "nvme")).damaged == []
        (after,) = parts.catalog.replicas(ino)
        assert after == replica
        flip(place(parts, ino, "nvme"))
        assert (await scrub(parts, "nvme")).damaged == ["f"]

    running(parts, main)


def test_the_rate_is_kept(parts: Parts) -> None:
    async def main() -> None:
        for number in range(4):
            write(parts, b"f%d" % number)
        await settled(parts)
        started = time.monotonic()
        await parts.migrator.scrubber.scrub(["nvme"], len(DATA) * 4, lambda done, total: None)
        assert time.monotonic() - started >= 0.7

    running(parts, main)


# the schedule


def scheduled(parts: Parts, every: float) -> None:
    object.__setattr__(parts.migrator.policy, "scrub", ScrubConfig(every, None))


def test_a_schedule_reads_each_tier_once_in_its_time(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.time_ns()]
    monkeypatch.setattr("tierfs.migrator.scrub.time.time_ns", lambda: now[0])
    scrubber = parts.migrator.scrubber
    scheduled(parts, 1000.0)
    assert scrubber._due() == [], "a new mount has nothing that could have decayed"
    now[0] += 999 * 10**9
    assert scrubber._due() == []
    assert scrubber._next() == pytest.approx(1.0)
    now[0] += 2 * 10**9
    assert scrubber._due() == ["nvme", "archive"]
    scheduled(parts, float("inf"))
    assert scrubber._due() == []


def test_a_pass_goes_on_where_the_last_daemon_stopped(parts: Parts, tmp_path: Path) -> None:
    inos: list[int] = []

    async def first() -> None:
        inos.extend(write(parts, b"f%d" % number) for number in range(6))
        await settled(parts)
        scheduled(parts, 1000.0)
        parts.migrator.scrubber._note(Scrub("nvme", inos[2], 1, 2, 1))

    running(parts, first)
    parts.catalog.commit()
    known = parts.catalog.scrub_of("nvme")
    assert known is not None
    assert (known.ino, known.began_ns > known.finished_ns) == (inos[2], True)
    report = Report()

    async def second() -> None:
        scrubber = parts.migrator.scrubber
        assert "nvme" in scrubber._due()
        await scrubber._read_all("nvme", Throttle(None), report, lambda done, total: None, held=False)

    running(parts, second)
    assert report.files == 3
    done = parts.catalog.scrub_of("nvme")
    assert done is not None
    assert (done.ino, done.finished_ns > done.began_ns) == (0, True)


def test_an_older_catalog_of_this_format_gets_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "catalog"
    catalog = Catalog(path)
    with catalog.transaction():
        catalog._write("DROP TABLE damage")
        catalog._write("DROP TABLE scrubs")
    catalog.close()
    catalog = Catalog(path)
    replica = Replica(ROOT_INO, 1, "nvme", ReplicaState.DURABLE, "1-1", 1, b"d" * 16)
    with catalog.transaction():
        catalog.put_damage(replica, "x", 1)
    assert catalog.is_damaged(replica)
    assert not catalog.is_damaged(replica._replace(key="1-2"))
    catalog.close()
