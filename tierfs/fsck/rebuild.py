"""fsck --rebuild: another catalog in the place of one that is lost or damaged.

It begins with the newest copy of the catalog on the archive and the log of what the archive did since (tiers.copies).
Where there is none it begins empty. Then comes what lies beside the replicas on persistent tiers, then what stands on
the archive, and `Repair` makes the whole agree with the tiers. Until it is complete it is ``catalog.rebuilding``:
killed anywhere, the next run begins again. The old files stay in the state directory, in ``catalog.damaged-<n>``.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from tierfs.catalog import MendableCatalog
from tierfs.catalog.database import journals
from tierfs.durable import fsync_directory
from tierfs.errors import CatalogDamaged, CatalogError, ContentMissing, MountError, TierError, UsageError
from tierfs.fsck.adopt import Adoption
from tierfs.fsck.check import check_tiers
from tierfs.fsck.repair import Repair
from tierfs.fsck.session import Progress, Report, catalog_path, has_catalog, opened
from tierfs.migrator import progress as batches
from tierfs.migrator.archive import Archive
from tierfs.migrator.keeping import keep_closed
from tierfs.migrator.steps import Batch
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.report import keep_rebuild
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.base import DIRECTORY
from tierfs.tiers.copies import Manifest
from tierfs.tiers.kinds import Copies, copies_on
from tierfs.types import ROOT_INO, Attributes, Ino

REBUILDING = "catalog.rebuilding"


def rebuild_all(policy: Policy, progress: Progress) -> Report:
    """Make another catalog. MountError while the policy is mounted; UsageError when the catalog is sound."""
    with opened(policy) as tiers:
        owner = _owner(tiers)
        path = catalog_path(policy)
        report = Report()
        damage = _refuse_sound(path, owner) if has_catalog(policy) else "there is none"
        report.facts |= {"at": time.time(), "why": damage}
        _discard(path.with_name(REBUILDING))
        report.facts["kept_aside"] = _keep_aside(path)
        reach(At.REBUILD_ASIDE)
        copies = copies_on(tiers.tree)
        copies.forget_clean()
        catalog, horizon, undone = _base(policy, tiers, copies, owner, report)
        try:
            reach(At.REBUILD_BASED)
            Adoption(catalog, policy, tiers, report, progress, horizon, time.time_ns(), undone).run()
            reach(At.REBUILD_ADOPTED)
            Repair(catalog, policy, tiers, copies, report, progress).run()
            report.facts["files"] = catalog.count_files()
            tiers.check_catalog(catalog.uuid, (), claim=True)
            report.problems = check_tiers(catalog, tiers.stores, tiers.tree, progress)
        finally:
            catalog.close()
        for journal in journals(catalog.path):
            journal.unlink(missing_ok=True)
        reach(At.REBUILD_REPAIRED)
        os.rename(catalog.path, path)
        _sync(path.parent)
        reach(At.REBUILD_RENAMED)
        keep_closed(path, catalog.uuid, catalog.seq, copies)
        keep_rebuild(path.parent, report.as_json())
        return report


def restore_clean(policy: Policy, tiers: Tiers) -> str | None:
    """In the place of a damaged catalog, the copy that was made when it was closed, if nothing was done since: then it
    is the same catalog. The directory in which the damaged one is kept; None when there is no such copy.
    With the state directory locked. Raises OSError, TierError."""
    path = catalog_path(policy)
    copies = copies_on(tiers.tree)
    manifest = copies.clean()
    if manifest is None or manifest.uuid != tiers.tree.owner():
        return None
    fresh = path.with_name(REBUILDING)
    _discard(fresh)
    if not copies.fetch(manifest, fresh):
        return None
    aside = _keep_aside(path)
    os.rename(fresh, path)
    _sync(path.parent)
    return aside


def _sync(directory: Path) -> None:
    fd = os.open(directory, DIRECTORY)
    try:
        fsync_directory(fd)
    finally:
        os.close(fd)


def _discard(path: Path) -> None:
    for file in (path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal")), *journals(path)):
        file.unlink(missing_ok=True)


def _owner(tiers: Tiers) -> str | None:
    """The catalog to which all tiers with files belong; None when no tier belongs to any."""
    owners = {tier.name: owner for tier in tiers.every if (owner := tier.owner())}
    if len(set(owners.values())) > 1:
        told = ", ".join(f"{tier} to {owner}" for tier, owner in owners.items())
        raise MountError(f"the tiers belong to different catalogs ({told}); is one of them mounted in another's place?")
    return next(iter(owners.values()), None)


def _refuse_sound(path: Path, owner: str | None) -> str:
    """What is wrong with the catalog; UsageError when nothing is."""
    try:
        catalog = MendableCatalog(path, verify=True)
    except CatalogDamaged as error:
        return str(error)
    try:
        broken = catalog.check()
        if broken:
            return f"catalog {path} is damaged: {broken[0]}"
        empty = not catalog.has_entries(ROOT_INO) and next(catalog.all_replicas(), None) is None
        if catalog.uuid != owner and owner is not None and empty:
            return "it is new and empty: that of the tiers was lost"
        if catalog.uuid != owner and owner is not None:
            raise UsageError(f"catalog {path} is sound, and the tiers belong to another one: use its state directory")
    finally:
        catalog.close()
    raise UsageError(f"catalog {path} is sound; `tierfs fsck --repair` mends what the tiers do not agree with")


def _keep_aside(path: Path) -> str | None:
    """Move what is there of a catalog into a directory of its own."""
    files = [f for f in path.parent.glob(f"{path.name}*") if f.is_file() and not f.is_symlink()]
    if not files:
        return None
    number = 1
    while (aside := path.with_name(f"catalog.damaged-{number}")).exists():
        number += 1
    aside.mkdir(mode=0o700)
    for file in files:
        os.rename(file, aside / file.name)
    _sync(path.parent)
    return str(aside)


# the beginning: a copy and what was logged after it


def _base(
    policy: Policy, tiers: Tiers, copies: Copies, owner: str | None, report: Report
) -> tuple[MendableCatalog, int, Batch | None]:
    """A catalog to begin with, the sequence number as of which its names are true, and the last batch, if that could
    not be carried out again."""
    path = catalog_path(policy).with_name(REBUILDING)
    catalog, manifest = _newest_copy(path, copies, owner, report)
    if catalog is None:
        _discard(path)
        catalog = MendableCatalog(path)
        if owner is not None:
            with catalog.transaction():
                catalog.begin_anew(owner)
    try:
        logged, undone = _replay(catalog, tiers, copies, manifest, report)
    except BaseException:
        catalog.close()
        raise
    report.facts["copy"] = (
        {"number": manifest.number, "made": time.strftime("%FT%TZ", time.gmtime(manifest.at_ns / 1e9))}
        if manifest
        else None
    )
    known = manifest.seq if manifest else 0
    if logged and logged >= known:
        with catalog.transaction():
            catalog.names_from_archive()
    report.facts["batches_logged"] = report.facts.get("batches_logged", 0)
    return catalog, max(known, logged + 1 if logged else 0), undone


def _newest_copy(
    path: Path, copies: Copies, owner: str | None, report: Report
) -> tuple[MendableCatalog | None, Manifest | None]:
    for manifest in copies.manifests():
        if owner is not None and manifest.uuid != owner:
            continue
        _discard(path)
        if not copies.fetch(manifest, path):
            report.did("a copy of the catalog is damaged", f"copy-{manifest.number}", "damaged")
            continue
        with contextlib.suppress(CatalogError):
            catalog = MendableCatalog(path, verify=True)
            if catalog.uuid == manifest.uuid and not catalog.check():
                with catalog.transaction():
                    catalog.skip_ids(1, manifest.seq)
                return catalog, manifest
            catalog.close()
        report.did("a copy of the catalog is damaged", f"copy-{manifest.number}", "damaged")
    return None, None


def _replay(
    catalog: MendableCatalog, tiers: Tiers, copies: Copies, manifest: Manifest | None, report: Report
) -> tuple[int, Batch | None]:
    """Let the catalog follow the log; the last operation that the archive has done, 0 when nothing was logged, and the
    last batch if the archive is not what it would leave.

    A batch is known to be done once another follows it. One that was given up is replaced by the next. The last one may
    have been done in part: it is carried out again."""
    undone: Batch | None = None
    held = catalog.intent()
    last, count = catalog.archived, 0
    pending = batches.decode(batches.encode(last, held, [])) if held is not None else None
    for raw in copies.logged(manifest.number if manifest else 0):
        logged = batches.decode(raw)
        if logged is None or logged.batch.last <= last:
            continue
        if pending is not None and logged.prev == pending.batch.last:
            _apply(catalog, tiers, pending)
            last = pending.batch.last
        elif logged.prev != last:
            report.did("the log of the archive has a gap: what stands there is compared", "", "damaged")
            pending = None
            break
        pending, count = logged, count + 1
    report.facts["batches_logged"] = count
    if pending is not None:
        with catalog.transaction():
            _states(catalog, pending)
            catalog.put_intent(pending.batch.encode())
        archive = Archive(catalog, tiers.tree, tiers.tree.name)
        try:
            archive.finish()
        except (ContentMissing, TierError) as error:
            if isinstance(error, TierError) and error.temporary and not isinstance(error, ContentMissing):
                raise
            assert archive.pending is not None
            archive.abandon(archive.pending)
            undone = pending.batch
            report.did(f"the last batch in the log does not fit what is on the archive: {error}", "", "damaged")
        else:
            last = pending.batch.last
    elif held is not None:
        with catalog.transaction():
            catalog.drop_intent()
    return (last if count else 0), undone


def _states(catalog: MendableCatalog, logged: batches.Progress) -> None:
    for s in logged.inodes:
        times = s.atime_ns, s.mtime_ns, s.ctime_ns
        known = catalog.attributes(s.ino)
        if known is not None and known.version > s.version:
            continue
        blocks = known.blocks if known is not None and known.size == s.size else (s.size + 511) // 512
        links = 2 if stat.S_ISDIR(s.mode) else 1
        catalog.put_inode(
            Attributes(Ino(s.ino), s.mode, s.uid, s.gid, links, s.rdev, s.size, *times, s.version, blocks),
            s.target,
            s.xattrs,
        )
        catalog.skip_ids(s.ino, catalog.seq)


def _apply(catalog: MendableCatalog, tiers: Tiers, logged: batches.Progress) -> None:
    """The batch was done: what `Archive.commit` says of it, and its inodes."""
    with catalog.transaction():
        _states(catalog, logged)
        catalog.skip_ids(1, logged.batch.last)
    archive = Archive(catalog, tiers.tree, tiers.tree.name)
    archive.commit(logged.batch)
