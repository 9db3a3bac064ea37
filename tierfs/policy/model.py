"""What a checked policy file says, as frozen values. docs/POLICY.md describes every key."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TierKind = Literal["memory", "dir", "object"]
Layout = Literal["tree", "chunks"]
Mode = Literal["auto", "passthrough", "userspace"]


class Keep(enum.Enum):
    """When a clean replica leaves a tier."""

    WATERMARK = "watermark"
    """Between the tier's high and low watermark, oldest close first (the default)."""
    ALL = "all"
    """Never."""
    NONE = "none"
    """As soon as a tier further down holds it durably."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier. Sizes in bytes; ``high`` and ``low`` are fractions of the capacity (0..1]."""

    name: str
    kind: TierKind
    path: Path | None
    """Directory of the tier; None for a memory tier means tierfs mounts its own tmpfs."""
    size: int | None
    """Capacity; None means the whole filesystem below ``path``. Required for an own tmpfs."""
    high: float
    low: float
    numa: tuple[int, ...] = ()
    huge: str = "within_size"
    max: int | None = None
    """Own tmpfs only: bytes up to which it may grow while open files need it; None: twice the size."""

    url: str | None = None
    """Object store only: s3://bucket/prefix, gs://…, az://…"""
    endpoint: str | None = None
    """Object store only: URL of a server that is not the provider's own."""
    region: str | None = None
    layout: Layout = "tree"
    """Archive only."""
    codec: str = "none"
    """Layout chunks only: how chunks are stored where a rule does not say."""

    @property
    def hard_limit(self) -> int:
        """Bytes that an own tmpfs never has more of."""
        return self.max if self.max is not None else 2 * (self.size or 0)

    @property
    def persistent(self) -> bool:
        """True when the tier's bytes survive a power cut once fsynced."""
        return self.kind != "memory"


@dataclass(frozen=True, slots=True)
class Rule:
    """How files whose path on the mount matches are treated. Tier names are checked by the loader."""

    match: tuple[str, ...]
    ack: str
    close: str | None
    """None: close() returns at once ("ack"); a tier's name: it waits until durable there."""
    fsync: str | None
    """None: fsync() covers the ack tier only ("ack"); a tier's name: until durable there."""
    drain: str | None
    """Name of the lowest tier the files go to; None keeps them on the ack tier ("none")."""
    keep: dict[str, Keep]
    """Per tier name; absent means WATERMARK."""
    durable_within: float | None = None
    """Seconds after its close within which a file should be on the last tier; None: no deadline."""

    codec: str | None = None
    """How their chunks are stored, on an archive with layout chunks; None: as the archive says."""

    @property
    def lowest(self) -> str:
        """The tier at which the files' way ends."""
        return self.ack if self.drain is None else self.drain


@dataclass(frozen=True, slots=True)
class Limits:
    drain: int | None = None
    """Bytes per second over all drains; None is unlimited."""
    transfers: int = 4
    """Files copied at the same time."""
    unsynced: int | None = None
    """Bytes that may be on no persistent tier; None: as many as the memory tier takes."""
    stop: float | None = None
    """Seconds that a mount which is told to end (SIGTERM) may drain; None: until everything is durable."""
    read_timeout: float = 30.0
    """Seconds until a read of what no other tier has fails when nothing comes."""
    tier_timeout: float = 60.0
    """Seconds until a call into a tier that does not come back counts as failed."""
    encode_threads: int = 3
    """Threads that cut, compare and encode the chunks of one file on its way to an archive with layout chunks."""
    encode_nice: int = 0
    """Their nice level."""


@dataclass(frozen=True, slots=True)
class ScrubConfig:
    every: float | None = 30 * 86400.0
    """Seconds from the end of one reading of a tier to the next; None: only when asked."""
    rate: int | None = 50 << 20
    """Bytes per second; None is unlimited."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy file. ``tiers`` fastest first; the last one is the archive."""

    source: str
    mount: Path | None
    mode: Mode
    allow_other: bool
    state: Path
    tiers: tuple[TierConfig, ...]
    rules: tuple[Rule, ...]
    """The loader appends a catch-all, so that every path has a rule."""
    limits: Limits
    scrub: ScrubConfig = ScrubConfig()

    def tier(self, name: str) -> TierConfig:
        """The tier called ``name``; KeyError when there is none (the loader rules that out)."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)
