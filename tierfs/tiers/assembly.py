"""All tiers of a policy, opened and prepared together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tierfs.errors import ConfigError
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.memory import MemoryMount, open_store
from tierfs.tiers.tree import TreeStore
from tierfs.tiers.wrap import retrying
from tierfs.types import Usage


@dataclass
class Tiers:
    stores: dict[str, ReplicaStore]
    tree: TreeStore
    mounts: list[MemoryMount]

    @classmethod
    def open(cls, policy: Policy) -> Tiers:
        """Open and prepare every tier, mounting the memory tiers that tierfs owns."""
        stores: dict[str, ReplicaStore] = {}
        mounts: list[MemoryMount] = []
        for config in policy.tiers[:-1]:
            store, mount = open_store(config, policy.state / "memory" / config.name)
            store.prepare()
            stores[config.name] = retrying(store) if config.persistent else store
            if mount is not None:
                mounts.append(mount)
        archive = policy.tiers[-1]
        assert archive.path is not None
        kind = TreeStore if archive.layout == "tree" else chunked_store()
        tree = kind(archive.name, archive.path, archive.size)
        tree.prepare()
        return cls(stores, tree, mounts)

    @property
    def every(self) -> list[ReplicaStore | TreeStore]:
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


def chunked_store() -> type[TreeStore]:
    """The class of archives with layout chunks: imported only for them. Raises ConfigError."""
    try:
        from tierfs.tiers.chunked import ChunkedStore
    except ImportError as error:
        raise ConfigError(f"layout chunks needs {error.name}; pip install 'tierfs[chunks]'") from error
    return ChunkedStore
