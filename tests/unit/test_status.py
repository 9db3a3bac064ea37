"""The sums that status shows for each tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble

from tierfs.cli import render
from tierfs.fs.caller import Caller
from tierfs.operations import Json
from tierfs.types import ROOT_INO, Replica, ReplicaState

KIB = 1024


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path)
    yield made
    made.close()


def status(parts: Parts) -> Json:
    async def progress(done: int, total: int, what: str) -> None:
        pass

    return trio.run(parts.operations().status, {}, progress)


def sums(parts: Parts) -> dict[str, tuple[int, int, int, int]]:
    """Tier → (used, clean, dirty, open) in KiB."""
    keys = ("used", "clean", "dirty", "open")
    found = {tier["name"]: tuple(tier[key] // KIB for key in keys) for tier in status(parts)["tiers"]}
    for used, clean, dirty, opened in found.values():
        assert used == clean + dirty + opened
    return found


def write(parts: Parts, name: bytes, size: int) -> tuple[int, int]:
    """(inode, handle) of a new file with ``size`` KiB, open for writing."""
    fh, attributes = parts.names.create(ROOT_INO, name, 0o644, os.O_RDWR, Caller(0, 0))
    parts.write(fh, 0, b"x" * size * KIB)
    return attributes.ino, fh


def durable(parts: Parts, ino: int, tier: str) -> None:
    """What a drain does to the catalog."""
    source = next(r for r in parts.catalog.replicas(ino) if r.tier == "memory")
    with parts.catalog.transaction():
        parts.catalog.put_replica(
            Replica(source.ino, source.version, tier, ReplicaState.DURABLE, "", source.size, b"d" * 16)
        )


def test_open_then_dirty_then_clean(parts: Parts) -> None:
    ino, fh = write(parts, b"f", 64)
    assert sums(parts)["memory"] == (64, 0, 0, 64)
    parts.files.release(fh)
    assert sums(parts)["memory"] == (64, 0, 64, 0)
    durable(parts, ino, "nvme")
    assert sums(parts) == {"memory": (64, 64, 0, 0), "nvme": (64, 64, 0, 0), "archive": (0, 0, 0, 0)}
    durable(parts, ino, "archive")
    assert sums(parts) == {"memory": (64, 64, 0, 0), "nvme": (64, 64, 0, 0), "archive": (64, 64, 0, 0)}
    with parts.catalog.transaction():
        parts.files.forget_replica(next(r for r in parts.catalog.replicas(ino) if r.tier == "memory"))
    assert sums(parts)["memory"] == (0, 0, 0, 0)


def test_appended_to_a_clean_file(parts: Parts) -> None:
    ino, fh = write(parts, b"f", 64)
    parts.files.release(fh)
    durable(parts, ino, "archive")
    fh = trio.run(parts.files.open, ino, os.O_WRONLY)
    parts.write(fh, 64 * KIB, b"y" * 16 * KIB)
    assert sums(parts)["memory"] == (80, 0, 0, 80)
    assert sums(parts)["archive"] == (64, 64, 0, 0)
    parts.files.release(fh)
    assert sums(parts)["memory"] == (80, 0, 80, 0)


def test_synced_while_it_stays_open_is_counted_once(parts: Parts) -> None:
    ino, fh = write(parts, b"f", 64)
    parts.files.take_snapshot(parts.files.inodes[ino])
    assert sums(parts)["memory"] == (64, 0, 64, 0)
    parts.files.release(fh)
    assert sums(parts)["memory"] == (64, 0, 64, 0)


def test_a_size_set_ahead_takes_no_space(parts: Parts) -> None:
    _, fh = write(parts, b"f", 64)
    os.ftruncate(parts.files.handles[fh].inode.fd, 8 << 20)
    assert sums(parts)["memory"][3] in range(64, 2049)


def test_bytes_of_open_files_count_for_placing_the_next(parts: Parts) -> None:
    """In mode passthrough nobody tells the daemon that a file grew."""
    write(parts, b"f", 60 * KIB)
    parts.files.measure()
    usage = parts.files.space.usage("memory")
    assert usage.used == 60 << 20
    assert usage.available <= usage.capacity - usage.used


def test_what_is_durable_nowhere_is_told_apart_by_what_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reboot takes what is in memory alone; what lies on a disk and is not synced it does not take."""
    parts = assemble(tmp_path, rules='[{match: "*.log", ack: nvme}]')

    def told() -> tuple[int, int, int]:
        drain = status(parts)["drain"]
        assert drain["unsynced_bytes"] == drain["memory_bytes"] + drain["unsynced_disk_bytes"]
        return drain["unsynced_bytes"] // KIB, drain["memory_bytes"] // KIB, drain["unsynced_disk_bytes"] // KIB

    assert told() == (0, 0, 0)
    begun: list[tuple[int, int]] = []

    async def begin() -> None:
        begun.extend((write(parts, b"a.log", 16), write(parts, b"f", 64)))

    trio.run(begin)
    (log, log_fh), (ino, fh) = begun
    assert told() == (80, 64, 16), "open"
    parts.files.release(log_fh)
    parts.files.release(fh)
    assert told() == (80, 64, 16), "closed"
    render.status(status(parts))
    line = "durable nowhere yet: 80KiB (64KiB in memory alone, 16KiB on disks and not synced)"
    assert line in capsys.readouterr().out
    durable(parts, ino, "nvme")
    assert told() == (16, 0, 16)
    (replica,) = parts.catalog.replicas(log)
    with parts.catalog.transaction():
        parts.catalog.put_replica(replica._replace(state=ReplicaState.DURABLE))
    assert told() == (0, 0, 0)
    parts.close()
