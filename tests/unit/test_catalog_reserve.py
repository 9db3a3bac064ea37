"""A catalog on a full disk goes on in the room that it kept, so that what fills the disk can be removed at all."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest_disks import can_mount_loops, loop_disk
from tierfs.catalog import Catalog, MendableCatalog
from tierfs.catalog.reserve import NAME, SIZE
from tierfs.errors import CatalogError
from tierfs.types import ROOT_INO

KILLED = """
import os, sys
from pathlib import Path
from tierfs.catalog import Catalog
catalog = Catalog(Path(sys.argv[1]))
with catalog.transaction():
    catalog.set_xattr(1, b"user.killed", bytes(300_000))
catalog.commit()
with catalog.transaction():
    catalog.set_xattr(1, b"user.uncommitted", bytes(300_000))
os._exit(0)
"""


@pytest.fixture(params=["ext4", "xfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk that a test can really fill."""
    if not can_mount_loops(f"mkfs.{request.param}"):
        pytest.skip("needs root and mkfs")
    with loop_disk(tmp_path / "loop", request.param, {"ext4": 64 << 20, "xfs": 320 << 20}[request.param]) as mountpoint:
        yield mountpoint


def fill(disk: Path) -> int:
    """Take all that is left, to the last block; how much that was."""
    taken = 0
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    taken += file.write(bytes(size))
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())
        with pytest.raises(OSError, match="No space") as full:
            file.write(bytes(1 << 16))
    assert full.value.errno == errno.ENOSPC
    return taken


def change(catalog: Catalog, size: int, times: int = 1) -> None:
    for number in range(times):
        with catalog.transaction():
            catalog.set_xattr(ROOT_INO, b"user.%d" % number, os.urandom(size))
        catalog.commit()
        catalog.sync()


def test_commits_go_on_in_the_reserve_of_a_full_disk_and_nobody_else_gets_it(small: Path) -> None:
    catalog = Catalog(small / "catalog")
    assert (small / NAME).stat().st_blocks * 512 >= SIZE
    fill(small)
    change(catalog, 10_000)
    assert (small / NAME).stat().st_size == 0
    assert fill(small) < SIZE / 4
    change(catalog, 100_000, 20)
    with pytest.raises(CatalogError, match="full"):
        change(catalog, 100_000, 200)
    (small / "filler").unlink()
    change(catalog, 100_000)
    catalog.checkpoint()
    assert (small / NAME).stat().st_blocks * 512 >= SIZE, "there is room: kept for the next time"
    catalog.close()


def test_a_catalog_is_opened_and_closed_on_a_full_disk_again_and_again(small: Path) -> None:
    Catalog(small / "catalog").close()
    for kind in 4 * (Catalog, MendableCatalog):
        fill(small)
        catalog = kind(small / "catalog", verify=True)
        fill(small)
        change(catalog, 10_000, 4)
        catalog.close()


def test_a_catalog_whose_daemon_was_killed_on_a_full_disk_is_opened(small: Path) -> None:
    catalog = Catalog(small / "catalog")
    catalog.close()
    fill(small)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, small / "catalog"], check=True, timeout=60)
        fill(small)
    catalog = Catalog(small / "catalog", verify=True)
    assert {b"user.killed", b"user.uncommitted"} <= {name for name, _ in catalog.xattrs(ROOT_INO)}
    change(catalog, 10_000, 4)
    catalog.close()


def test_a_bulk_transaction_on_a_full_disk_has_the_reserve(small: Path) -> None:
    catalog = Catalog(small / "catalog")
    fill(small)
    with catalog.bulk():
        for number in range(10):
            catalog.set_xattr(ROOT_INO, b"user.%d" % number, bytes(60_000))
    catalog.sync()
    catalog.close()


def test_a_disk_without_room_for_a_reserve_has_none(small: Path) -> None:
    Catalog(small / "catalog").close()
    (small / NAME).unlink()
    fill(small)
    with pytest.raises(CatalogError, match=r"full|unable"):
        change(Catalog(small / "catalog"), 10_000, 100)
