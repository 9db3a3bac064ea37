"""Reading an archive with nothing but its directory, or its place in an object store: no catalog, no policy, no mount,
on any machine.

What is restored is checked where the archive says what it was (layout chunks): a file that is not what was written is
not put in its place, and the rest is restored nevertheless. Nothing is written to the archive.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.durable import create_temporary
from tierfs.errors import DigestMismatch, SourceChanged, TierError, UsageError
from tierfs.tiers.assembly import chunked_store, object_tree
from tierfs.tiers.base import DIRECTORY
from tierfs.tiers.kinds import Tree
from tierfs.tiers.root import RESERVED, layout_of
from tierfs.tiers.tree import TreeStore
from tierfs.tiers.walk import Standing, standing_at, walk

Names = tuple[bytes, ...]
Progress = Callable[[int, int, str], object]


@contextlib.contextmanager
def archive_at(where: str, endpoint: str | None = None) -> Iterator[Tree]:
    """The archive in this directory, or in an object store by its URL, to be read. Raises UsageError, ConfigError,
    TierError."""
    store = _in_store(where, endpoint) if "://" in where else _in_directory(Path(where))
    try:
        yield store
    finally:
        store.close()


def _in_store(url: str, endpoint: str | None) -> Tree:
    tree = object_tree("archive", url, endpoint=endpoint)
    if not tree.is_there():
        raise UsageError(f"{url} is no archive of tierfs: give the url (and --endpoint) that the policy file has")
    return tree


def _in_directory(root: Path) -> Tree:
    layout = layout_of(root)
    if layout not in ("tree", "chunks"):
        known = "" if not layout else f" with a layout that this tierfs knows ({layout})"
        raise UsageError(f"{root} is no archive of tierfs{known}: give the path of the archive's directory")
    store = (chunked_store() if layout == "chunks" else TreeStore)("archive", Path(os.path.abspath(root)))
    store.look()
    return store


def names_of(path: str) -> Names:
    """A path in the archive, from its root. Raises UsageError."""
    names = tuple(name for name in os.fsencode(path).split(b"/") if name not in (b"", b"."))
    if b".." in names or names[:1] == (RESERVED,):
        raise UsageError(f"{path!r} is no path of a file in the archive")
    return names


def listing(store: Tree, top: Names, *, deep: bool) -> list[Standing]:
    """What is in a directory, with ``deep`` also in those below; or the file itself. By path. Raises UsageError."""
    found = standing_at(store, top) if top else None
    if top and found is None:
        raise UsageError(f"{shown(top)!r} is not in the archive")
    if found is not None and not stat.S_ISDIR(found.status.st_mode):
        return [found]
    return sorted(
        (item for item in walk(store, top) if deep or len(item.path) == len(top) + 1), key=lambda item: item.path
    )


def shown(path: Names) -> str:
    return os.fsdecode(b"/".join(path))


@dataclass
class Exported:
    """What an export did."""

    files: int = 0
    bytes: int = 0
    failed: list[str] = field(default_factory=list)
    """Each file that is not there, and why."""


class Export:
    """Restores a file, or a directory with all below it."""

    def __init__(self, store: Tree, top: Names, target: Path, progress: Progress) -> None:
        self._store, self._top, self._target, self._progress = store, top, target, progress
        self._linked: dict[tuple[int, int], Path] = {}
        self._root = os.geteuid() == 0
        self.done = Exported()

    def run(self) -> Exported:
        """Raises UsageError before anything is written; OSError when the target fails."""
        found = listing(self._store, self._top, deep=True)
        single = bool(self._top) and [item.path for item in found] == [self._top]
        if single and self._target.is_dir():
            self._target = self._target / os.fsdecode(self._top[-1])
        if os.path.lexists(self._target) and (
            single or not self._target.is_dir() or next(self._target.iterdir(), None) is not None
        ):
            raise UsageError(f"{self._target} is there already: nothing is overwritten")
        if not single:
            self._target.mkdir(parents=True, exist_ok=True)
        total = sum(item.status.st_size for item in found if stat.S_ISREG(item.status.st_mode))
        directories: list[tuple[Standing, Path]] = []
        for item in found:
            self._progress(self.done.bytes, total, shown(item.path))
            where = self._target.joinpath(*map(os.fsdecode, item.path[len(self._top) :]))
            try:
                if stat.S_ISDIR(item.status.st_mode):
                    where.mkdir()
                    directories.append((item, where))
                else:
                    self._restore(item, where)
            except (TierError, SourceChanged) as error:
                self.done.failed.append(f"{shown(item.path)}: {error}")
        for item, where in reversed(directories):
            self._attributes(item, os.fspath(where))
        self._progress(total, total, "")
        return self.done

    def _restore(self, item: Standing, where: Path) -> None:
        status = item.status
        before = self._linked.get((status.st_dev, status.st_ino)) if status.st_nlink > 1 else None
        if before is not None:
            os.link(before, where, follow_symlinks=False)
        elif item.target is not None:
            os.symlink(item.target, os.fsencode(where))
            self._attributes(item, os.fspath(where))
        elif stat.S_ISREG(status.st_mode):
            self._file(item, where)
        else:
            try:
                os.mknod(where, status.st_mode, status.st_rdev)
            except PermissionError as error:
                raise TierError(f"cannot be made by this user ({error.strerror})") from error
            self._attributes(item, os.fspath(where))
        if status.st_nlink > 1:
            self._linked.setdefault((status.st_dev, status.st_ino), where)

    def _file(self, item: Standing, where: Path) -> None:
        content = self._store.content(item.path)
        try:
            parent = os.open(where.parent, DIRECTORY)
            try:
                temp = create_temporary(parent, ".tierfs-export")
                try:
                    digest = content.copy(temp, content.size)
                    if content.written is not None and digest != content.written:
                        raise DigestMismatch("its bytes are not those that were written")
                    self._attributes(item, f"/proc/self/fd/{temp.fd}")
                    temp.commit(parent, os.fsencode(where.name), sync_dir=False)
                finally:
                    temp.discard()
            finally:
                os.close(parent)
            self.done.files += 1
            self.done.bytes += content.size
        finally:
            content.close()

    def _attributes(self, item: Standing, where: str) -> None:
        """As the archive has them; what this user or the target's filesystem may not have is left out."""
        status = item.status
        link = item.target is not None
        if self._root:
            os.chown(where, status.st_uid, status.st_gid, follow_symlinks=not link)
        if not link:
            for name, value in item.xattrs.items():
                with contextlib.suppress(OSError):
                    os.setxattr(where, name, value)
            os.chmod(where, stat.S_IMODE(status.st_mode))
        os.utime(where, ns=(status.st_mtime_ns, status.st_mtime_ns), follow_symlinks=not link)
