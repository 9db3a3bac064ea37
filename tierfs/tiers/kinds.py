"""What an archive's tree can be kept in."""

from __future__ import annotations

from typing import TypeAlias

from tierfs.tiers.copies import CatalogCopies
from tierfs.tiers.object_copies import ObjectCopies
from tierfs.tiers.object_tree import ObjectTree
from tierfs.tiers.tree import TreeStore

Tree: TypeAlias = TreeStore | ObjectTree
Copies: TypeAlias = CatalogCopies | ObjectCopies


def copies_on(tree: Tree) -> Copies:
    """Copies of the catalog on an archive, and its log of batches."""
    return ObjectCopies(tree) if isinstance(tree, ObjectTree) else CatalogCopies(tree)
