"""Identifiers and frozen values shared by every layer. No I/O, no behaviour beyond derivation."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

Ino = NewType("Ino", int)
"""Inode number on the mount; 1 is the root. Never reused within a catalog."""

ROOT_INO = Ino(1)


class ReplicaState(enum.IntEnum):
    """Life of one version's bytes on one tier. Stored in the catalog: never renumber."""

    OPEN = 1
    """The ack tier's replica of a version that is open for writing; bytes may change."""
    WRITTEN = 2
    """Closed and complete, but neither fsynced nor verified by tierfs (ack tier only)."""
    DURABLE = 3
    """Complete, fsynced and digest known. On a persistent tier this is what "durable" means."""


class OpKind(enum.IntEnum):
    """Kinds of row in the oplog, which the archive replays in order. Never renumber."""

    LINK = 1
    UNLINK = 2
    RENAME = 3
    EXCHANGE = 4
    CONTENT = 5
    ATTRIBUTES = 6


class Attributes(NamedTuple):
    """What ``stat`` reports for one inode. Times in nanoseconds since the epoch, size in bytes."""

    ino: Ino
    mode: int
    uid: int
    gid: int
    nlink: int
    rdev: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    version: int
    """Current version of a regular file's content; 0 for every other kind of inode."""
    blocks: int = 0
    """512-byte blocks the content occupied at its last close; fewer than the size says for a sparse file."""


class Replica(NamedTuple):
    """One version's bytes on one tier. ``key`` names the file within the tier."""

    ino: Ino
    version: int
    tier: str
    state: ReplicaState
    key: str
    size: int
    digest: bytes | None
    """xxh3-128 tree digest (docs/DURABILITY.md), None while it was never computed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Space of one tier in bytes. ``available`` is what a new file can still get."""

    capacity: int
    used: int
    available: int
