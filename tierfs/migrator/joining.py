"""What belongs to one catalog, joined: the tiers with its files; the migrator and the open files, each knowing the
other."""

from __future__ import annotations

from collections.abc import Sequence

from tierfs.catalog import Catalog
from tierfs.fs.open_files import OpenFiles
from tierfs.fs.ports import Backing
from tierfs.fs.space import Space
from tierfs.migrator.migrator import Migrator
from tierfs.policy.match import RuleMatcher
from tierfs.policy.model import Policy
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.kinds import Tree
from tierfs.tiers.memory import MemoryMount


def join(
    catalog: Catalog,
    policy: Policy,
    stores: dict[str, ReplicaStore],
    tree: Tree,
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


def known_disks(catalog: Catalog, policy: Policy) -> set[str]:
    """Persistent tiers on which the catalog has something."""
    return catalog.known_tiers(policy.tiers[-1].name) & {tier.name for tier in policy.tiers if tier.persistent}


def claim(catalog: Catalog, policy: Policy, tiers: Tiers) -> None:
    """Make sure that the tiers are those that the catalog knows, each as far as it knows it; those that belong to
    nobody become its own. Blocks on them. Raises TierError, CatalogError."""
    known = known_disks(catalog, policy)
    if tiers.tree.owner() is None:
        tiers.tree.refuse_strangers()
    if tiers.tree.owner() is None and catalog.logged != (0, 0):
        # A new archive, on which nothing has happened yet. The catalog must say so before the archive is its own:
        # a crash between the two would leave one that is refused as an older copy.
        tiers.check_catalog(catalog.uuid, known, claim=False)
        with catalog.transaction():
            catalog.put_logged((0, 0))
        catalog.commit()
        catalog.sync()
    tiers.check_catalog(catalog.uuid, known, claim=True)
    tiers.tree.expect(catalog.logged)
