"""Garbage of an archive with layout chunks: chunks that no manifest names. Works beside a mount of the same archive.

All manifests are read first while everything goes on. Then, alone (`tiers.turnstile`), what changed meanwhile is read,
and what nothing names even so is removed: at that moment each chunk that anybody counts on is named by a manifest that
is complete, in the tree, set aside, or waiting in the temporary area for its turn. So neither age nor luck is needed,
and whatever a crash leaves undone the next collection does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.errors import ManifestDamaged, TierError, UsageError
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.tiers.base import failing_as, open_directory
from tierfs.tiers.chunked import ChunkedStore, read_manifest
from tierfs.tiers.pool import ident_of
from tierfs.tiers.root import RESERVED, layout_of
from tierfs.tiers.tree import KEPT
from tierfs.tiers.turnstile import alone

PATIENCE = 600.0
"""Seconds that a collection waits for copies under way."""

Progress = Callable[[int, int, str], object]


@dataclass
class Collected:
    manifests: int = 0
    chunks: int = 0
    """That are named."""
    removed: int = 0
    bytes: int = 0
    """That the removed ones occupied."""


@dataclass
class _Marks:
    """What the manifests that were read name."""

    idents: set[bytes] = field(default_factory=set)
    read: set[tuple[int, int, int]] = field(default_factory=set)
    """Manifests, as they were: inode number, time of change, bytes."""


def collect(policy: Policy, progress: Progress, *, dry: bool = False, patience: float = PATIENCE) -> Collected:
    """Remove the garbage of the policy's archive; ``dry`` only tells. UsageError when it has layout tree; TierError
    when a file in it cannot be understood: then nothing is removed."""
    archive = policy.tiers[-1]
    assert archive.path is not None
    if archive.layout != "chunks":
        raise UsageError(f"{archive.name} has layout tree: there is nothing to collect, what is deleted is gone")
    if layout_of(archive.path) != "chunks":
        raise UsageError(f"{archive.path} is no archive with layout chunks; was it mounted with this policy once?")
    store = ChunkedStore(archive.name, archive.path)
    store.look()
    try:
        with failing_as(store.name, "collect garbage"), store.use() as held:
            own = open_directory(RESERVED, held.root, create=False)
            try:
                owner = os.fstat(own).st_uid
                if owner != os.geteuid():  # whose locks this mount could not open
                    raise UsageError(f"{archive.path} belongs to user {owner}: run gc as that user")
                return _collect(store, held.root, own, progress, dry=dry, patience=patience)
            finally:
                os.close(own)
    finally:
        store.close()


def _collect(
    store: ChunkedStore, root: int, own: int, progress: Progress, *, dry: bool, patience: float
) -> Collected:
    marks, done = _Marks(), Collected()
    _mark(store.root, root, own, marks, progress, sure=False)
    with store.pool() as pool:
        garbage = [(name, size) for name, size in pool.all() if ident_of(name) not in marks.idents]
        with alone(store.name, own, patience):
            done.manifests = _mark(store.root, root, own, marks, progress, sure=True)
            garbage = [(name, size) for name, size in garbage if ident_of(name) not in marks.idents]
            reach(At.COLLECT_MARKED)
            for number, (name, size) in enumerate(garbage):
                progress(number, len(garbage), "chunks")
                if not dry:
                    pool.remove(name)
                    reach(At.COLLECT_REMOVED)
                done.removed += 1
                done.bytes += size
    done.chunks = len(marks.idents)
    return done


def _mark(where: Path, root: int, own: int, marks: _Marks, progress: Progress, *, sure: bool) -> int:
    """Read the manifests that are not read yet: how many there are. ``sure``: nothing changes meanwhile, so what is not
    understood is an error."""
    found = 0
    for shown, parent, name, waiting in _files(where, root, own):
        found += 1
        if found % 256 == 0:
            progress(found, 0, "manifests")
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            known = status.st_ino, status.st_ctime_ns, status.st_size
            if known in marks.read or not stat.S_ISREG(status.st_mode):
                continue
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            try:
                manifest = read_manifest(fd)
            finally:
                os.close(fd)
        except ManifestDamaged as error:
            if sure and not waiting:
                raise _refuse(f"{shown}: {error}") from error
            continue
        except FileNotFoundError:
            continue
        if manifest is not None:
            marks.idents |= manifest.references()
            marks.read.add(known)
        elif sure and not waiting:
            raise _refuse(f"{shown} is no manifest")
    return found


def _refuse(what: str) -> TierError:
    return TierError(
        f"{what}; nothing was removed. Move the file out of the archive if it is nobody's; else `tierfs fsck --repair` "
        f"copies it there again",
        temporary=False,
    )


def _files(where: Path, root: int, own: int) -> Iterator[tuple[str, int, bytes, bool]]:
    """(path to show, descriptor of the directory, name, whether it waits for its turn) of each file that may be a
    manifest. First what waits: while everything goes on, files go from there into the tree."""
    reserved = os.fsdecode(RESERVED)
    present = os.listdir(own)
    for part in (name for name in ("tmp", os.fsdecode(KEPT)) if name in present):
        for directory, _, names, fd in os.fwalk(part, dir_fd=own, onerror=_unless_gone):
            for name in names:
                yield str(where / reserved / directory / name), fd, os.fsencode(name), part == "tmp"
    for directory, folders, names, fd in os.fwalk(".", dir_fd=root, onerror=_unless_gone):
        if directory == "." and reserved in folders:
            folders.remove(reserved)
        for name in names:
            yield str(where / directory / name), fd, os.fsencode(name), False


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
