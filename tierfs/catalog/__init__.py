"""The catalog: SQLite, the single source of truth about names, attributes and replicas."""

from tierfs.catalog.catalog import KEPT, Catalog, Entry, Operation, PublishedName
from tierfs.catalog.database import Frozen
from tierfs.catalog.mending import MendableCatalog
from tierfs.catalog.snapshot import discard_snapshot, take_snapshot

__all__ = [
    "KEPT",
    "Catalog",
    "Entry",
    "Frozen",
    "MendableCatalog",
    "Operation",
    "PublishedName",
    "discard_snapshot",
    "take_snapshot",
]
