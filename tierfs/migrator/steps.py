"""One batch of the archive's replay as data: what to do on the archive, and what the catalog says once it is done.

A batch may be carried out any number of times, from its first step, after a crash anywhere in it. Its steps look at
what is there: a source that is missing was moved before, a name that is missing was removed before. That tells done
from not done because of one rule, which `Batch.accepts` enforces: **within a batch no name gets a new object once a
step has used that name.** The operation that would break it begins the next batch. So a rename log → log.1 and the
publish of a new log are never in one batch, and the old log can not be mistaken for the new. Two kinds of step stand
alone in theirs: an exchange, which has a journal (tiers.tree), and a rename of a directory, which changes the paths of
others.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierfs.catalog import PublishedName
from tierfs.errors import ContentMissing, PartsLost, TierError
from tierfs.points import At, reach
from tierfs.tiers.kinds import Tree
from tierfs.tiers.wrap import PASSING, TRIES
from tierfs.types import Ino, Replica, ReplicaState

Path = tuple[bytes, ...]


class Action(enum.StrEnum):
    """Stored in the catalog: never rename a value."""

    MKDIR = "mkdir"
    SYMLINK = "symlink"
    SPECIAL = "special"
    LINK = "link"
    PUBLISH = "publish"
    RENAME = "rename"
    EXCHANGE = "exchange"
    REMOVE = "remove"
    RMDIR = "rmdir"
    ATTRIBUTES = "attributes"


@dataclass(frozen=True, slots=True)
class Metadata:
    """Attributes of an object on the archive. ``mode`` has no type."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Step:
    action: Action
    path: Path
    other: Path = ()
    """LINK: the existing name; RENAME, EXCHANGE: the new name, the other one."""
    source: bytes = b""
    """PUBLISH: name of the temporary file; SYMLINK: target; EXCHANGE: token of its journal."""
    mode: int = 0
    """SPECIAL: mode with type."""
    number: int = 0
    """SPECIAL: device number; PUBLISH: size in bytes."""
    metadata: Metadata | None = None
    """PUBLISH, ATTRIBUTES."""
    fresh: bool = False
    """PUBLISH: nothing stood at ``path``. For planning only, like the next one; not stored."""
    directory: bool = False
    """RENAME: what moves may be a directory."""

    @property
    def fills(self) -> Path | None:
        """The name that gets an object by this step."""
        if self.action in (Action.MKDIR, Action.SYMLINK, Action.SPECIAL, Action.LINK, Action.PUBLISH):
            return self.path
        return self.other if self.action is Action.RENAME else None

    @property
    def touches(self) -> tuple[Path, ...]:
        """Every name that the step reads or changes."""
        return (self.path, self.other) if self.other else (self.path,)

    @property
    def weight(self) -> int:
        """Bytes that the step needs in the catalog at most: JSON may take six for one."""
        text = len(self.source) + sum(len(name) + 1 for path in self.touches for name in path)
        if self.metadata is not None:
            text += sum(len(name) + len(value) for name, value in self.metadata.xattrs.items())
        return 6 * text + 200

    @property
    def alone(self) -> bool:
        """Whether the step must have a batch of its own."""
        return self.action is Action.EXCHANGE or (self.action is Action.RENAME and self.directory)

    def take(self, store: Tree) -> bool:
        """Do it, unless it was done. False when PUBLISH finds no temporary file. Blocks; raises TierError."""
        match self.action:
            case Action.MKDIR:
                store.mkdir(self.path)
            case Action.SYMLINK:
                store.symlink(self.source, self.path)
            case Action.SPECIAL:
                store.special(self.path, self.mode, self.number)
            case Action.LINK:
                store.link(self.other, self.path)
            case Action.RENAME:
                store.rename(self.path, self.other)
            case Action.EXCHANGE:
                store.exchange(self.path, self.other, self.source.decode())
            case Action.REMOVE:
                store.remove(self.path)
            case Action.RMDIR:
                store.rmdir(self.path)
            case Action.ATTRIBUTES:
                assert self.metadata is not None
                m = self.metadata
                store.set_attributes(self.path, m.mode, m.uid, m.gid, m.mtime_ns, m.xattrs)
            case Action.PUBLISH:
                assert self.metadata is not None
                m = self.metadata
                return store.publish(self.source, self.path, m.mode, m.uid, m.gid, m.mtime_ns, m.xattrs, sync_dir=False)
        return True


