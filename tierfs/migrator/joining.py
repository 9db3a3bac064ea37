"""The migrator and the open files of one catalog, each knowing the other."""

from __future__ import annotations

from collections.abc import Sequence

from tierfs.catalog import Catalog
from tierfs.fs.open_files import OpenFiles
from tierfs.fs.ports import Backing
from tierfs.fs.space import Space
from tierfs.migrator.migrator import Migrator
from tierfs.policy.match import RuleMatcher
from tierfs.policy.model import Policy
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.memory import MemoryMount
from tierfs.tiers.tree import TreeStore


def join(
    catalog: Catalog,
    policy: Policy,
    stores: dict[str, ReplicaStore],
    tree: TreeStore,
    space: Space,
    *,
    backing: Backing | None = None,
    mounts: Sequence[MemoryMount] = (),
) -> tuple[Migrator, OpenFiles]:
    """Nothing runs yet: the daemon starts the migrator, fsck and tests call what they need."""
    migrator = Migrator(catalog, policy, stores, tree)
    files = OpenFiles(
        catalog=catalog,
        policy=policy,
        stores=stores,
        matcher=RuleMatcher(policy.rules),
        space=space,
        backing=backing,
        recall=migrator.recaller.recall,
        preserve=migrator.recaller.preserve,
        fill=migrator.recaller.fill,
        changed=migrator.changed,
        quiesce=migrator.quiesce,
        discard=migrator.discard,
        lanes=migrator.lanes,
        unfit=migrator.scrubber.unfit,
    )
    migrator.serve(files, mounts)
    return migrator, files
