"""Deletes that may go first while the archive is full: without them a full archive could not be emptied on the mount.

Everything else keeps its order. A delete may overtake what waits for room only if the last good copy stays (promise 4):
everything closed before it is durable on some tier, so it never has to be undone (migrator.held). And only if nothing
that it overtakes concerns its file or its name.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence

from tierfs.catalog import Catalog, Operation
from tierfs.types import OpKind

LOOK = 4096
"""Operations looked at from the first that waits on."""


def deletes_ahead(
    catalog: Catalog, operations: Sequence[Operation], safe: int, wanted: Callable[[Operation], bool]
) -> list[Operation]:
    """Those of ``operations``, which are in order and begin with one that waits for room. ``safe``: deletes before this
    number are. ``wanted``: of a CONTENT, whether the archive still needs it."""
    inos: set[int] = set()
    names: set[tuple[int, bytes]] = set()
    found: list[Operation] = []
    for op in operations:
        if op.seq >= safe:
            break
        if op.kind is OpKind.CONTENT:
            if wanted(op):
                inos.add(op.ino)
        elif op.kind is not OpKind.ATTRIBUTES:
            first, second = (op.parent, op.name), (op.arg, op.name2)
            touched = {first} if op.kind in (OpKind.LINK, OpKind.UNLINK) else {first, second}
            if op.ino not in inos and not touched & names and _frees(catalog, op):
                found.append(op)
                continue
            inos.add(op.ino)
            names |= touched
    return found


def _frees(catalog: Catalog, op: Operation) -> bool:
    """Whether it is the delete of a file that stands on the archive."""
    if op.kind is not OpKind.UNLINK or not stat.S_ISREG(op.arg):
        return False
    published = catalog.published(op.parent, op.name)
    return published is not None and published.ino == op.ino and published.occupant != 0

