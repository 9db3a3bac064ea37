"""The archive (layout tree) follows the mount by replaying the oplog in order.

`published` is the namespace as the archive has it: one row per name, with the inode that the name means
and its occupant, the inode whose object physically stands there. They differ while a file's content has
not come yet: occupant 0 (nothing stands there), or the file that was replaced, which stays readable
until the new content is renamed over it.

A batch has three phases, so that the event loop never waits for the archive: `plan` reads the catalog and
lists the physical steps against an overlay of `published`; `Batch.execute` takes the steps, in a thread, and
syncs the directories they changed; `commit` writes the overlay in ONE transaction. Every step looks at what
is there, so that replaying after a crash between a step and its commit is harmless.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierfs.catalog import Catalog, Operation, PublishedName
from tierfs.durable import TemporaryFile
from tierfs.errors import TierError
from tierfs.tiers.tree import TreeStore
from tierfs.types import ROOT_INO, Attributes, Ino, OpKind, Replica, ReplicaState

log = logging.getLogger("tierfs.archive")

Path = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Content copied to the archive's temporary area, synced and digested, waiting for its turn."""

    temp: TemporaryFile
    size: int
    digest: bytes


@dataclass
class Batch:
    """The steps of some operations, and what the catalog says once they are done."""

    operations: Sequence[Operation]
    store: TreeStore
    steps: list[Callable[[], None]] = field(default_factory=list)
    names: dict[tuple[int, bytes], PublishedName | None] = field(default_factory=dict)
    """Changed rows of `published`; None: removed."""
    stored: dict[int, Replica] = field(default_factory=dict)
    dirty: set[Path] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def execute(self) -> None:
        """Take the steps and make them durable. Blocks; TierError when the archive fails."""
        for step in self.steps:
            step()
        self.store.sync_directories(sorted(self.dirty))


