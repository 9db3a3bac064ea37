"""One daemon's parts joined as the daemon joins them, without a kernel: for tests of what happens between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tierfs.catalog import Catalog
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.namespace import Namespace
from tierfs.fs.open_files import OpenFiles
from tierfs.fs.space import Space
from tierfs.fuse.requests import Requests
from tierfs.migrator.joining import join
from tierfs.migrator.migrator import Migrator
from tierfs.operations import Operations
from tierfs.policy.load import parse_policy
from tierfs.tiers.assembly import chunked_store
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.tree import TreeStore
from tierfs.types import Usage


@dataclass
class Parts:
    """Tiers memory (a plain directory), nvme (or others) and archive below one directory; nothing drains by itself."""

    catalog: Catalog
    stores: dict[str, ReplicaStore]
    tree: TreeStore
    migrator: Migrator
    files: OpenFiles
    names: Namespace
    filesystem: Filesystem
    requests: Requests

    def write(self, fh: int, offset: int, data: bytes) -> int:
        """What passthrough does."""
        return os.pwrite(self.files.handles[fh].inode.fd, data, offset)

    def operations(self) -> Operations:
        """What the control socket of a mount at /mnt answers."""
        host = SimpleNamespace(
            policy=self.files.policy,
            mountpoint=Path("/mnt"),
            config=Path("/etc/tierfs/test.yaml"),
            mode="userspace",
            why="test",
            session=None,
            catalog=self.catalog,
        )
        return Operations(host, self.names, self.migrator, self.files.space)  # type: ignore[arg-type]

    def close(self) -> None:
        self.catalog.close()
        for tier in (*self.stores.values(), self.tree):
            tier.close()


def assemble(
    top: Path,
    wrap: Callable[[Any], Any] = lambda tier: tier,
    *,
    disks: Sequence[str] = ("nvme",),
    rules: str = "",
    memory: str = "64MiB",
    limits: str = "{}",
    catalog_at: Path | None = None,
    layout: str = "tree",
) -> Parts:
    """``wrap`` is called with each tier but memory once it is prepared, for something to be used in its place.
    ``disks``: tiers between memory and archive. ``rules``: the policy's, as YAML."""
    middle = "".join(f"  {name}: {{kind: dir, path: {top}/{name}}}\n" for name in disks)
    policy = parse_policy(
        f"""
state: {top}/state
tiers:
  memory: {{kind: memory, size: {memory}, path: {top}/memory}}
{middle}  archive: {{kind: dir, path: {top}/archive, layout: {layout}}}
limits: {limits}
rules: {rules or "[]"}
""",
        "test",
    )
    catalog = Catalog(catalog_at or top / "catalog")
    stores = {
        name: ReplicaStore(name, top / name, persistent=name != "memory", size=policy.tier(name).size)
        for name in ("memory", *disks)
    }
    tree = (TreeStore if layout == "tree" else chunked_store())("archive", top / "archive")
    for tier in (*stores.values(), tree):
        tier.prepare()
    stores.update({name: wrap(stores[name]) for name in disks})
    tree = wrap(tree)
    probes = {**{name: store.usage for name, store in stores.items()}, "archive": tree.usage}
    migrator, files = join(catalog, policy, stores, tree, Space(policy, probes, catalog.tier_bytes))
    names = Namespace(catalog, files)
    filesystem = Filesystem(catalog, names, files, migrator.wait_durable, migrator.flusher.wait_settled, lambda _: {})
    requests = Requests(filesystem, lambda: Usage(0, 0, 0))
    return Parts(catalog, stores, tree, migrator, files, names, filesystem, requests)
