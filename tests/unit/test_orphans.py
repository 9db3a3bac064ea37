"""What a killed daemon left on the tiers goes while the next one works, and nothing else goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tierfs.catalog import Catalog
from tierfs.errors import CatalogError
from tierfs.migrator.migrator import Migrator
from tierfs.migrator.recovery import reclaim_orphans
from tierfs.policy.load import parse_policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.tree import TreeStore
from tierfs.types import Ino, Replica, ReplicaState

FIRST = 0x100
"""Keys up to this one are those of former daemons."""


def former(key: str) -> bool:
    return int(key.partition("-")[2], 16) <= FIRST


@pytest.mark.parametrize("many", [1, 300])
def test_only_orphans_of_former_daemons_go(tmp_path: Path, many: int) -> None:
    catalog = Catalog(tmp_path / "catalog")
    stores = {name: ReplicaStore(name, tmp_path / name, persistent=name == "nvme") for name in ("memory", "nvme")}
    for tier in stores.values():
        tier.prepare()
    kept, lost = set(), set()
    with catalog.transaction():
        for name, store in stores.items():
            for ino in range(2, 2 + many):
                named, orphan, new = f"{ino:x}-10", f"{ino:x}-20", f"{ino:x}-101"
                for key in (named, orphan, new):
                    os.close(store.create(key))
                catalog.put_replica(Replica(Ino(ino), 1, name, ReplicaState.WRITTEN, named, 0, None))
                kept |= {(name, named), (name, new)}
                lost.add((name, orphan))
        # A replica of another tier under the same key names no file here.
        os.close(stores["nvme"].create("2-30"))
        catalog.put_replica(Replica(Ino(2), 2, "memory", ReplicaState.WRITTEN, "2-30", 0, None))
    lost.add(("nvme", "2-30"))
    old = [store.temporary("2-40") for store in stores.values()]
    new = [store.temporary("2-102") for store in stores.values()]

    removed = trio.run(reclaim_orphans, catalog, stores, former)

    assert {(name, key) for name, store in stores.items() for key in store.keys()} == kept  # noqa: SIM118
    assert removed == len(lost) + len(old)
    assert all(os.fstat(temp.fd).st_nlink == 0 for temp in old)
    assert all(os.fstat(temp.fd).st_nlink == 1 for temp in new)
    for temp in old + new:
        temp.discard()
    catalog.close()
    for tier in stores.values():
        tier.close()


@pytest.fixture
def migrator(tmp_path: Path) -> Iterator[Migrator]:
    """Tiers memory, nvme and archive, with the file 2-1 on both local ones."""
    text = f"""
state: {tmp_path}/state
tiers:
  memory: {{kind: memory, path: {tmp_path}/memory}}
  nvme: {{kind: dir, path: {tmp_path}/nvme}}
  archive: {{kind: dir, path: {tmp_path}/archive}}
"""
    policy = parse_policy(text, "test")
    catalog = Catalog(tmp_path / "catalog")
    stores = {name: ReplicaStore(name, tmp_path / name, persistent=name == "nvme") for name in ("memory", "nvme")}
    tree = TreeStore("archive", tmp_path / "archive", None)
    for tier in (*stores.values(), tree):
        tier.prepare()
    for store in stores.values():
        os.close(store.create("2-1"))
    yield Migrator(catalog, policy, stores, tree)
    catalog.close()
    for tier in (*stores.values(), tree):
        tier.close()


def held(migrator: Migrator) -> list[str]:
    return [name for name, store in migrator.stores.items() if list(store.keys())]


def test_discarded_bytes_go_even_when_the_daemon_ends(migrator: Migrator) -> None:
    """The catalog has forgotten them, so no later daemon would know of them."""

    async def end() -> None:
        migrator.discard("nvme", "2-1")
        migrator.discard("memory", "2-1")
        with trio.CancelScope() as scope:
            scope.cancel()
            await migrator.remove_discarded()

    trio.run(end)
    assert held(migrator) == []


def test_bytes_on_a_disk_go_only_after_the_catalog_is_synced(
    migrator: Migrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the catalog would else name bytes of which only the removal came through."""
    seen: list[list[str]] = []

    async def sync() -> None:
        seen.append(held(migrator))
        if len(seen) == 1:
            raise CatalogError("disk full")

    async def remove() -> None:
        migrator.discard("memory", "2-1")
        migrator.discard("nvme", "2-1")
        await migrator.remove_discarded()
        seen.append(held(migrator))
        await migrator.remove_discarded()

    monkeypatch.setattr(migrator, "sync", sync)
    trio.run(remove, clock=trio.testing.MockClock(autojump_threshold=0.1))
    assert seen == [["nvme"], ["nvme"], ["nvme"]]
    assert held(migrator) == []
