"""What deletes wait for, and what the names are after the memory tier was lost. Pure: histories in, decisions out.

Numbers are places in the order of everything that happened (the catalog's ``seq``). A delete is *due* once every file
closed before it is durable. A file that is deleted before it was durable never will be; what waited for it then waits
for everything closed before that second delete instead. Else a trainer that saves N and deletes N-1, faster than N
is drained, would have each delete release the one before it, until no durable checkpoint is left.

After a loss names go back to how they were when the first lost file was closed (`rewind`): so they are a prefix of what
happened. Durable files made later are not taken away for that: they stay under the name that they had last, or, when
that one's former file came back, an earlier one of theirs. Directories made later, whose renames vouch for what is in
them, and lost files have their first name; a lost file has one so that reading it fails instead of finding nothing.

A name can be wanted twice, by what the prefix has there and by what was made later. In this order:

- Of two directories, one of which was removed, what is in the later one is in the other now: the path is the same.
- A deleted file that came back keeps its name, and the later file goes: to whoever reads the path it is a rewrite that
  was taken back, like one in place. Unless somebody was told that the later one is durable.
- A removed directory that came back and in which nothing is gives way to a file.
- Else the later one, a file with bytes or a directory with such files in it, gets a name of its own beside that
  (``name.recovered``). So no durable bytes of a file that had a name are without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from tierfs.types import ROOT_INO, OpKind

NEVER = 1 << 62
"""A number above all that are ever given."""

NAME_MAX = 255
"""Bytes of a name."""

Name = tuple[int, bytes]
"""Inode of the directory, and the name in it."""


def frontier(first_waiting: int | None, deleted: Iterable[tuple[int, int]]) -> int:
    """Deletes before this number are due. ``first_waiting``: the first close of a file that is still there and not
    durable, None when there is none. ``deleted``: (close, delete) of files that were not durable when they went."""
    limit = NEVER if first_waiting is None else first_waiting
    for close, delete in sorted(deleted, key=lambda pair: pair[1], reverse=True):
        # Latest delete first: a limit that falls can only make earlier deletes count, which are still to come.
        if delete > limit:
            limit = min(limit, close)
    return limit


class Change(NamedTuple):
    """One change of names. As in the oplog: (parent, name) is what it removes, for a LINK what it makes."""

    seq: int
    kind: OpKind
    ino: int
    parent: int
    name: bytes
    parent2: int = 0
    name2: bytes = b""
    victim: int = 0
    """RENAME: the inode that had the new name before."""


class Fact(NamedTuple):
    """What is left of an inode after the loss."""

    live: bool
    """It had a name when the memory was lost."""
    usable: bool
    """It may have a name again: a file with durable bytes, or something that is no file and not forgotten."""
    directory: bool = False
    vouched: bool = False
    """Somebody was told that its present content is durable."""


@dataclass
class Rewound:
    names: dict[Name, int] = field(default_factory=dict)
    """Names that change by the recovery, with their inode; 0: the name goes."""
    unlinked: list[tuple[Name, int]] = field(default_factory=list)
    """Names of the prefix that do not come back, with the inode that they had: their bytes are nowhere."""
    linked: list[tuple[Name, int]] = field(default_factory=list)
    """Names made after the prefix that stay, with their inode; directories before what is in them."""
    beside: dict[int, bytes] = field(default_factory=dict)
    """Inodes whose name, this one, is another's now, and that have one of their own in the same directory."""
    dropped: list[int] = field(default_factory=list)
    """Inodes that had a name and have none any more: somebody else has it now, who had it in the prefix."""


def rewind(
    changes: Sequence[Change],
    lookup: Callable[[int, bytes], int],
    names_of: Callable[[int], list[Name]],
    fact: Callable[[int], Fact],
    held: Sequence[tuple[int, Name]] = (),
) -> Rewound:
    """Take ``changes`` back, in order of time all of those after the first lost close, and keep what was made in them.

    ``lookup`` and ``names_of`` tell the names as of the loss (0: no such name). ``held``: inodes deleted before
    ``changes``, and the names that they lost, which come back where nothing else has them: what those deletes
    waited for (`frontier`) was lost. Of directories only those that something comes back in."""
    return _Rewind(changes, lookup, names_of, fact, held).run()


