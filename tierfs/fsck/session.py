"""What every fsck needs: the state directory to itself, and the tiers open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.catalog.database import journals
from tierfs.policy.model import Policy
from tierfs.state import CATALOG, state_lock
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.memory import mounted_at

Progress = Callable[[int, int, str], object]


@dataclass(frozen=True, slots=True)
class Deed:
    """One thing that fsck did."""

    what: str
    path: str
    kind: str = "mended"
    """mended · restored (came back from a tier) · recovered (bytes that have another name now) · lost (a file) ·
    as found (bytes on the archive that nothing vouches for) · damaged (a copy or log that was no help) · removed"""

    def as_json(self) -> dict[str, str]:
        return {"kind": self.kind, "what": self.what, "path": self.path}


@dataclass
class Report:
    """What fsck did, and what it could not mend."""

    deeds: list[Deed] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)

    def did(self, what: str, path: bytes | str, kind: str = "mended") -> None:
        self.deeds.append(Deed(what, path if isinstance(path, str) else path.decode(errors="replace"), kind))

    def lose(self, what: str, path: bytes) -> None:
        """A file is gone. Whatever was done about it before did not mend it, and is not told."""
        shown = path.decode(errors="replace")
        self.deeds = [deed for deed in self.deeds if deed.kind != "mended" or deed.path != shown]
        self.did(what, shown, "lost")

    @property
    def lost(self) -> list[str]:
        """Files that had a name and whose bytes no tier had."""
        return [deed.path for deed in self.deeds if deed.kind == "lost"]

    @property
    def as_found(self) -> list[str]:
        """Files whose content is what somebody else left on the archive, or may be."""
        return [deed.path for deed in self.deeds if deed.kind == "as found"]

    def as_json(self) -> dict[str, object]:
        done = [deed.as_json() for deed in self.deeds]
        told = {"done": done, "lost": self.lost, "as_found": self.as_found, "problems": self.problems}
        return {**self.facts, **told}


@contextlib.contextmanager
def opened(policy: Policy) -> Iterator[Tiers]:
    """The tiers, with the state directory locked. Memory tiers that were not mounted are taken away again. MountError
    while the policy is mounted; TierError."""
    with state_lock(policy.state):
        memory = policy.state / "memory"
        found = {config.name for config in policy.tiers if mounted_at(memory / config.name) is not None}
        tiers = Tiers.open(policy)
        try:
            yield tiers
        finally:
            for mount in tiers.mounts:
                if mount.name not in found:  # what a clean umount had taken away
                    mount.unmount()
            tiers.close()


def catalog_path(policy: Policy) -> Path:
    return policy.state / CATALOG


def has_catalog(policy: Policy) -> bool:
    """Whether there is one, or what is left of one."""
    path = catalog_path(policy)
    return path.exists() or any(journal.exists() for journal in journals(path))
