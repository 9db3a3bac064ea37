"""Everything that stands on an archive, from the root down."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from tierfs.tiers.base import failing_as
from tierfs.tiers.kinds import Tree
from tierfs.tiers.object_tree import ObjectTree
from tierfs.tiers.root import RESERVED
from tierfs.tiers.tree import TreeStore

Path = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """One object on the archive."""

    path: Path
    status: os.stat_result
    target: bytes | None
    """Of a symlink."""
    xattrs: dict[bytes, bytes]
    """Those of users, as far as they can be read."""


def walk(tree: Tree, top: Path = ()) -> Iterator[Standing]:
    """What is below ``top``, each directory before what is in it. Follows no symlink and stays on the archive's
    filesystem. Raises TierError."""
    if isinstance(tree, ObjectTree):
        for found in tree.everything(top):
            yield Standing(*found)
        return
    with failing_as(tree.name, f"read {tree.root}"):
        todo: list[Path] = [top]
        while todo:
            path = todo.pop()
            with tree.directory(path) as fd:
                device = os.fstat(fd).st_dev
                for name in sorted(map(os.fsencode, os.listdir(fd))):
                    if not path and name == RESERVED:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        standing = _look(tree, fd, name, path)
                        yield standing
                        if stat.S_ISDIR(standing.status.st_mode) and standing.status.st_dev == device:
                            todo.append(standing.path)


def standing_at(tree: Tree, path: Path) -> Standing | None:
    """What stands at a path, which is not the root. Raises TierError."""
    if isinstance(tree, ObjectTree):
        there = tree.standing(path)
        return None if there is None else Standing(*there)
    with failing_as(tree.name, f"read {tree.root}"):
        try:
            with tree.directory(path[:-1]) as fd:
                return _look(tree, fd, path[-1], path[:-1])
        except (FileNotFoundError, NotADirectoryError):
            return None


def _look(tree: TreeStore, fd: int, name: bytes, path: Path) -> Standing:
    status = tree.seen(fd, name, os.stat(name, dir_fd=fd, follow_symlinks=False))
    target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(status.st_mode) else None
    xattrs: dict[bytes, bytes] = {}
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            with contextlib.suppress(OSError):
                proc = f"/proc/self/fd/{entry}"
                for key in map(os.fsencode, os.listxattr(proc)):
                    if key.startswith(b"user.") and not key.startswith(b"user.tierfs."):
                        with contextlib.suppress(OSError):
                            xattrs[key] = os.getxattr(proc, key)
        finally:
            os.close(entry)
    return Standing((*path, name), status, target, xattrs)
