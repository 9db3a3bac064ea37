"""Copies of the catalog and the log of batches: the same on a directory and in a store of blobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.tiers.blobs import PART
from tierfs.tiers.copies import CatalogCopies
from tierfs.tiers.directory_blobs import DirectoryBlobs
from tierfs.tiers.object_copies import ObjectCopies
from tierfs.tiers.object_names import CATALOG
from tierfs.tiers.object_tree import ObjectTree
from tierfs.tiers.tree import TreeStore

Copies = CatalogCopies | ObjectCopies


class World:
    def __init__(self, tree: TreeStore | ObjectTree) -> None:
        self.tree = tree

    def copies(self) -> Copies:
        """As a new process has them."""
        return CatalogCopies(self.tree) if isinstance(self.tree, TreeStore) else ObjectCopies(self.tree)


@pytest.fixture(params=["directory", "blobs"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    tree = TreeStore("archive", tmp_path / "archive")
    made: TreeStore | ObjectTree = tree
    if request.param == "blobs":
        tree.prepare()
        made = ObjectTree(DirectoryBlobs(tree), "a directory")
    made.prepare()
    yield World(made)
    made.close()


def test_what_was_logged_comes_back_in_order(world: World) -> None:
    assert list(world.copies().logged(0)) == []
    assert world.tree.position() == (0, 0)
    first = world.copies()
    for number in range(12):
        first.append(b"a%d" % number)
    assert first.reached == world.tree.position()
    assert first.reached is not None
    assert first.reached[1] == first.log_bytes > 0
    second = world.copies()
    second.append(b"b")
    assert world.tree.position() > first.reached
    third = second.advance()
    second.append(b"c")
    assert list(world.copies().logged(0)) == [*(b"a%d" % number for number in range(12)), b"b", b"c"]
    assert list(world.copies().logged(third)) == [b"c"]


@pytest.mark.parametrize("size", [10, PART, PART + 5])
def test_a_copy_comes_back_whole_or_not_at_all(world: World, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"c" * size)
    copies = world.copies()
    copies.begin()
    pieces: list[int] = []
    manifest = copies.put(source, copies.advance(), "uuid", 7, 8, pieces.append)
    assert sum(pieces) >= size
    assert world.copies().manifests() == [manifest]
    assert world.copies().fetch(manifest, target)
    assert target.read_bytes() == source.read_bytes()
    target.unlink()
    if isinstance(world.tree, ObjectTree):
        world.tree.blobs.put(f"{CATALOG}copy-{manifest.number}", b"d" * size)
    else:
        (world.tree.root / ".tierfs" / "catalog" / f"copy-{manifest.number}").write_bytes(b"d" * size)
    assert not world.copies().fetch(manifest, target)
    assert not target.exists()


def test_the_newest_two_are_kept_with_their_logs(world: World, tmp_path: Path) -> None:
    source = tmp_path / "source"
    copies = world.copies()
    copies.begin()
    numbers = []
    for content in (b"1", b"2", b"3"):
        source.write_bytes(content)
        copies.append(b"before " + content)
        numbers.append(copies.advance())
        copies.put(source, numbers[-1], "uuid", 1, 2)
    copies.append(b"at last")
    assert [manifest.number for manifest in world.copies().manifests()] == [numbers[2], numbers[1]]
    assert list(world.copies().logged(0)) == [b"before 3", b"at last"]


def test_clean_names_one_copy_until_it_is_forgotten(world: World, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"catalog")
    copies = world.copies()
    copies.forget_clean()
    copies.begin()
    manifest = copies.put(source, copies.advance(), "uuid", 1, 2)
    assert world.copies().clean() is None
    copies.declare_clean(manifest)
    assert world.copies().clean() == manifest
    world.copies().forget_clean()
    assert world.copies().clean() is None


def test_a_log_ends_where_it_is_damaged(world: World) -> None:
    copies = world.copies()
    for payload in (b"1", b"2", b"3"):
        copies.append(payload)
    if isinstance(world.tree, ObjectTree):
        world.tree.blobs.put(f"{CATALOG}log-1/0000000001", b"damaged")
    else:
        log = world.tree.root / ".tierfs" / "catalog" / "log-1"
        raw = bytearray(log.read_bytes())
        raw[len(raw) // 2] ^= 1
        log.write_bytes(raw)
    assert list(world.copies().logged(0)) == [b"1"]