class _Rewind:
    def __init__(
        self,
        changes: Sequence[Change],
        lookup: Callable[[int, bytes], int],
        names_of: Callable[[int], list[Name]],
        fact: Callable[[int], Fact],
        held: Sequence[tuple[int, Name]],
    ) -> None:
        self._changes = changes
        self._lookup = lookup
        self._names_of = names_of
        self._fact = fact
        self._state: dict[Name, int] = {}
        """Names that differ, or may, from those as of the loss."""
        self._count: dict[int, int] = {}
        """Names of an inode in the new state, where that may differ."""
        self._history: dict[int, list[Name]] = {}
        """Names that an inode was given by the changes, in order."""
        self._linked: dict[int, list[Name]] = {}
        """Those of them that were further links."""
        for ino, name in held:
            self._history.setdefault(ino, []).append(name)
        self._busy: set[int] = set()
        self._seeking: set[int] = set()
        self._merged: dict[int, int] = {}
        """Directory without a name → the one that is at its path now."""
        self._result = Rewound()

    def _get(self, name: Name) -> int:
        found = self._state.get(name)
        return self._lookup(*name) if found is None else found

    def _names(self, ino: int) -> int:
        if ino == ROOT_INO:
            return 1
        found = self._count.get(ino)
        return len(self._names_of(ino)) if found is None else found

    def _set(self, name: Name, ino: int) -> None:
        before = self._get(name)
        for other, step in ((before, -1), (ino, 1)):
            if other:
                self._count[other] = self._names(other) + step
        self._state[name] = ino

    def run(self) -> Rewound:
        for change in reversed(self._changes):
            self._take_back(change)
        for change in self._changes:
            self._remember(change)
        self._drop_dead()
        made = list(self._history)
        for live in (True, False):
            for ino in made:
                if self._fact(ino).live is live:
                    self._keep(ino)
        for live in (True, False):
            for ino in made:
                fact = self._fact(ino)
                if fact.live is live and fact.usable and not fact.directory and not self._names(ino):
                    self._rescue(ino, fact)
        result = self._result
        result.names = {name: ino for name, ino in self._state.items() if ino != self._lookup(*name)}
        result.dropped = [ino for ino in made if self._fact(ino).live and not self._names(ino)]
        return result

    def _take_back(self, change: Change) -> None:
        here, there = (change.parent, change.name), (change.parent2, change.name2)
        match change.kind:
            case OpKind.LINK:
                self._set(here, 0)
            case OpKind.UNLINK:
                self._set(here, change.ino)
            case OpKind.RENAME:
                self._set(there, change.victim)
                self._set(here, change.ino)
            case OpKind.EXCHANGE:
                first, second = self._get(here), self._get(there)
                self._set(here, second)
                self._set(there, first)
            case OpKind.CONTENT | OpKind.ATTRIBUTES:
                pass

    def _remember(self, change: Change) -> None:
        """The names that inodes had after the prefix."""
        here, there = (change.parent, change.name), (change.parent2, change.name2)
        match change.kind:
            case OpKind.LINK:
                self._history.setdefault(change.ino, []).append(here)
                self._linked.setdefault(change.ino, []).append(here)
            case OpKind.RENAME:
                self._history.setdefault(change.ino, []).append(there)
            case OpKind.EXCHANGE:
                self._history.setdefault(change.ino, []).append(there)
            case _:
                pass

    def _drop_dead(self) -> None:
        """What the prefix names and was deleted later comes back only if there is something to come back."""
        for name, ino in list(self._state.items()):
            if ino and not self._fact(ino).live and not self._fact(ino).usable:
                self._set(name, 0)
                self._result.unlinked.append((name, ino))

    def _keep(self, ino: int, *, needed: bool = False) -> bool:
        """Give what was made after the prefix a name, and links made then back to what has one. ``needed``: a
        directory that was removed again has something in it that comes back."""
        fact = self._fact(ino)
        final = self._names_of(ino) if fact.live else []
        if self._names(ino):
            for name in self._linked.get(ino, ()):
                if name in final:
                    self._place(name, ino)
            return True
        if ino in self._busy or not (fact.live or (fact.usable and (needed or not fact.directory))):
            return False
        self._busy.add(ino)
        try:
            history = self._history.get(ino, [])
            if fact.directory or not fact.usable:
                return any(self._place(name, ino) for name in [*history, *final])
            if any([self._place(name, ino) for name in final]):
                return True
            if any(self._place(name, ino) for name in reversed(history)):
                return True
            return fact.vouched and any(self._place(name, ino, instead=True) for name in final)
        finally:
            self._busy.discard(ino)

    def _place(self, name: Name, ino: int, *, instead: bool = False) -> bool:
        """Whether the inode has the name now. ``instead``: also in place of a deleted file that came back."""
        home = self._home(name[0])
        if not home:
            return False
        name = home, name[1]
        before = self._get(name)
        if before == ino:
            return True
        if before and not (instead and not self._fact(before).live and not self._fact(before).directory):
            return False
        if before:
            self._result.unlinked.append((name, before))
        self._give(name, ino)
        return True

    def _give(self, name: Name, ino: int) -> None:
        self._set(name, ino)
        self._result.linked.append((name, ino))

    def _home(self, directory: int) -> int:
        """Where to put what was in this directory: there, if it has a name or can have one, or in the directory that is
        at its path; 0: there is none."""
        while not self._names(directory) and directory in self._merged:
            directory = self._merged[directory]
        if self._names(directory) or self._keep(directory, needed=True):
            return directory
        if directory in self._seeking:
            return 0
        self._seeking.add(directory)
        try:
            live = self._fact(directory).live
            for parent, name in self._own(directory):
                home = self._home(parent)
                other = self._get((home, name)) if home else 0
                if other and self._fact(other).directory and not (live and self._fact(other).live):
                    self._merged[directory] = other
                    return other
            return 0
        finally:
            self._seeking.discard(directory)

    def _own(self, ino: int) -> list[Name]:
        """The names that it had last; of what had none any more all of them, the last one first."""
        return self._names_of(ino) if self._fact(ino).live else self._history.get(ino, [])[::-1]

    def _rescue(self, ino: int, fact: Fact) -> None:
        """A file that has bytes and found none of its names free."""
        places = [(home, name) for parent, name in self._own(ino) if (home := self._home(parent))]
        wanted = [(place, self._get(place)) for place in places]
        if any(there and self._is_back(there, fact) for _, there in wanted):
            return
        for place, there in wanted:
            if fact.live and there and self._gives_way(place, there):
                self._result.unlinked.append((place, there))
                return self._give(place, ino)
        for parent, name in self._own(ino):
            home = self._home(parent) or self._shelter(parent)
            if home:
                return self._put_beside(home, name, ino)

    def _is_back(self, there: int, later: Fact) -> bool:
        """Whether what has the name of the ``later`` file is what its path shows again, so that it need not stay."""
        fact = self._fact(there)
        if fact.directory or not fact.usable:
            return False
        return not later.live or not (fact.live or later.vouched)

    def _gives_way(self, name: Name, directory: int) -> bool:
        """Whether what has the name is a directory of the prefix that was removed, and nothing in it came back."""
        fact = self._fact(directory)
        if fact.live or not fact.directory or (name, directory) in self._result.linked:
            return False
        return not any(ino and parent == directory for (parent, _), ino in self._state.items())

    def _shelter(self, directory: int) -> int:
        """Give a directory whose names are others' now a name of its own: itself, or 0 if nothing is known of it."""
        names = self._own(directory)
        if not self._fact(directory).directory or not names or directory in self._seeking:
            return 0
        self._seeking.add(directory)
        try:
            parent, name = names[0]
            home = self._home(parent) or self._shelter(parent) or ROOT_INO
        finally:
            self._seeking.discard(directory)
        self._put_beside(home, name, directory)
        return directory

    def _put_beside(self, home: int, name: bytes, ino: int) -> None:
        if not self._get((home, name)):
            return self._give((home, name), ino)
        for number in count(1):
            end = b".recovered" if number == 1 else b".recovered-%d" % number
            beside = home, name[: NAME_MAX - len(end)] + end
            if not self._get(beside):
                self._result.beside[ino] = name
                return self._give(beside, ino)
