"""Names after a loss, and what deletes wait for, against a model that plays history forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.plan.retention import NEVER, Change, Fact, Name, Rewound, frontier, rewind
from tierfs.types import ROOT_INO, OpKind

CLOSES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.booleans()), max_size=8)
"""Files: number of the close, how much later it was deleted (0: it is there), whether it was durable before that."""


@settings(max_examples=400, deadline=None, derandomize=True)
@given(CLOSES, st.integers(0, 61))
def test_a_delete_is_due_once_nothing_before_it_waits_directly_or_through_another_delete(closes, number) -> None:  # type: ignore[no-untyped-def]
    """The rule as it is told: a delete waits for every file closed before; one that went waits with its own delete."""

    def due(delete: int, seen: frozenset[int] = frozenset()) -> bool:
        for close, age, durable in closes:
            if close >= delete or durable:
                continue
            if not age:
                return False
            if close + age > delete and close + age not in seen and not due(close + age, seen | {close + age}):
                return False
        return True

    waiting = min((close for close, age, durable in closes if not age and not durable), default=None)
    deleted = [(close, close + age) for close, age, durable in closes if age and not durable]
    assert due(number) == (number <= frontier(waiting, deleted))


def test_each_save_deletes_the_one_before_faster_than_they_are_drained() -> None:
    """Closes 10, 20, 30 of checkpoints that are deleted at 21, 31; the last is there. Nothing before 10 may go."""
    assert frontier(30, [(10, 21), (20, 31)]) == 10
    assert frontier(None, [(10, 21), (20, 31)]) == NEVER
    assert frontier(30, [(10, 21), (20, 25)]) == 30


@dataclass
class World:
    """A namespace that is changed and remembers every state."""

    names: dict[Name, int] = field(default_factory=dict)
    directories: set[int] = field(default_factory=lambda: {int(ROOT_INO)})
    changes: list[Change] = field(default_factory=list)
    states: list[dict[Name, int]] = field(default_factory=lambda: [{}])
    next: int = 2

    def of(self, ino: int) -> list[Name]:
        return [name for name, other in self.names.items() if other == ino]

    def below(self, directory: int, top: int) -> bool:
        while directory not in (ROOT_INO, top):
            directory = self.of(directory)[0][0]
        return directory == top

    def log(self, change: Change) -> None:
        self.changes.append(change)
        self.states.append(dict(self.names))

    def operate(self, kind: str, a: int, name: bytes, b: int, name2: bytes) -> None:
        places = sorted(ino for ino in self.directories if ino == ROOT_INO or self.of(ino))
        here, there = (places[a % len(places)], name), (places[b % len(places)], name2)
        child, other = self.names.get(here, 0), self.names.get(there, 0)
        seq = len(self.changes) + 1
        if kind in ("create", "mkdir") and not child:
            self.names[here] = self.next
            if kind == "mkdir":
                self.directories.add(self.next)
            self.log(Change(seq, OpKind.LINK, self.next, *here))
            self.next += 1
        elif kind == "link" and child and child not in self.directories and not other:
            self.names[there] = child
            self.log(Change(seq, OpKind.LINK, child, *there))
        elif kind == "remove" and child and not self.holds(child):
            del self.names[here]
            self.log(Change(seq, OpKind.UNLINK, child, *here))
        elif kind == "rename" and child and child != other and not self.below(there[0], child):
            if other and ((other in self.directories) != (child in self.directories) or self.holds(other)):
                return
            del self.names[here]
            self.names[there] = child
            self.log(Change(seq, OpKind.RENAME, child, *here, *there, other))
        elif kind == "exchange" and child and other and child != other:
            if self.below(there[0], child) or self.below(here[0], other):
                return
            self.names[here], self.names[there] = other, child
            self.log(Change(seq, OpKind.EXCHANGE, child, *here, *there))

    def holds(self, directory: int) -> bool:
        return any(parent == directory for parent, _ in self.names)


NAMES = st.sampled_from([b"a", b"b", b"c"])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["create", "create", "mkdir", "link", "remove", "rename", "rename", "exchange"]),
        st.integers(0, 3),
        NAMES,
        st.integers(0, 3),
        NAMES,
    ),
    max_size=25,
)


def reachable(names: dict[Name, int]) -> bool:
    """Whether every name hangs below the root, without a loop."""
    above = {ino: parent for (parent, _), ino in names.items()}
    for parent, _ in names:
        seen = set()
        while parent != ROOT_INO:
            if parent in seen or parent not in above:
                return False
            seen.add(parent)
            parent = above[parent]
    return True


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(OPERATIONS, st.integers(0, 25), st.sets(st.integers(2, 20)), st.sets(st.integers(2, 20)))
def test_names_after_a_loss(operations, first, durable, vouched) -> None:  # type: ignore[no-untyped-def]
    """``durable``: files of which there are bytes; ``vouched``: of these, files that somebody was promised."""
    world = World()
    for operation in operations:
        world.operate(*operation)
    first = min(first, len(world.changes))
    prefix, final = world.states[first], world.names

    def fact(ino: int) -> Fact:
        directory = ino in world.directories
        usable = directory or ino in durable
        return Fact(bool(world.of(ino)), usable, directory, usable and not directory and ino in vouched)

    def lookup(parent: int, name: bytes) -> int:
        return final.get((parent, name), 0)

    result = rewind(world.changes[first:], lookup, world.of, fact)
    after = {name: ino for name, ino in (final | result.names).items() if ino}

    assert reachable(after)
    for directory in world.directories:
        assert sum(ino == directory for ino in after.values()) <= 1
    check_prefix(prefix, after, fact, result)
    check_later(world, prefix, after, fact, result)
    check_beside(world, prefix, after, fact, result)
    check_links(prefix, after, result)
    check_links_order(world, prefix, result)


def check_prefix(prefix, after, fact, result: Rewound) -> None:  # type: ignore[no-untyped-def]
    """What was there at the first lost close is there again, but for what is nowhere, and what gives way: a deleted
    file to one that somebody was promised, an empty directory that had been removed to one that has bytes."""
    for name, ino in prefix.items():
        if after.get(name) == ino:
            continue
        if fact(ino).live or fact(ino).usable:
            now = fact(after[name])
            assert not fact(ino).live
            assert now.usable and not now.directory and now.live if fact(ino).directory else now.vouched
            assert not any(parent == ino for parent, _ in after)
        assert (name, ino) in result.unlinked


def path_in(names: dict[Name, int], name: Name) -> tuple[bytes, ...]:
    above = {ino: place for place, ino in names.items()}
    path = [name[1]]
    while name[0] != ROOT_INO:
        name = above[name[0]]
        path.append(name[1])
    return tuple(reversed(path))


def at(names: dict[Name, int], path: tuple[bytes, ...]) -> int:
    ino: int = ROOT_INO
    for part in path:
        ino = names.get((ino, part), 0)
    return ino


def check_later(world: World, prefix, after, fact, result: Rewound) -> None:  # type: ignore[no-untyped-def]
    old, now = set(prefix.values()), set(after.values())
    for ino in range(2, world.next):
        if ino in old or ino not in {change.ino for change in world.changes}:
            continue
        known = fact(ino)
        if not known.live and not known.usable:
            assert ino not in now
        if known.live and ino not in now:
            assert ino in result.dropped
            there = [at(after, path_in(world.names, name)) for name in world.of(ino)]
            if known.usable and not known.directory:  # a deleted file is back at its path
                assert any(other and fact(other).usable and not fact(other).directory for other in there)
                assert not known.vouched
                assert all(not fact(other).live for other in there if other)
    assert not set(result.dropped) & now


def check_beside(world: World, prefix, after, fact, result: Rewound) -> None:  # type: ignore[no-untyped-def]
    """What has a name of its own has bytes, or something in it that has, and its name is something else."""
    own: dict[int, set[bytes]] = {}
    for names in (prefix, *world.states):
        for (_, name), ino in names.items():
            own.setdefault(ino, set()).add(name)
    for (parent, name), ino in after.items():
        if name in own[ino]:
            continue
        assert name.removesuffix(b".recovered") == result.beside[ino] in own[ino]
        assert after[parent, result.beside[ino]] not in (0, ino)
        if ino in world.directories:
            assert any(above == ino for above, _ in after)
        else:
            assert fact(ino).usable
    assert set(result.beside) <= set(after.values())


def check_links(prefix, after, result: Rewound) -> None:  # type: ignore[no-untyped-def]
    """The oplog leads from the prefix to where we are."""
    names = dict(prefix)
    for name, ino in result.unlinked:
        assert names.pop(name) == ino
    for name, ino in result.linked:
        assert name not in names
        names[name] = ino
    assert names == after


def check_links_order(world: World, prefix, result: Rewound) -> None:  # type: ignore[no-untyped-def]
    there = {int(ROOT_INO), *prefix.values()}
    for (parent, _), ino in result.linked:
        assert parent in there
        there.add(ino)


def history(*operations: tuple[str, str, str]) -> World:
    world = World()
    for kind, name, name2 in operations:
        world.operate(kind, 0, name.encode(), 0, name2.encode())
    return world


def names_after(world: World, first: int, lost: set[int], vouched: set[int] = frozenset()) -> dict[str, int]:  # type: ignore[assignment]
    def fact(ino: int) -> Fact:
        return Fact(bool(world.of(ino)), ino not in lost, ino in world.directories, ino in vouched)

    def lookup(parent: int, name: bytes) -> int:
        return world.names.get((parent, name), 0)

    result = rewind(world.changes[first:], lookup, world.of, fact)
    return {name.decode(): ino for (_, name), ino in (world.names | result.names).items() if ino}


def test_a_pointer_does_not_outlive_what_it_points_to() -> None:
    """latest → tmp, renamed over, both durable, after a shard was lost."""
    world = history(
        ("create", "latest", ""), ("create", "shard", ""), ("create", "tmp", ""), ("rename", "tmp", "latest")
    )
    assert names_after(world, 2, lost={3}) == {"latest": 2, "shard": 3, "tmp": 4}


def test_files_saved_through_one_temporary_name_all_stay() -> None:
    saves = [("create", "tmp", ""), ("rename", "tmp", "1"), ("create", "tmp", ""), ("rename", "tmp", "2")]
    world = history(("create", "x", ""), *saves)
    assert names_after(world, 1, lost={2}) == {"x": 2, "1": 3, "2": 4}


def test_a_directory_that_was_renamed_into_place_is_what_it_was() -> None:
    world = history(("mkdir", "tmp-10", ""), ("create", "x", ""), ("rename", "tmp-10", "ckpt-10"))
    assert names_after(world, 2, lost={3}) == {"x": 3, "tmp-10": 2}


@pytest.mark.parametrize("promised", [False, True])
def test_made_anew_under_the_name_of_a_deleted_file(promised: bool) -> None:
    world = history(("create", "f", ""), ("create", "x", ""), ("remove", "f", ""), ("create", "f", ""))
    assert names_after(world, 2, lost={3}, vouched={4} if promised else set()) == {"x": 3, "f": 4 if promised else 2}


def test_a_directory_made_later_and_renamed_into_place_has_its_first_name() -> None:
    world = history(("create", "x", ""), ("mkdir", "tmp-10", ""), ("rename", "tmp-10", "ckpt-10"))
    assert names_after(world, 1, lost={2}) == {"x": 2, "tmp-10": 3}


def test_a_lost_file_that_replaced_a_durable_one_leaves_it_the_name() -> None:
    save = [("create", "tmp", ""), ("rename", "tmp", "f")]
    world = history(("create", "f", ""), *save)
    assert names_after(world, 1, lost={3}) == {"f": 2, "tmp": 3}
    world = history(("create", "f", ""), *save, *save)
    assert names_after(world, 1, lost={3, 4}) == {"f": 2, "tmp": 4}


def tree_after(first: int, lost: set[int], *operations: tuple[str, int, bytes], vouched: set[int] = frozenset()):  # type: ignore[assignment,no-untyped-def]
    """Path → inode. Operations: what, number of the directory (0: the root, 1: the oldest one, ...), name."""
    world = World()
    for kind, directory, name in operations:
        world.operate(kind, directory, name, directory, name + b".old" if kind == "rename" else b"")

    def fact(ino: int) -> Fact:
        return Fact(bool(world.of(ino)), ino not in lost, ino in world.directories, ino in vouched)

    def lookup(parent: int, name: bytes) -> int:
        return world.names.get((parent, name), 0)

    result = rewind(world.changes[first:], lookup, world.of, fact)
    after = {name: ino for name, ino in (world.names | result.names).items() if ino}
    return {b"/".join(path_in(after, name)).decode(): ino for name, ino in after.items()}


D = [("mkdir", 0, b"d"), ("create", 1, b"old"), ("create", 0, b"lost")]
"""Inodes 2, 3 and 4; two changes before the loss."""


def test_a_file_keeps_the_name_of_a_removed_directory_that_would_come_back_empty() -> None:
    made = [("mkdir", 0, b"d"), ("create", 0, b"lost"), ("remove", 0, b"d"), ("create", 0, b"d")]
    assert tree_after(1, {3}, *made) == {"lost": 3, "d": 4}
    assert tree_after(1, {3, 4}, *made) == {"lost": 3, "d": 2}


def test_a_directory_comes_back_with_what_was_in_it_and_the_file_of_its_name_stays_beside_it() -> None:
    made = [*D, ("remove", 1, b"old"), ("remove", 0, b"d"), ("create", 0, b"d")]
    assert tree_after(2, {4}, *made) == {"d": 2, "d/old": 3, "lost": 4, "d.recovered": 5}
    assert tree_after(2, {3, 4}, *made) == {"lost": 4, "d": 5}, "nothing of what was in it is left"


def test_what_is_in_a_directory_made_anew_is_where_it_was() -> None:
    again = [*D, ("remove", 1, b"old"), ("remove", 0, b"d"), ("mkdir", 0, b"d"), ("create", 1, b"new")]
    assert tree_after(2, {4}, *again) == {"d": 2, "d/old": 3, "lost": 4, "d/new": 6}
    same = [*again, ("create", 1, b"old")]
    assert tree_after(2, {4}, *same)["d/old"] == 3, "as a file that is rewritten"
    assert tree_after(2, {4}, *same, vouched={7})["d/old"] == 7


def test_a_directory_whose_name_is_that_of_another_one_again_stays_beside_it() -> None:
    """mv d d.old; mkdir d: two directories stay two, and the files of one do not get among those of the other."""
    made = [*D, ("rename", 0, b"d"), ("mkdir", 0, b"d"), ("create", 2, b"new")]
    assert tree_after(2, {4}, *made) == {"d": 2, "d/old": 3, "lost": 4, "d.recovered": 5, "d.recovered/new": 6}
    assert tree_after(2, {4, 6}, *made) == {"d": 2, "d/old": 3, "lost": 4}, "only for bytes"


def test_a_directory_whose_name_is_that_of_a_file_again_stays_beside_it() -> None:
    made = [("create", 0, b"f"), ("create", 0, b"lost"), ("remove", 0, b"f"), ("mkdir", 0, b"f"), ("create", 1, b"new")]
    assert tree_after(1, {3}, *made) == {"f": 2, "lost": 3, "f.recovered": 4, "f.recovered/new": 5}


def test_a_file_that_was_renamed_and_its_successor_both_stay() -> None:
    """mv log log.old, a new log."""
    made = [("create", 0, b"log"), ("create", 0, b"lost"), ("rename", 0, b"log"), ("create", 0, b"log")]
    assert tree_after(1, {3}, *made) == {"log": 2, "lost": 3, "log.recovered": 4}
    assert tree_after(1, {2, 3}, *made) == {"log": 2, "lost": 3, "log.recovered": 4}, "a lost one, too"


def test_a_name_beside_is_one_that_nothing_has() -> None:
    made = [("create", 0, b"log"), ("create", 0, b"log.recovered"), ("create", 0, b"lost"), ("rename", 0, b"log")]
    found = tree_after(2, {4}, *made, ("create", 0, b"log"))
    assert found == {"log": 2, "log.recovered": 3, "lost": 4, "log.recovered-2": 5}
    long = b"n" * 255
    found = tree_after(1, {3}, ("create", 0, long), ("create", 0, b"lost"), ("remove", 0, long), ("mkdir", 0, long))
    assert set(found) == {"lost", long.decode()}
    made = [("create", 0, long), ("create", 0, b"lost"), ("remove", 0, long), ("mkdir", 0, long), ("create", 1, b"new")]
    beside = "n" * 245 + ".recovered"
    assert set(tree_after(1, {3}, *made)) == {"lost", long.decode(), beside, beside + "/new"}
