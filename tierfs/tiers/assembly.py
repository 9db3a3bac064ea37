"""All tiers of a policy, opened and prepared together."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tierfs.errors import ConfigError
from tierfs.policy.model import Policy, TierConfig
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.kinds import Tree
from tierfs.tiers.memory import MemoryMount, open_store
from tierfs.tiers.object_tree import ObjectTree
from tierfs.tiers.tree import TreeStore
from tierfs.tiers.wrap import retrying
from tierfs.types import Usage


@dataclass
class Tiers:
    stores: dict[str, ReplicaStore]
    tree: Tree
    mounts: list[MemoryMount]

    @classmethod
    def open(cls, policy: Policy, *, later: bool = False) -> Tiers:
        """Open and prepare every tier, mounting the memory tiers that tierfs owns. With ``later`` an object store is
        not asked yet: its driver has threads, which a process that is to be forked must not have."""
        stores: dict[str, ReplicaStore] = {}
        mounts: list[MemoryMount] = []
        for config in policy.tiers[:-1]:
            store, mount = open_store(config, policy.state / "memory" / config.name)
            store.prepare()
            stores[config.name] = retrying(store) if config.persistent else store
            if mount is not None:
                mounts.append(mount)
        tree = open_archive(policy.tiers[-1])
        tiers = cls(stores, tree, mounts)
        if not (later and isinstance(tree, ObjectTree)):
            tiers.prepare_archive()
        return tiers

    def prepare_archive(self) -> None:
        """Create or check the archive, if `open` left that for later. Raises TierError."""
        if not self.tree.uuid:
            self.tree.prepare()

    @property
    def every(self) -> list[ReplicaStore | Tree]:
        """Fastest first, the archive last."""
        return [*self.stores.values(), self.tree]

    def close(self) -> None:
        """Let go of all directories."""
        for tier in self.every:
            tier.close()

    def check_catalog(self, catalog: str, known: Collection[str], *, claim: bool) -> None:
        """Refuse when a tier holds the files of another catalog than the one with this uuid, or when one of the
        ``known`` tiers, where the catalog has files, holds nothing of it. With ``claim`` tiers that have no catalog yet
        become this one's. Raises TierError."""
        tiers = self.every
        for tier in tiers:  # all of them before the first is changed
            tier.check_catalog(catalog, claim=False, known=tier.name in known)
        if claim:
            for tier in tiers:
                tier.check_catalog(catalog, claim=True)

    def take_back(self) -> None:
        """A mount that is refused leaves no memory tier behind. Raises TierError."""
        for mount in self.mounts:
            if mount.fresh:
                mount.unmount()

    def probes(self) -> dict[str, Callable[[int], Usage]]:
        probes: dict[str, Callable[[int], Usage]] = {name: store.usage for name, store in self.stores.items()}
        probes[self.tree.name] = self.tree.usage
        return probes


def open_archive(config: TierConfig) -> Tree:
    """The last tier, not yet prepared. Asks nothing of it. Raises ConfigError."""
    if config.kind == "object":
        assert config.url is not None
        return object_tree(
            config.name, config.url, endpoint=config.endpoint, region=config.region, size=config.size
        )
    assert config.path is not None
    kind = TreeStore if config.layout == "tree" else chunked_store()
    return kind(config.name, config.path, config.size)


def object_tree(
    name: str, url: str, *, endpoint: str | None = None, region: str | None = None, size: int | None = None
) -> ObjectTree:
    """An archive in an object store, whose driver is imported only for it. Asks nothing of it. Raises ConfigError."""
    try:
        from tierfs.tiers.objects import ObjectBlobs
    except ImportError as error:
        raise ConfigError(f"kind object needs {error.name}; pip install 'tierfs[object]'") from error
    blobs = ObjectBlobs.open(name, url, endpoint=endpoint, region=region, size=size)
    return ObjectTree(blobs, url)


def chunked_store() -> type[TreeStore]:
    """The class of archives with layout chunks: imported only for them. Raises ConfigError."""
    # numpy's BLAS, of which nothing is used, would start threads: in a keeper, which forks.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from tierfs.tiers.chunked import ChunkedStore
    except ImportError as error:
        raise ConfigError(f"layout chunks needs {error.name}; pip install 'tierfs[chunks]'") from error
    return ChunkedStore
