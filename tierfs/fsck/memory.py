"""A memory tier that a reboot emptied, met by fsck before the mount: taken back as the mount would (migrator.rollback).
"""

from __future__ import annotations

from tierfs.catalog import MendableCatalog
from tierfs.fs.space import Space
from tierfs.fsck.session import Report
from tierfs.migrator.joining import join
from tierfs.migrator.rollback import recover_lost_memory
from tierfs.policy.model import Policy
from tierfs.report import keep_report
from tierfs.tiers.assembly import Tiers


def memory_is_lost(catalog: MendableCatalog, policy: Policy, tiers: Tiers) -> bool:
    """Whether the catalog has replicas on a memory tier that are not there. Raises OSError."""
    for name, store in tiers.stores.items():
        if not policy.tier(name).persistent:
            present = set(store.keys())
            if any(replica.key not in present for replica in catalog.replicas_on(name)):
                return True
    return False


def take_back(catalog: MendableCatalog, policy: Policy, tiers: Tiers, report: Report) -> None:
    """Files fall back, and deletes that waited for what was lost are undone. What has no bytes left stays, without a
    replica. Raises OSError, CatalogError."""
    space = Space(policy, tiers.probes(), catalog.tier_bytes)
    migrator, files = join(catalog, policy, tiers.stores, tiers.tree, space)
    found = recover_lost_memory(
        catalog,
        policy,
        tiers.stores,
        files,
        migrator.archive.storing,
        lambda said: keep_report(policy.state, said),
    )
    for back in found.rolled_back:
        report.did(str(back), back.path)
    for undone in found.undone:
        report.did(str(undone), undone.path, "restored")
