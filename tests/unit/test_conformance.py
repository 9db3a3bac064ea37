"""Every kind of tier, and what wraps them, keeps the contracts of tierfs.testing.conformance on every filesystem."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierfs.testing.conformance import ReplicaStoreContract, TreeStoreContract
from tierfs.testing.faulty import Faults, faulty
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.tree import TreeStore
from tierfs.tiers.wrap import retrying

STORES: dict[str, Callable[[ReplicaStore], ReplicaStore]] = {
    "plain": lambda store: store,
    "retrying": retrying,
    "faulty without faults": lambda store: faulty(store, Faults()),
    "retrying a faulty one": lambda store: retrying(
        faulty(store, Faults(seed=1, rate=0.1, only=frozenset({"open", "size", "remove", "usage", "is_written"})))
    ),
}


class TestReplicaStore(ReplicaStoreContract):
    @pytest.fixture(params=STORES)
    def tier(self, request: pytest.FixtureRequest, disk: Path) -> Iterator[ReplicaStore]:
        root = disk / "tier"
        made = STORES[request.param](ReplicaStore("nvme", root, persistent=True))
        made.prepare()
        yield made
        made.close()
        shutil.rmtree(root)


class TestTreeStore(TreeStoreContract):
    @pytest.fixture(params=["plain", "faulty without faults"])
    def tier(self, request: pytest.FixtureRequest, disk: Path) -> Iterator[TreeStore]:
        root = disk / "archive"
        store = TreeStore("archive", root)
        made = store if request.param == "plain" else faulty(store, Faults())
        made.prepare()
        yield made
        made.close()
        shutil.rmtree(root)
