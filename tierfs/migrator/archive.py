"""The archive follows the mount by replaying the oplog in order.

`published` is the namespace as the archive has it: one row per name, with the inode that the name means
and its occupant, the inode whose object physically stands there. They differ while a file's content has
not come yet: occupant 0 (nothing stands there), or the file that was replaced, which stays readable
until the new content is renamed over it.

Content that was replaced on the mount before its turn is skipped. What the archive has of such a file is then *behind*
(occupant -ino): right to show at the names that it has, but no new name ever had it. So a link does not show it, and a
rename does not carry it along: it is set aside (`KEPT`), as it may be the last good copy, until newer content comes,
the file is deleted, or a lost memory tier makes it the file's content again.

A batch (migrator.steps) goes through four phases, so that the event loop never waits for the archive:

1. `next_batch` plans it against an overlay of `published` and stores it in the catalog, as data.
2. `execute`, in a thread, first syncs the catalog: the archive never does what the catalog could forget.
3. It takes the steps and syncs the directories they changed.
4. `commit` writes the overlay and drops the batch and its operations in ONE transaction.

After a crash the stored batch is carried out again, unchanged, before anything else is planned: what was deleted or
written on the mount meanwhile comes in a later batch. A catalog that lost its unsynced tail still has the batch.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tierfs.catalog import KEPT, Catalog, Operation, PublishedName
from tierfs.errors import TierError
from tierfs.migrator import progress
from tierfs.migrator.ahead import LOOK, deletes_ahead
from tierfs.migrator.steps import Action, Batch, Effect, Metadata, Path, Step
from tierfs.plan.retention import NEVER, frontier
from tierfs.points import At, reach
from tierfs.tiers.kinds import Copies, Tree
from tierfs.tiers.root import RESERVED
from tierfs.types import ROOT_INO, Attributes, OpKind, Replica, ReplicaState

log = logging.getLogger("tierfs.archive")

HEAVY = 512 << 10
"""Bytes of a stored batch that end it: it must fit the catalog's journal, which long paths and xattrs could fill."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Content copied to the archive's temporary area, synced, digested and closed, waiting for its turn."""

    temp: bytes
    """Name of the temporary file."""
    size: int
    digest: bytes


@dataclass
class Archive:
    catalog: Catalog
    store: Tree
    name: str
    barrier: Callable[[], int] = lambda: NEVER
    """What happened after this number has to wait for files that the archive does not get."""
    safe: Callable[[], int] = lambda: 0
    """What was deleted before this number never has to come back."""
    given_up: Callable[[int, int], bool] = lambda ino, version: False
    """Whether nothing waits for the close of this version of a file that is being written again."""
    copies: Copies | None = None
    """Where batches are logged for a rebuild of the catalog."""
    pending: Batch | None = None
    """The batch that is stored in the catalog and not committed."""
    _unlogged: bytes | None = None
    """What is to be logged before `pending` begins."""
    _settled: list[str] = field(default_factory=list)
    """Exchanges whose journals may go once the catalog is synced."""
    _doubtful: int = 0
    """Operations up to this one were in a batch that was abandoned: their names may hold more than `published` says."""

    def __post_init__(self) -> None:
        begun = self.catalog.intent()
        if begun is not None:
            self.pending = Batch.decode(begun)
            self._unlogged = self._progress(self.pending, begun, set(self.pending.stored))  # perhaps once more

    def ready_prefix(
        self, operations: Sequence[Operation], ready: Mapping[tuple[int, int], Ready]
    ) -> Sequence[Operation]:
        """The operations up to the first whose content is still needed and not copied yet, or overtaken by one that is
        being written, or that would take away something durable before what it waits for has come (plan.retention)."""
        prefix, moot, barrier = operations, False, self.barrier()
        for index, operation in enumerate(operations):
            if operation.seq > barrier:
                prefix = operations[:index]
                break
            if operation.kind is OpKind.CONTENT and (operation.ino, operation.arg) not in ready:
                if self.wanted(operation) or self._being_written(operation):
                    prefix = operations[:index]
                    break
                moot = True
        return self._due(prefix, ready) if moot else prefix

    def _together(
        self, operations: Sequence[Operation], ready: Mapping[tuple[int, int], Ready]
    ) -> Sequence[Operation]:
        """The operations up to a close that another of the same file makes up for, if a delete between the two would be
        in the batch, and the second close not: a loss of the memory between two batches would keep the delete, and
        neither content. A batch that cannot have both is what it is."""
        pairs = [
            (close, again)
            for ino, version, close, again in self.catalog.overtaken_contents()
            if not self.given_up(ino, version) and not self._is_safe(ino, version)
        ]
        if not pairs:
            return operations
        last = self._plan(operations, ready).last
        first = min((close for close, again in pairs if close <= last < again), default=NEVER)
        before = [operation for operation in operations if operation.seq < first]
        return before if before and self.catalog.holds_between(first, last + 1, self.name) else operations

    def _is_safe(self, ino: int, version: int) -> bool:
        """Whether no loss of the memory takes this version of the file, or a later one makes up for it."""
        return any(r.version >= version and r.state is ReplicaState.DURABLE for r in self.catalog.replicas(ino))

    def _being_written(self, operation: Operation) -> bool:
        """Whether the file is open for writing the version that makes up for this content."""
        current = self.catalog.attributes(operation.ino)
        if current is None or not current.nlink or current.version <= operation.arg:
            return False
        if self.given_up(current.ino, operation.arg):
            return False
        return any(
            replica.version == current.version and replica.state is ReplicaState.OPEN
            for replica in self.catalog.replicas(current.ino)
        )

    def _due(self, operations: Sequence[Operation], ready: Mapping[tuple[int, int], Ready]) -> Sequence[Operation]:
        """Among ``operations`` are closes of files that were deleted, or closed again, before they came here. Those
        that deletes wait for stay where they are, so that they are not forgotten, until what came later is here."""
        catalog = self.catalog
        waiting = (seq for seq, ino, version in catalog.wanted_content_seqs() if (ino, version) not in ready)
        first = next(waiting, NEVER)
        moot = catalog.deleted_before_durable_on([self.name])
        moot += [
            (close, again + 1)
            for ino, version, close, again in catalog.overtaken_contents()
            if not self.given_up(ino, version)
        ]
        limit = frontier(first, moot)
        if limit < first and catalog.holds_between(limit, first, self.name):
            return [operation for operation in operations if operation.seq < limit]
        return operations

    def wanted(self, operation: Operation) -> bool:
        """Whether this content is still the file's: neither superseded nor deleted, nor lost with a memory tier."""
        attributes = self.catalog.attributes(operation.ino)
        if attributes is None or attributes.nlink == 0 or attributes.version != operation.arg:
            return False
        return any(replica.version == operation.arg for replica in self.catalog.replicas(operation.ino))

    def storing(self, ino: int, version: int) -> bool:
        """Whether the batch under way brings this content: it needs no copy any more."""
        replica = self.pending.stored.get(ino) if self.pending else None
        return replica is not None and replica.version == version

    # the phases of a batch

    def next_batch(
        self, limit: int, ready: Mapping[tuple[int, int], Ready], *, full: bool = False
    ) -> Batch | None:
        """The batch to carry out now: one that was begun before, or else a new one of up to ``limit`` operations. When
        nothing can go on because the archive is ``full``, deletes that may go first (migrator.ahead).
        Raises CatalogError when the catalog's disk is full."""
        if self.pending is None:
            operations = self.ready_prefix(self.catalog.operations(limit), ready)
            if operations:
                batch = self._plan(self._together(operations, ready), ready)
            else:
                deletes = self._deletes() if full else []
                if not deletes:
                    return None
                batch = self._plan(deletes, ready, ahead=True)
            if batch.weight > HEAVY // 2:
                self.catalog.commit()
            text = batch.encode()
            if batch.steps:
                with self.catalog.transaction():
                    self.catalog.put_intent(text)
                reach(At.PUBLISH_PLANNED)
            self.pending = batch
            self._unlogged = self._progress(batch, text, {op.ino for op in operations if op.seq <= batch.last})
        if self.pending.steps:
            self.catalog.commit()
        return self.pending

    def _deletes(self) -> Sequence[Operation]:
        return deletes_ahead(self.catalog, self.catalog.operations(LOOK), self.safe(), self.wanted)

    def _progress(self, batch: Batch, text: str, inos: set[int]) -> bytes | None:
        """Deletes ahead of their turn are not logged: they make room where there is none for a log."""
        if batch.ahead:
            return None
        inos |= {row.ino for row in batch.names.values() if row is not None}
        return progress.encode(self.catalog.archived, text, progress.states(self.catalog, sorted(inos)))

    def _plan(
        self, operations: Sequence[Operation], ready: Mapping[tuple[int, int], Ready], *, ahead: bool = False
    ) -> Batch:
        batch = Batch()
        for op in operations:
            first = self._leave_behind(batch, op)
            if first.steps and batch.accepts(first):
                batch.add(op.seq - 1, first)
            elif first.steps:
                batch.split = True
                break
            effect = self._effect(batch, op, ready)
            if not batch.accepts(effect) or batch.weight > HEAVY:
                batch.split = True
                break
            batch.add(0 if ahead else op.seq, effect)
            if ahead:
                batch.ahead.append(op.seq)
        return batch

    def execute(self, batch: Batch, alive: Callable[[], object] = lambda: None) -> None:
        """Take the steps, with a call of ``alive`` at each, and make them durable. Blocks. Raises OSError when the
        catalog cannot be synced; TierError
        when the archive fails: call it again; ContentMissing: `abandon` the batch."""
        if not batch.steps:
            self._log()
            return
        self.catalog.sync()
        self.store.attach()
        reach(At.PUBLISH_SYNCED)
        self._log()
        reach(At.PUBLISH_LOGGED)
        while self._settled:
            self.store.forget_exchange(self._settled[-1])
            self._settled.pop()
        with self.store.changing(alive):
            batch.execute(self.store, alive)

    def _log(self) -> None:
        """Log the batch, once. On a full archive without that: deletes must get through, and a rebuild of the catalog
        then compares the archive with what it knows."""
        if self.copies is None or self._unlogged is None:
            return
        try:
            self.copies.append(self._unlogged)
        except TierError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.info("%s; a batch is not logged", error)
        self._unlogged = None

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
                if self.catalog.deadline(replica.ino, replica.version) is not None:
                    self.catalog.drop_deadline(replica.ino)
            self.catalog.drop_operations(batch.last, batch.ahead)
            self.catalog.drop_intent()
            if self.copies is not None and self.copies.reached is not None:
                self.catalog.put_logged(self.copies.reached)
        self.pending = None
        self._settled += batch.exchanges
        reach(At.PUBLISH_RECORDED)

    def abandon(self, batch: Batch) -> None:
        """Content of the batch was removed from the archive's temporary area by someone: plan again, without what is
        `Ready` of it. Steps taken before are found done; names that hold more than planned are emptied."""
        with self.catalog.transaction():
            self.catalog.drop_intent()
        self.pending = None
        self._doubtful = batch.last

    def finish(self) -> None:
        """Carry out the batch that a former daemon began. Blocks; raises OSError, TierError, CatalogError."""
        if self.pending is not None:
            self.catalog.commit()
            self.execute(self.pending)
            self.commit(self.pending)

    def sweep(self) -> None:
        """Remove what former daemons left in the temporary area and nothing refers to. After the catalog's `commit`,
        and not while a batch is carried out. Blocks; raises OSError, TierError."""
        self.catalog.sync()
        keep: set[bytes] = set()
        if self.pending is not None:
            keep.update(self.pending.temporaries)
            for token in self.pending.exchanges:
                keep.update(self.store.journals(token))
        self.store.sweep(keep)

    # the namespace of the archive, with a batch's changes over the catalog's rows

    def paths(self, ino: int) -> list[Path]:
        """Where the inode's content may stand at this moment: a batch under way may have moved it or not yet."""
        found: list[Path] = []
        batches = [Batch()] if self.pending is None else [self.pending, Batch()]
        for batch in batches:
            for row in self._names(batch, ino):
                path = self._path(batch, row.parent, row.name) if abs(row.occupant) == ino else None
                if path is not None and path not in found:
                    found.append(path)
        return found

    def _published(self, batch: Batch, parent: int, name: bytes) -> PublishedName | None:
        if (parent, name) in batch.names:
            return batch.names[parent, name]
        return self.catalog.published(parent, name)

    def _names(self, batch: Batch, ino: int) -> list[PublishedName]:
        rows = [row for row in self.catalog.published_names(ino) if (row.parent, row.name) not in batch.names]
        return rows + batch.names_of(ino)

    def _path(self, batch: Batch, parent: int, name: bytes) -> Path | None:
        """None when a directory above is not published."""
        names = [name]
        while parent != ROOT_INO:
            if parent == KEPT:
                return RESERVED, b"kept", name
            above = self._names(batch, parent)
            if not above:
                return None
            names.append(above[0].name)
            parent = above[0].parent
        return tuple(reversed(names))

    def _standing(self, batch: Batch, ino: int) -> Path | None:
        """A path at which the inode's own object stands, and is not behind."""
        for row in self._names(batch, ino):
            if row.occupant == ino:
                return self._path(batch, row.parent, row.name)
        return None

    # what is behind

    def _version(self, batch: Batch, ino: int) -> int:
        """Version that the archive has; 0: none, or one that nobody knows."""
        if ino in batch.stored:
            return batch.stored[ino].version
        return max((r.version for r in self.catalog.replicas(ino) if r.tier == self.name), default=0)

    def _skip(self, batch: Batch, op: Operation) -> Effect:
        """A content that nobody has any more: what stands on the archive in its place is behind."""
        effect = Effect()
        if self._version(batch, op.ino) < op.arg:
            for row in self._names(batch, op.ino):
                if row.occupant == row.ino:
                    effect.put(row.parent, row.name, row.ino, -row.ino)
        return effect

    def _leave_behind(self, batch: Batch, op: Operation) -> Effect:
        """What the operation must not move along: files that are behind, and in directories also what stands at a name
        in the place of another file. Steps of their own, before those of the operation."""
        effect = Effect()
        if op.kind not in (OpKind.RENAME, OpKind.EXCHANGE):
            return effect
        moved = [(op.parent, op.name)] + ([(op.arg, op.name2)] if op.kind is OpKind.EXCHANGE else [])
        for parent, name in moved:
            row = self._published(batch, parent, name)
            if row is None:
                continue
            if row.occupant == -row.ino:
                self._set_aside(batch, effect, row)
            elif row.occupant == row.ino and self._may_be_directory(batch, row.ino):
                for below in self._odd_below(batch, row.ino):
                    self._set_aside(batch, effect, below)
        return effect

    def _set_aside(self, batch: Batch, effect: Effect, row: PublishedName) -> None:
        path = self._path(batch, row.parent, row.name)
        if path is None:
            return
        kept = KEPT, b"%x" % row.ino
        if row.occupant == -row.ino and kept not in effect.names and self._published(batch, *kept) is None:
            effect.steps.append(Step(Action.RENAME, path, (RESERVED, b"kept", kept[1])))
            effect.put(*kept, row.ino, -row.ino)
        else:
            effect.steps.append(Step(Action.REMOVE, path))
        effect.put(row.parent, row.name, row.ino, 0)

    def _odd_below(self, batch: Batch, directory: int) -> list[PublishedName]:
        """Names below the directory at which something else stands than the file's content."""
        rows = [row for row in self.catalog.odd_published() if (row.parent, row.name) not in batch.names]
        rows += [row for row in batch.names.values() if row is not None and row.occupant not in (0, row.ino)]
        return [row for row in rows if self._is_below(batch, row.parent, directory)]

    def _is_below(self, batch: Batch, parent: int, directory: int) -> bool:
        while parent not in (ROOT_INO, KEPT, directory):
            above = self._names(batch, parent)
            if not above:
                return False
            parent = above[0].parent
        return parent == directory

    def _forget_kept(self, batch: Batch, effect: Effect, ino: int, *, unless: Callable[[PublishedName], bool]) -> None:
        """Remove what was set aside of the inode, unless one of its rows says that it may be needed."""
        rows = self._names(batch, ino)
        if any(row.parent == KEPT for row in rows) and not any(unless(row) for row in rows if row.parent != KEPT):
            kept = KEPT, b"%x" % ino
            effect.steps.append(Step(Action.REMOVE, (RESERVED, b"kept", kept[1])))
            effect.names[kept] = None

    # one method per kind of operation; each reads the catalog and the batch and changes neither

    def _effect(self, batch: Batch, op: Operation, ready: Mapping[tuple[int, int], Ready]) -> Effect:
        match op.kind:
            case OpKind.LINK:
                return self._link(batch, op)
            case OpKind.UNLINK:
                return self._unlink(batch, op)
            case OpKind.RENAME:
                return self._rename(batch, op)
            case OpKind.EXCHANGE:
                return self._exchange(batch, op)
            case OpKind.CONTENT:
                content = ready.get((op.ino, op.arg))
                if content is None or not self.wanted(op):
                    return self._skip(batch, op)
                return self._content(batch, op, content)
            case OpKind.ATTRIBUTES:
                return self._attributes(batch, op.ino)

    def _link(self, batch: Batch, op: Operation) -> Effect:
        effect = Effect()
        path = self._path(batch, op.parent, op.name)
        if path is None:
            return effect
        attributes = self.catalog.attributes(op.ino)
        kind = stat.S_IFMT(op.arg)
        standing = None if kind == stat.S_IFDIR else self._standing(batch, op.ino)
        if kind == stat.S_IFDIR:
            effect.steps.append(Step(Action.MKDIR, path))
        elif standing is not None:
            effect.steps.append(Step(Action.LINK, path, standing))
        elif kind != stat.S_IFREG and attributes is not None:
            target = self.catalog.target(op.ino)
            if target is not None:
                effect.steps.append(Step(Action.SYMLINK, path, source=target))
            else:
                effect.steps.append(Step(Action.SPECIAL, path, mode=attributes.mode, number=attributes.rdev))
        effect.put(op.parent, op.name, op.ino, op.ino if effect.steps else 0)
        if effect.steps and attributes is not None and kind != stat.S_IFREG:
            effect.steps.append(self._metadata_step(path, attributes))
        return effect

    def _unlink(self, batch: Batch, op: Operation) -> Effect:
        effect = Effect()
        published = self._published(batch, op.parent, op.name)
        path = self._path(batch, op.parent, op.name)
        if published is None or path is None:
            return effect
        if published.occupant or op.seq <= self._doubtful:
            effect.steps.append(Step(Action.RMDIR if stat.S_ISDIR(op.arg) else Action.REMOVE, path))
        effect.names[op.parent, op.name] = None
        effect.gone.add(op.ino)
        self._forget_kept(batch, effect, op.ino, unless=lambda row: (row.parent, row.name) != (op.parent, op.name))
        return effect

    def _rename(self, batch: Batch, op: Operation) -> Effect:
        effect = Effect()
        published = self._published(batch, op.parent, op.name)
        source, target = self._path(batch, op.parent, op.name), self._path(batch, op.arg, op.name2)
        if published is None or source is None or target is None:
            return effect
        replaced = self._published(batch, op.arg, op.name2)
        occupant = published.occupant
        if occupant == op.ino:
            effect.steps.append(Step(Action.RENAME, source, target, directory=self._may_be_directory(batch, op.ino)))
        else:
            if occupant or op.seq <= self._doubtful:
                effect.steps.append(Step(Action.REMOVE, source))
            occupant = abs(replaced.occupant) if replaced else 0
            if occupant == op.ino:  # it stood there before, and what it was then is behind
                occupant = -occupant
        effect.names[op.parent, op.name] = None
        effect.put(op.arg, op.name2, op.ino, occupant)
        if replaced is not None and replaced.ino != op.ino:
            effect.gone.add(replaced.ino)
            target_name = op.arg, op.name2
            self._forget_kept(batch, effect, replaced.ino, unless=lambda row: (row.parent, row.name) != target_name)
        return effect

    def _may_be_directory(self, batch: Batch, ino: int) -> bool:
        attributes = self.catalog.attributes(ino)
        if attributes is not None:
            return stat.S_ISDIR(attributes.mode)
        return ino not in batch.stored and not self.catalog.replicas(ino)

    def _exchange(self, batch: Batch, op: Operation) -> Effect:
        effect = Effect()
        a, b = self._published(batch, op.parent, op.name), self._published(batch, op.arg, op.name2)
        path_a, path_b = self._path(batch, op.parent, op.name), self._path(batch, op.arg, op.name2)
        if a is None or b is None or path_a is None or path_b is None:
            return effect
        if a.occupant == a.ino and b.occupant == b.ino:
            effect.steps.append(Step(Action.EXCHANGE, path_a, path_b, source=b"%d" % op.seq))
            occupants: tuple[int, int] = (b.ino, a.ino)
        elif a.occupant == a.ino:
            effect.steps.append(Step(Action.RENAME, path_a, path_b, directory=True))
            occupants = (0, a.ino)
        elif b.occupant == b.ino:
            effect.steps.append(Step(Action.RENAME, path_b, path_a, directory=True))
            occupants = (b.ino, 0)
        else:
            occupants = (a.occupant, b.occupant)
        effect.put(op.parent, op.name, b.ino, occupants[0])
        effect.put(op.arg, op.name2, a.ino, occupants[1])
        return effect

    def _content(self, batch: Batch, op: Operation, content: Ready) -> Effect:
        effect = Effect()
        attributes = self.catalog.attributes(op.ino)
        rows = [row for row in self._names(batch, op.ino) if row.parent != KEPT]
        paths = [(row, path) for row in rows if (path := self._path(batch, row.parent, row.name)) is not None]
        if attributes is None or not paths:
            return effect
        (row, first), *others = paths
        effect.steps.append(
            Step(
                Action.PUBLISH,
                first,
                source=content.temp,
                number=content.size,
                metadata=self._metadata(attributes),
                fresh=row.occupant == 0 and op.seq > self._doubtful,
            )
        )
        effect.steps += [Step(Action.LINK, path, first) for _, path in others]
        for row, _ in paths:
            effect.put(row.parent, row.name, op.ino, op.ino)
        self._forget_kept(batch, effect, op.ino, unless=lambda row: False)
        effect.stored.append(Replica(op.ino, op.arg, self.name, ReplicaState.DURABLE, "", content.size, content.digest))
        return effect

    def _attributes(self, batch: Batch, ino: int) -> Effect:
        attributes = self.catalog.attributes(ino)
        if attributes is None or ino == ROOT_INO:
            return Effect()
        effect = Effect()
        if stat.S_ISREG(attributes.mode) and self._version(batch, ino) == attributes.version:
            effect = self._bring_back(batch, ino)
        path = self._standing(batch, ino)
        if path is None and effect.steps:
            path = effect.steps[0].path
        if path is not None:
            effect.steps.append(self._metadata_step(path, attributes))
        return effect

    def _bring_back(self, batch: Batch, ino: int) -> Effect:
        """What was behind is the file's content again, after a loss of what was newer: at all of its names."""
        effect = Effect()
        rows = [row for row in self._names(batch, ino) if row.occupant != ino]
        sources = [path for row in rows if row.occupant == -ino and (path := self._path(batch, row.parent, row.name))]
        names = [row for row in rows if row.parent != KEPT]
        if not sources or not names:
            return effect
        kept = RESERVED, b"kept", b"%x" % ino
        for row in names:
            path = self._path(batch, row.parent, row.name)
            if path is not None:
                # The one of them that is there; after a batch that was abandoned it may be another than the rows say.
                effect.steps += [Step(Action.LINK, path, other) for other in sorted({*sources, kept} - {path})]
                effect.put(row.parent, row.name, ino, ino)
        self._forget_kept(batch, effect, ino, unless=lambda row: False)
        return effect

    def _metadata_step(self, path: Path, attributes: Attributes) -> Step:
        return Step(Action.ATTRIBUTES, path, metadata=self._metadata(attributes))

    def _metadata(self, attributes: Attributes) -> Metadata:
        xattrs = dict(self.catalog.xattrs(attributes.ino))
        return Metadata(stat.S_IMODE(attributes.mode), attributes.uid, attributes.gid, attributes.mtime_ns, xattrs)
