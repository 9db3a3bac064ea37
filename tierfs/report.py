"""Reports of what a start found and put right, kept in the state directory as JSON, newest last; and that of the last
rebuild of the catalog."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierfs.durable import write_whole

FILE = "recovery.json"
REBUILD = "rebuild.json"
GONE, ROLLED_BACK, LOST, UNDONE = "memory", "rolled back", "lost", "undone"
"""Severities of what fsck tells of the next mount's recovery: of no tier that is damaged."""
KEPT = 20
"""Reports; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A path whose newest content was lost or undone, with the version and size in bytes before and after."""

    path: str
    from_version: int
    from_size: int
    to_version: int
    to_size: int

    def __str__(self) -> str:
        was = f"{self.to_size} bytes, instead of version {self.from_version} of {self.from_size} bytes"
        return f"rolled back: {self.path} is again its version {self.to_version} of {was}"


@dataclass(frozen=True, slots=True)
class Lost:
    """A file of which no bytes are left; if it has a name, reading it fails with EIO."""

    path: str
    version: int
    """0: unknown."""
    size: int
    """0, too, of a file that had been deleted and whose directory is back without it."""

    def __str__(self) -> str:
        return f"lost: {self.path} had bytes in memory only"


@dataclass(frozen=True, slots=True)
class Undone:
    """A change of names that did not last."""

    operation: str
    """unlink, rmdir; replace: another file had been renamed to ``path``; rename: from ``path`` to ``to``; name: ``to``
    is something else again than what is at ``path`` now."""
    path: str
    """The name that is there again; for name, the one that it has now."""
    to: str | None = None

    def __str__(self) -> str:
        if self.operation == "replace":
            return f"undone: {self.path} is again what it was before another file replaced it"
        if self.operation == "name":
            return f"undone: {self.to} is again what it was before; what was made under that name is {self.path} now"
        return f"undone: {self.operation} of {self.path}" + (f" to {self.to}" if self.to is not None else "")


@dataclass
class Report:
    at: float = field(default_factory=time.time)
    """Seconds since the epoch; identifies the report."""
    rolled_back: list[RolledBack] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    undone: list[Undone] = field(default_factory=list)
    orphans_removed: int = 0
    """Files on the tiers that nothing referred to."""

    def __bool__(self) -> bool:
        return bool(self.rolled_back or self.lost or self.undone or self.orphans_removed)

    def lines(self) -> list[str]:
        """For people; what was found by path, one line each."""
        return [str(entry) for entry in (*self.rolled_back, *self.lost, *self.undone)]


def read_reports(state: Path) -> list[Report]:
    """The reports that are kept, oldest first; none when there is no file or it is no such file."""
    try:
        found = json.loads((state / FILE).read_text())
        return [_parse(entry) for entry in found["reports"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        return []


def _parse(entry: dict[str, Any]) -> Report:
    return Report(
        at=float(entry["at"]),
        rolled_back=[RolledBack(**item) for item in entry["rolled_back"]],
        lost=[Lost(**item) for item in entry["lost"]],
        undone=[Undone(**item) for item in entry["undone"]],
        orphans_removed=int(entry["orphans_removed"]),
    )


def keep_report(state: Path, report: Report) -> None:
    """Add ``report``, or write it again if it is there. Blocks on the disk. Raises OSError."""
    others = [known for known in read_reports(state) if known.at != report.at]
    write_reports(state, [*others, report][-KEPT:])


def write_reports(state: Path, reports: Iterable[Report]) -> None:
    _write(state, FILE, {"format": 1, "reports": [asdict(report) for report in reports]})


def keep_rebuild(state: Path, report: Mapping[str, object]) -> None:
    """What ``tierfs fsck --rebuild`` did, in the place of what the last one did. Blocks on the disk. Raises OSError."""
    _write(state, REBUILD, report)


def read_rebuild(state: Path) -> dict[str, Any] | None:
    """What was kept; None when there is no file or it is no such file."""
    try:
        found = json.loads((state / REBUILD).read_text())
        copy = found["copy"]
        return {
            **found,
            "at": float(found["at"]),
            "why": str(found["why"]),
            "kept_aside": None if found["kept_aside"] is None else str(found["kept_aside"]),
            "copy": None if copy is None else {"number": int(copy["number"]), "made": str(copy["made"])},
            "batches_logged": int(found["batches_logged"]),
            "files": int(found["files"]),
            "done": [{key: str(deed[key]) for key in ("kind", "what", "path")} for deed in found["done"]],
            "lost": [str(path) for path in found["lost"]],
            "problems": [{key: str(it[key]) for key in ("severity", "what", "path")} for it in found["problems"]],
        }
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _write(state: Path, name: str, content: Mapping[str, object]) -> None:
    write_whole(state, name, json.dumps(content, indent=1) + "\n")
