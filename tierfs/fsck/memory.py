"""A memory tier that a reboot emptied, met by fsck before the mount: taken back as the mount would (migrator.rollback),
or only told what the mount will do.
"""

from __future__ import annotations

from tierfs.catalog import Catalog, MendableCatalog
from tierfs.fs.open_files import OpenFiles
from tierfs.fs.space import Space
from tierfs.fsck.session import Report
from tierfs.migrator.joining import join
from tierfs.migrator.migrator import Migrator
from tierfs.migrator.rollback import Loss, find_loss, foresee_recovery, recover_lost_memory
from tierfs.policy.model import Policy
from tierfs.report import GONE, LOST, ROLLED_BACK, UNDONE, keep_report
from tierfs.tiers.assembly import Tiers


def memory_is_lost(catalog: MendableCatalog, policy: Policy, tiers: Tiers) -> bool:
    """Whether the catalog has replicas on a memory tier that are not there. Raises OSError."""
    return bool(find_loss(catalog, policy, tiers.stores).replicas)


def take_back(catalog: MendableCatalog, policy: Policy, tiers: Tiers, report: Report) -> None:
    """Files fall back, and deletes that waited for what was lost are undone. What has no bytes left stays, without a
    replica. Raises OSError, CatalogError."""
    migrator, files = _joined(catalog, policy, tiers)
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


def foresee(catalog: Catalog, policy: Policy, tiers: Tiers, loss: Loss) -> list[dict[str, str]]:
    """A line for each memory tier that is ``loss.gone``, then what the next mount will say of each path. Changes
    nothing. Raises CatalogError."""
    migrator, files = _joined(catalog, policy, tiers)
    found = foresee_recovery(catalog, policy, loss, files, migrator.archive.storing)
    counts = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in (
            (len(found.rolled_back), "file is rolled back", "files are rolled back"),
            (len(found.lost), "file is lost", "files are lost"),
            (len(found.undone), "change of names is undone", "changes of names are undone"),
        )
        if count
    ]
    told = f"at the next mount {', '.join(counts)}" if counts else "nothing is lost, other tiers have every file"
    if counts and migrator.archive.pending is not None:  # the mount finishes it first, and what it brings stands
        told += "; perhaps fewer, as it first finishes what is under way on the archive"
    listed = ((ROLLED_BACK, found.rolled_back), (LOST, found.lost), (UNDONE, found.undone))
    lines = [
        {"severity": severity, "what": str(entry), "path": entry.path}
        for severity, entries in listed
        for entry in entries
    ]
    return gone(tiers, loss, told) + lines


def gone(tiers: Tiers, loss: Loss, told: str) -> list[dict[str, str]]:
    """That the memory tiers are empty, and what comes of it."""
    return [
        {
            "severity": GONE,
            "what": f"memory tier {name} is gone since the last mount (a reboot): {told}",
            "path": str(tiers.stores[name].root),
        }
        for name in loss.gone
    ]


def _joined(catalog: Catalog, policy: Policy, tiers: Tiers) -> tuple[Migrator, OpenFiles]:
    return join(catalog, policy, tiers.stores, tiers.tree, Space(policy, tiers.probes(), catalog.tier_bytes))
