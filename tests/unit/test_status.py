"""The sums that status shows for each tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from assembled import Parts, assemble

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