@dataclass
class Effect:
    """What one operation adds to a batch."""

    steps: list[Step] = field(default_factory=list)
    names: dict[tuple[int, bytes], PublishedName | None] = field(default_factory=dict)
    stored: list[Replica] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def put(self, parent: int, name: bytes, ino: int, occupant: int) -> None:
        self.names[parent, name] = PublishedName(Ino(parent), name, Ino(ino), occupant)


@dataclass
class Batch:
    """Steps of the operations up to ``last``, in order, and the rows that are true once they are done."""

    last: int = 0
    """Sequence number of the last operation; 0: none yet."""
    steps: list[Step] = field(default_factory=list)
    names: dict[tuple[int, bytes], PublishedName | None] = field(default_factory=dict)
    """Changed rows of `published`; None: removed."""
    ahead: list[int] = field(default_factory=list)
    """Numbers of operations of this batch that others before them wait for (migrator.ahead): then ``last`` is 0."""
    stored: dict[int, Replica] = field(default_factory=dict)
    """By inode: the content that the archive has then."""
    gone: set[int] = field(default_factory=set)
    """Inodes that lost a name."""
    again: bool = False
    """Some steps may have been taken before."""
    split: bool = False
    """Ended by the rule, not for want of operations."""
    weight: int = 0
    """Bytes that `encode` needs at most, so far."""
    _by_ino: dict[int, set[tuple[int, bytes]]] = field(default_factory=dict)
    _touched: set[Path] = field(default_factory=set)
    _closed: bool = False

    # planning

    def accepts(self, effect: Effect) -> bool:
        """Whether the effect may be part of this batch, by the rule above."""
        if not self.steps or not effect.steps:
            return True
        if self._closed or any(step.alone for step in effect.steps):
            return False
        touched = self._touched
        if self._joins(effect):
            touched = touched - {self.steps[-1].path}
        return not any(step.fills in touched for step in effect.steps)

    def _joins(self, effect: Effect) -> bool:
        """Whether a publish and the rename that follows it can be one step: the temporary name never shows."""
        before, after = self.steps[-1], effect.steps[0]
        return (
            before.action is Action.PUBLISH
            and before.fresh
            and after.action is Action.RENAME
            and after.path == before.path
        )

    def add(self, last: int, effect: Effect) -> None:
        self.last = last
        steps = effect.steps
        if self.steps and steps and self._joins(effect):
            before = self.steps.pop()
            self._touched.discard(before.path)
            joined = Step(
                Action.PUBLISH, steps[0].other, source=before.source, number=before.number, metadata=before.metadata
            )
            steps = [joined, *steps[1:]]
        for step in steps:
            self.steps.append(step)
            self._touched.update(step.touches)
            self._closed = self._closed or step.alone
            self.weight += step.weight
        for key, row in effect.names.items():
            old = self.names.get(key)
            if old is not None:
                self._by_ino[old.ino].discard(key)
            self.names[key] = row
            if row is not None:
                self._by_ino.setdefault(row.ino, set()).add(key)
        self.gone |= effect.gone
        self.stored.update((replica.ino, replica) for replica in effect.stored)

    def names_of(self, ino: int) -> list[PublishedName]:
        """Rows changed by this batch that name ``ino``."""
        rows = (self.names[key] for key in sorted(self._by_ino.get(ino, ())))
        return [row for row in rows if row is not None]

    # carrying out

    def execute(self, store: Tree, alive: Callable[[], object] = lambda: None) -> None:
        """Take the steps, with a call of ``alive`` before each, and make them durable. Blocks; TierError when the
        archive fails, ContentMissing when the
        bytes that a step would publish are not there."""
        again, self.again = self.again, True
        for number in range(len(self.steps)):
            _several_times(partial(self._take, number, store, again), partial(self._take, number, store, True), alive)
            reach(At.PUBLISH_STEPPED)
        reach(At.PUBLISH_TAKEN)
        directories = {path[:-1] for step in self.steps for path in step.touches}
        sync = partial(store.sync_directories, directories)
        _several_times(sync, sync, alive)
        reach(At.PUBLISH_DURABLE)

    def _take(self, number: int, store: Tree, again: bool) -> None:
        step = self.steps[number]
        if not step.take(store) and not (again and self._published_before(number, store)):
            shown = b"/".join(step.path).decode(errors="replace")
            if store.ends_with_process(step.source):
                raise PartsLost(f"tier {store.name}: the parts of {shown} were not completed; it is sent again")
            raise ContentMissing(f"tier {store.name}: the copy of {shown} was removed; it is made again")

    def _published_before(self, number: int, store: Tree) -> bool:
        """Whether the content of a PUBLISH stands where that or a later step of this batch puts it."""
        path, temp, size = self.steps[number].path, self.steps[number].source, self.steps[number].number
        if store.stands(path, temp, size):
            return True
        for step in self.steps[number + 1 :]:
            if step.path == path and step.action is Action.REMOVE:
                return True
            if step.path == path and step.action is Action.RENAME:
                path = step.other
                if store.stands(path, temp, size):
                    return True
        return False

    @property
    def temporaries(self) -> list[bytes]:
        return [step.source for step in self.steps if step.action is Action.PUBLISH]

    @property
    def exchanges(self) -> list[str]:
        """Tokens of journals to forget once the batch is durably recorded."""
        return [step.source.decode() for step in self.steps if step.action is Action.EXCHANGE]

    # in the catalog

    def encode(self) -> str:
        steps = [
            [
                step.action.value,
                _names(step.path),
                _names(step.other),
                _text(step.source),
                step.mode,
                step.number,
                _metadata(step.metadata),
            ]
            for step in self.steps
        ]
        names = [
            [parent, _text(name), *((row.ino, row.occupant) if row else ())]
            for (parent, name), row in self.names.items()
        ]
        stored = [
            [r.ino, r.version, r.tier, r.size, r.digest.hex() if r.digest else None] for r in self.stored.values()
        ]
        return json.dumps([self.last, steps, names, stored, sorted(self.gone), self.ahead], separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Batch:
        last, steps, names, stored, gone, *more = json.loads(text)
        batch = cls(last, again=True, gone=set(gone), ahead=list(more[0]) if more else [])
        for action, path, other, source, mode, number, metadata in steps:
            batch.steps.append(
                Step(
                    Action(action),
                    _path(path),
                    _path(other),
                    source.encode("latin-1"),
                    mode,
                    number,
                    _parse_metadata(metadata) if metadata else None,
                )
            )
        for parent, name, *row in names:
            key = parent, name.encode("latin-1")
            batch.names[key] = PublishedName(Ino(parent), key[1], Ino(row[0]), row[1]) if row else None
            if row:
                batch._by_ino.setdefault(row[0], set()).add(key)
        for ino, version, tier, size, digest in stored:
            batch.stored[ino] = Replica(
                Ino(ino), version, tier, ReplicaState.DURABLE, "", size, bytes.fromhex(digest) if digest else None
            )
        return batch


def _several_times(first: Callable[[], None], again: Callable[[], None], alive: Callable[[], object]) -> None:
    """One answer in ten that is wrong must not send a batch of hundreds of steps back to its start each time.
    Raises TierError."""
    work = first
    for left in reversed(range(TRIES)):
        alive()
        try:
            return work()
        except ContentMissing:
            raise
        except TierError as error:
            if not left or not error.temporary or error.errno not in PASSING:
                raise
        work = again


def _text(value: bytes) -> str:
    """Any bytes as text that JSON can carry."""
    return value.decode("latin-1")


def _names(path: Path) -> str:
    return _text(b"/".join(path))


def _path(text: str) -> Path:
    return tuple(text.encode("latin-1").split(b"/")) if text else ()


def _parse_metadata(row: list[Any]) -> Metadata:
    mode, uid, gid, mtime_ns, xattrs = row
    return Metadata(
        mode, uid, gid, mtime_ns, {name.encode("latin-1"): value.encode("latin-1") for name, value in xattrs.items()}
    )


def _metadata(metadata: Metadata | None) -> Sequence[object] | None:
    if metadata is None:
        return None
    xattrs = {_text(name): _text(value) for name, value in metadata.xattrs.items()}
    return [metadata.mode, metadata.uid, metadata.gid, metadata.mtime_ns, xattrs]
