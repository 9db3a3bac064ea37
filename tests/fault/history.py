"""What a power cut may leave, told by a record of what was done and knowing nothing of how tierfs works.

Each operation is an event with a number; a path's history is the list of what it held from which event on. A tree is
legal when each of its paths holds, whole, something of its history that is not older than what was promised, and when
what is gone is gone for a reason:

- a delete of what is known to have been durable stands only if everything closed before it is there, or something newer
  of the same file (promise 4),
- a file renamed after a rewrite that was lost is at its new name with what it held before,
- what finds its name taken is beside it, as ``name.recovered``,
- an archive that shows an event shows every earlier one, or what has replaced it since (promise 5).
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

import xxhash

Path = str
Content = int
"""The event that wrote it; `content_of` gives the bytes."""

_BESIDE = re.compile(r"\.recovered(-\d+)?(?=/|$)")
_SIZES = (0, 1, 100, 4096, 70_000, 300_000, 1_200_000, 5_000_000)


def content_of(event: Content) -> bytes:
    """The bytes that the event wrote: its number, then what follows from the number."""
    made = random.Random(event)
    return event.to_bytes(8, "little") + made.randbytes(made.choice(_SIZES))


@cache
def _digest_of(event: Content) -> bytes:
    return xxhash.xxh3_128_digest(content_of(event))


def content_id(data: bytes) -> Content | None:
    """Which event wrote ``data``; None when it is not whole."""
    event = int.from_bytes(data[:8], "little")
    return event if len(data) >= 8 and xxhash.xxh3_128_digest(data) == _digest_of(event) else None


@dataclass
class History:
    events: int = 0
    paths: dict[Path, list[tuple[int, Content | None]]] = field(default_factory=dict)
    """path → [(event, what it held from then on)], in order; nothing before the first"""
    owners: dict[tuple[Path, int], int] = field(default_factory=dict)
    """(path, event) → the file that it held from then on, named by the event that made it"""
    versions: dict[int, list[Content]] = field(default_factory=dict)
    """file → what it held, in order"""
    unlinks: list[tuple[int, Path]] = field(default_factory=list)
    directories: set[tuple[Path, Path]] = field(default_factory=set)
    """Names that one directory had."""
    promised: dict[Path, int] = field(default_factory=dict)
    """path → the event whose outcome, or a later one, must survive on every tier that is no memory"""
    vouched: dict[int, Content] = field(default_factory=dict)
    """file → what it holds or something newer, at one of its names, while it has one"""
    archived: dict[Path, int] = field(default_factory=dict)
    """the same for the archive"""

    def copy(self) -> History:
        paths = {path: list(states) for path, states in self.paths.items()}
        versions = {file: list(contents) for file, contents in self.versions.items()}
        made = History(
            self.events, paths, dict(self.owners), versions, list(self.unlinks), set(self.directories)
        )
        made.keep_promises(self)
        return made

    def keep_promises(self, other: History) -> None:
        """Only those that ``other`` knows."""
        self.promised, self.archived, self.vouched = dict(other.promised), dict(other.archived), dict(other.vouched)

    def now(self, path: Path) -> Content | None:
        return self.paths[path][-1][1] if path in self.paths else None

    def files(self) -> list[Path]:
        return [path for path in self.paths if self.now(path) is not None]

    def _owner(self, path: Path) -> int | None:
        return self.owners.get((path, self.paths[path][-1][0])) if path in self.paths else None

    def _event(self, changes: dict[Path, tuple[int | None, Content | None]]) -> int:
        """``changes``: path → file and content that it has from now on."""
        self.events += 1
        for path, (file, content) in changes.items():
            self.paths.setdefault(path, []).append((self.events, content))
            if file is not None:
                self.owners[path, self.events] = file
        return self.events

    # Called before the operation, which then may or may not have happened at the cut.

    def save(self, path: Path) -> Content:
        content = self.events + 1
        file = self._owner(path) or content
        self.versions.setdefault(file, []).append(content)
        return self._event({path: (file, content)})

    def unlink(self, path: Path) -> None:
        self.unlinks.append((self._event({path: (None, None)}), path))

    def rename(self, path: Path, path2: Path) -> None:
        self._event({path: (None, None), path2: (self._owner(path), self.now(path))})

    def rename_directory(self, old: Path, new: Path) -> None:
        self.directories |= {(old, new), (new, old)}
        moved = [path for path in self.files() if path.startswith(old + "/")]
        changes = {new + path[len(old) :]: (self._owner(path), self.now(path)) for path in moved}
        self._event({**dict.fromkeys(moved, (None, None)), **changes})

    # Called after a flush returned.

    def flushed(self, path: Path) -> None:
        """Of everything up to now, to the archive."""
        self.promised[path] = self.archived[path] = self.paths[path][-1][0]
        self.file_flushed(path)

    def file_flushed(self, path: Path) -> None:
        """Of the bytes of the file that is there, whatever becomes of its name."""
        file, content = self._owner(path), self.now(path)
        if file is not None and content is not None:
            self.vouched[file] = content

    # What may be there.

    def _is_beside(self, path: Path, held: Content | None) -> bool:
        """Whether ``path`` is one that the recovery made, of a file that had the path beside it."""
        beside = _BESIDE.sub("", path)
        owners = [self.owners.get((beside, event), 0) for event, _ in self.paths.get(beside, [])]
        return beside != path and any(held in self.versions.get(file, []) for file in owners)

    def _matching(self, path: Path, held: Content | None, floor: int) -> list[int]:
        """Events from which on ``path`` held just this, and that no promise rules out; 0: before it ever was."""
        states = [(0, None), *self.paths.get(path, [])]
        return [
            start
            for number, (start, content) in enumerate(states)
            if content == held and (number + 1 == len(states) or states[number + 1][0] > floor)
        ]

    def _may_be_lost(self, file: int, tree: dict[Path, Content | None]) -> bool:
        return file not in self.vouched and not any(held in self.versions[file] for held in tree.values())

    def _falling_back(self, path: Path, tree: dict[Path, Content | None], floor: int) -> list[int]:
        """What ``path`` holds, when it is an older content of a file that it had: what the file held since was lost.
        Nothing, when all of it was. A newer content, written after the file was renamed: the rename was undone."""
        held = tree.get(path)
        states = self.paths.get(path, [])
        if held is None:  # or a file of which nothing was durable, so that just before it is as far as it goes
            return [
                start - 1
                for start, content in states
                if content is not None and start > floor and self._may_be_lost(self.owners[path, start], tree)
            ]
        found = self._in_renamed_directory(path, held)
        for number, (start, content) in enumerate(states):
            file = self.owners.get((path, start), 0)
            if content is None or held == content or held not in self.versions[file]:
                continue
            if number + 1 == len(states) or states[number + 1][0] > floor:
                lost = next((later for later in self.versions[file] if later > held), start + 1)
                found.append(start if held > content else lost - 1)
        return found

    def _in_renamed_directory(self, path: Path, held: Content) -> list[int]:
        """The same for a file made in a directory whose former rename was undone, and that has its former name."""
        found = []
        for old, new in self.directories:
            if path.startswith(old + "/"):
                then = new + path[len(old) :]
                files = [self.owners.get((then, start), 0) for start, content in self.paths.get(then, []) if content]
                found += [held for file in files if held in self.versions.get(file, [])]
        return found

    def _broken_promises(self, tree: dict[Path, Content | None]) -> list[str]:
        found = []
        live = {self._owner(path): path for path in self.files()}
        for file, content in self.vouched.items():
            there = {path: held for path, held in tree.items() if held in self.versions[file]}
            found += [f"{path} holds {held}, {content} was promised" for path, held in there.items() if held < content]
            if file in live and not there:
                found.append(f"{live[file]} is gone, {content} was promised")
        return found

    def _vouched_and_gone(self, path: Path, event: int, tree: dict[Path, Content | None]) -> bool:
        """Whether the file that the delete took from ``path`` was durable and is nowhere."""
        file = self.owners.get((path, self._last_event(path, event - 1)))
        return file in self.vouched and not any(held in self.versions[file] for held in tree.values())

    def _last_event(self, path: Path, event: int) -> int:
        """The last thing that happened to ``path`` up to ``event``; 0: nothing."""
        states = self.paths.get(path, [])
        number = bisect_right([start for start, _ in states], event)
        return states[number - 1][0] if number else 0

    def faults(self, tree: dict[Path, Content | None], *, archive: bool = False) -> list[str]:
        """What is wrong with ``tree``: path → what it holds, None: bytes that no event wrote."""
        found = [f"{path} is torn" for path, held in tree.items() if held is None]
        floors = self.archived if archive else self.promised
        matching: dict[Path, list[int]] = {}
        for path in {*self.paths, *tree}:
            held = tree.get(path)
            if path not in self.paths and not archive and self._is_beside(path, held):
                continue
            matching[path] = self._matching(path, held, floors.get(path, 0))
            if not archive:
                matching[path] += self._falling_back(path, tree, floors.get(path, 0))
            if not matching[path] and not (path in tree and held is None):
                what = f"holds {held}" if path in tree else "is gone"
                found.append(f"{path} {what}; history {self.paths.get(path, [])}, promised {floors.get(path, 0)}")
        if not archive:
            found += self._broken_promises(tree)
        if found:
            return found
        if archive:
            newest = max((min(events) for events in matching.values()), default=0)
            return [
                f"{path} is behind: event {last} came before {newest}, which is there"
                for path, events in matching.items()
                if (last := self._last_event(path, newest)) > max(events) and last == self.paths[path][-1][0]
            ]
        for event, path in self.unlinks:
            if not self._vouched_and_gone(path, event, tree):
                continue  # the file is back, or was perhaps never durable, and so cannot come back
            found += [
                f"{path} was deleted by {event}, but {other} lost {last}"
                for other, events in matching.items()
                if (last := self._last_event(other, event - 1)) > max(events)
            ]
        return found
