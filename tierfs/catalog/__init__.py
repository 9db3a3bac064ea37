"""The catalog: SQLite, the single source of truth about names, attributes and replicas."""

from tierfs.catalog.catalog import Catalog, Entry, Operation, PublishedName

__all__ = ["Catalog", "Entry", "Operation", "PublishedName"]