@dataclass
class Archive:
    catalog: Catalog
    store: TreeStore
    name: str

    def ready_prefix(
        self, operations: Sequence[Operation], ready: Mapping[tuple[int, int], Ready]
    ) -> Sequence[Operation]:
        """The operations up to the first whose content is still needed and not copied yet."""
        for index, operation in enumerate(operations):
            if (
                operation.kind is OpKind.CONTENT
                and (operation.ino, operation.arg) not in ready
                and self.wanted(operation)
            ):
                return operations[:index]
        return operations

    def wanted(self, operation: Operation) -> bool:
        """Whether this content is still the file's: neither superseded nor deleted."""
        attributes = self.catalog.attributes(operation.ino)
        return attributes is not None and attributes.nlink > 0 and attributes.version == operation.arg

    def plan(self, operations: Sequence[Operation], ready: Mapping[tuple[int, int], Ready]) -> Batch:
        """List the steps of ``operations``. Reads the catalog only."""
        batch = Batch(operations, self.store)
        for op in operations:
            match op.kind:
                case OpKind.LINK:
                    self._link(batch, op)
                case OpKind.UNLINK:
                    self._unlink(batch, op)
                case OpKind.RENAME:
                    self._rename(batch, op)
                case OpKind.EXCHANGE:
                    self._exchange(batch, op)
                case OpKind.CONTENT:
                    content = ready.get((op.ino, op.arg))
                    if content is not None and self.wanted(op):
                        self._content(batch, op, content)
                case OpKind.ATTRIBUTES:
                    self._attributes(batch, op.ino)
        return batch

    def commit(self, batch: Batch) -> None:
        """The batch's steps are durable: record it."""
        with self.catalog.transaction():
            for (parent, name), row in batch.names.items():
                if row is None:
                    self.catalog.remove_published(parent, name)
                else:
                    self.catalog.put_published(parent, name, row.ino, row.occupant)
            for ino in batch.gone | batch.stored.keys():
                if ino in batch.stored or not self.catalog.published_names(ino):
                    for replica in self.catalog.replicas(ino):
                        if replica.tier == self.name:
                            self.catalog.remove_replica(replica)
            for replica in batch.stored.values():
                self.catalog.put_replica(replica)
            self.catalog.drop_operations(batch.operations[-1].seq)

    # the namespace of the archive, with the batch's changes over the catalog's rows

    def _published(self, batch: Batch, parent: int, name: bytes) -> PublishedName | None:
        if (parent, name) in batch.names:
            return batch.names[parent, name]
        return self.catalog.published(parent, name)

    def _names(self, batch: Batch, ino: int) -> list[PublishedName]:
        rows = [row for row in self.catalog.published_names(ino) if (row.parent, row.name) not in batch.names]
        return rows + [row for row in batch.names.values() if row is not None and row.ino == ino]

    def _put(self, batch: Batch, parent: int, name: bytes, ino: int, occupant: int) -> None:
        batch.names[parent, name] = PublishedName(Ino(parent), name, Ino(ino), occupant)

    def _path(self, batch: Batch, parent: int, name: bytes) -> Path | None:
        """None when a directory above is not published."""
        names = [name]
        while parent != ROOT_INO:
            above = self._names(batch, parent)
            if not above:
                return None
            names.append(above[0].name)
            parent = above[0].parent
        return tuple(reversed(names))

    def _standing(self, batch: Batch, ino: int) -> Path | None:
        """A path at which the inode's own object stands."""
        for row in self._names(batch, ino):
            if row.occupant == ino:
                return self._path(batch, row.parent, row.name)
        return None

    # one method per kind of operation

    def _link(self, batch: Batch, op: Operation) -> None:
        path = self._path(batch, op.parent, op.name)
        if path is None:
            return
        occupant = 0
        attributes = self.catalog.attributes(op.ino)
        kind = stat.S_IFMT(op.arg)
        if kind == stat.S_IFDIR:
            batch.steps.append(partial(self.store.mkdir, path))
            occupant = op.ino
        elif kind == stat.S_IFREG:
            standing = self._standing(batch, op.ino)
            if standing is not None:
                batch.steps.append(partial(self.store.link, standing, path))
                occupant = op.ino
        elif attributes is not None:
            target = self.catalog.target(op.ino)
            if target is not None:
                batch.steps.append(partial(self.store.symlink, target, path))
            else:
                batch.steps.append(partial(self.store.special, path, attributes.mode, attributes.rdev))
            occupant = op.ino
        self._put(batch, op.parent, op.name, op.ino, occupant)
        batch.dirty.add(path[:-1])
        if occupant and attributes is not None and kind != stat.S_IFREG:
            self._set(batch, path, attributes)

    def _unlink(self, batch: Batch, op: Operation) -> None:
        published = self._published(batch, op.parent, op.name)
        path = self._path(batch, op.parent, op.name)
        if published is None or path is None:
            return
        if published.occupant:
            if stat.S_ISDIR(op.arg):
                batch.steps.append(partial(self._rmdir, path))
            else:
                batch.steps.append(partial(self.store.remove, path))
            batch.dirty.add(path[:-1])
        batch.names[op.parent, op.name] = None
        batch.gone.add(op.ino)

    def _rmdir(self, path: Path) -> None:
        try:
            self.store.rmdir(path)
        except TierError as error:
            log.info("archive keeps directory %s: %s", b"/".join(path).decode(errors="replace"), error)

    def _rename(self, batch: Batch, op: Operation) -> None:
        published = self._published(batch, op.parent, op.name)
        source, target = self._path(batch, op.parent, op.name), self._path(batch, op.arg, op.name2)
        if published is None or source is None or target is None:
            return
        replaced = self._published(batch, op.arg, op.name2)
        occupant = published.occupant
        if occupant == op.ino:
            batch.steps.append(partial(self.store.rename, source, target))
        else:
            if occupant:
                batch.steps.append(partial(self.store.remove, source))
            occupant = replaced.occupant if replaced else 0
        batch.names[op.parent, op.name] = None
        self._put(batch, op.arg, op.name2, op.ino, occupant)
        batch.dirty.update((source[:-1], target[:-1]))
        if replaced is not None and replaced.ino != op.ino:
            batch.gone.add(replaced.ino)

    def _exchange(self, batch: Batch, op: Operation) -> None:
        a, b = self._published(batch, op.parent, op.name), self._published(batch, op.arg, op.name2)
        path_a, path_b = self._path(batch, op.parent, op.name), self._path(batch, op.arg, op.name2)
        if a is None or b is None or path_a is None or path_b is None:
            return
        if a.occupant == a.ino and b.occupant == b.ino:
            batch.steps.append(partial(self.store.exchange, path_a, path_b))
            occupants: tuple[int, int] = (b.ino, a.ino)
        elif a.occupant == a.ino:
            batch.steps.append(partial(self.store.rename, path_a, path_b))
            occupants = (0, a.ino)
        elif b.occupant == b.ino:
            batch.steps.append(partial(self.store.rename, path_b, path_a))
            occupants = (b.ino, 0)
        else:
            occupants = (a.occupant, b.occupant)
        self._put(batch, op.parent, op.name, b.ino, occupants[0])
        self._put(batch, op.arg, op.name2, a.ino, occupants[1])
        batch.dirty.update((path_a[:-1], path_b[:-1]))

    def _content(self, batch: Batch, op: Operation, content: Ready) -> None:
        attributes = self.catalog.attributes(op.ino)
        names = self._names(batch, op.ino)
        paths = [path for n in names if (path := self._path(batch, n.parent, n.name)) is not None]
        if attributes is None or not paths:
            return
        batch.steps.append(
            partial(
                self.store.publish,
                content.temp,
                paths[0],
                mode=stat.S_IMODE(attributes.mode),
                uid=attributes.uid,
                gid=attributes.gid,
                mtime_ns=attributes.mtime_ns,
                xattrs=dict(self.catalog.xattrs(op.ino)),
                sync_dir=False,
            )
        )
        for path in paths[1:]:
            batch.steps.append(partial(self.store.remove, path))
            batch.steps.append(partial(self.store.link, paths[0], path))
        for n, path in zip(names, paths, strict=False):
            self._put(batch, n.parent, n.name, op.ino, op.ino)
            batch.dirty.add(path[:-1])
        batch.stored[op.ino] = Replica(
            op.ino, op.arg, self.name, ReplicaState.DURABLE, "", content.size, content.digest
        )

    def _attributes(self, batch: Batch, ino: int) -> None:
        attributes = self.catalog.attributes(ino)
        if attributes is None:
            return
        if ino == ROOT_INO:
            return
        path = self._standing(batch, ino)
        if path is not None:
            self._set(batch, path, attributes)

    def _set(self, batch: Batch, path: Path, attributes: Attributes) -> None:
        batch.steps.append(
            partial(
                self.store.set_attributes,
                path,
                mode=stat.S_IMODE(attributes.mode),
                uid=attributes.uid,
                gid=attributes.gid,
                mtime_ns=attributes.mtime_ns,
                xattrs=dict(self.catalog.xattrs(attributes.ino)),
            )
        )
