"""The root of the archive: the one directory that tierfs writes into, and the private ``.tierfs`` in it.

The root may go away and come back while tierfs runs (a server restarts, a mount is lost): ``attach`` looks at the path
again, and only a directory with this archive's own marker is ever written into, and no older copy of it. Temporary
files are known by name, so that a hundred thousand of them may wait without a descriptor each; their names begin with a
prefix of this process, by which ``sweep`` knows those that an earlier one left.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tierfs.durable import TemporaryFile, create_temporary
from tierfs.errors import TierError
from tierfs.tiers.base import (
    DIRECTORY,
    MARKER,
    check_marker,
    check_owner,
    failing_as,
    open_directory,
    read_owner,
    refusal,
    refuse_strangers,
    same_file,
    usage_of,
    write_and_remove,
)
from tierfs.tiers.reached import Position, position
from tierfs.types import Usage

log = logging.getLogger("tierfs.archive")

RESERVED = b".tierfs"
LAYOUT = b"tierfs-layout"
"""In the private directory of an archive with layout chunks; one without it has layout tree."""
ASIDE = b"aside."
"""Prefix in the private directory: an object of the archive that an exchange has put there for a moment."""


@dataclass
class Held:
    """Descriptors of one opened root; closed once it is retired and nobody uses it."""

    root: int
    tmp: int
    users: int = 0
    retired: bool = False


class ArchiveRoot:
    """The root and the private directory in it. Thread-safe once prepared; methods that fail raise TierError."""

    layout = "tree"

    def __init__(self, name: str, root: Path, size: int | None = None) -> None:
        """``size`` in bytes limits the capacity; None means the whole filesystem."""
        self.name = name
        self.root = root
        self.limit = size
        self.uuid = ""
        self._held: Held | None = None
        self._lock = threading.Lock()
        self._session = secrets.token_hex(4)
        self._reached: Position = (0, 0)
        self._noted: OrderedDict[tuple[bytes, ...], None] = OrderedDict()
        """Files whose refused attributes were logged."""

    def prepare(self) -> None:
        """Create or check the directory. What earlier copies left behind stays until ``sweep``."""
        with failing_as(self.name, f"prepare {self.root}"):
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._swap(self._open_root(create=True))

    def _open_root(self, *, create: bool) -> Held:
        with contextlib.ExitStack() as undo:
            root = os.open(self.root, DIRECTORY)
            undo.callback(os.close, root)
            own = open_directory(RESERVED, root, create=create)
            try:
                owner = os.fstat(own).st_uid
                if owner != os.geteuid():
                    raise refusal(self.name, f"{self.root}/.tierfs belongs to user {owner}, not to {os.geteuid()}")
                if create:
                    os.fchmod(own, 0o700)
                if not create:  # before anything is made: this may be somebody else's
                    self._check_same(check_marker(self.name, own, own, self.root / ".tierfs", create=False))
                    if position(own) < self._reached:
                        raise TierError(f"tier {self.name}: an older copy of the archive lies at {self.root} now")
                tmp = open_directory(b"tmp", own)
                undo.callback(os.close, tmp)
                if create:
                    self._check_layout(own, tmp)
                    found = check_marker(self.name, own, tmp, self.root / ".tierfs")
                    self._check_same(found)
                    self.uuid = found
            finally:
                os.close(own)
            undo.pop_all()
        return Held(root, tmp)

    def _check_layout(self, own: int, tmp: int) -> None:
        """An archive keeps the layout that it was made with. Before its marker is written, so that what a crash leaves
        in between has no files yet."""
        found = _layout(own)
        if found == self.layout:
            return
        if found != "tree" or _is_there(MARKER, own):
            raise refusal(
                self.name,
                f"{self.root} holds an archive with layout {found}, not {self.layout}; write layout: {found}, or "
                f"choose another directory",
            )
        temp = create_temporary(tmp, "layout")
        try:
            os.write(temp.fd, self.layout.encode() + b"\n")
            temp.commit(own, LAYOUT)
        finally:
            temp.discard()

    def look(self) -> None:
        """Open the directory as it is, only to read in it, whoever's it is, and call the tier as it was called there.
        In place of `prepare`."""
        with failing_as(self.name, f"read {self.root}"), contextlib.ExitStack() as undo:
            root = os.open(self.root, DIRECTORY)
            undo.callback(os.close, root)
            own = open_directory(RESERVED, root, create=False)
            undo.callback(os.close, own)
            self.name = _name(own)
            try:
                tmp = open_directory(b"tmp", own, create=False)
            except FileNotFoundError:
                tmp = os.dup(own)
            undo.pop_all()
            os.close(own)
        self._swap(Held(root, tmp))

    def _check_same(self, found: str) -> None:
        if self.uuid and found != self.uuid:
            raise TierError(f"tier {self.name}: another archive lies at {self.root} now")

    def check_catalog(self, catalog: str, *, claim: bool, known: bool = False) -> None:
        """See `check_owner`. Raises TierError."""
        with failing_as(self.name, f"look at {self.root}"), self.use() as held:
            own = open_directory(RESERVED, held.root, create=False)
            try:
                check_owner(self.name, own, self.root / os.fsdecode(RESERVED), catalog, claim=claim, known=known)
            finally:
                os.close(own)

    def refuse_strangers(self) -> None:
        """See `tierfs.tiers.base.refuse_strangers`."""
        with failing_as(self.name, f"look at {self.root}"), self.use() as held:
            names = os.listdir(held.root)
        refuse_strangers(self.name, self.root, (name for name in names if name != os.fsdecode(RESERVED)))

    def position(self) -> Position:
        """How far the log of batches here is: `tierfs.tiers.reached`. Raises TierError."""
        with failing_as(self.name, f"look at {self.root}"), self.use() as held:
            own = open_directory(RESERVED, held.root, create=False)
            try:
                return position(own)
            finally:
                os.close(own)

    def expect(self, reached: Position) -> None:
        """Refuse an older copy of the archive, in which the log is not so far, now and whenever the root is opened
        again. Raises TierError."""
        if self.position() < reached:
            raise refusal(
                self.name,
                f"{self.root} is an older copy of the archive: what was published since that copy was made is missing. "
                f"Is a backup mounted in its place? Mount the archive itself; if this is all that is left of it, "
                f"`tierfs fsck --repair CONFIG` makes there again what the other tiers have, and names the rest",
            )
        self.note(reached)

    def note(self, reached: Position) -> None:
        """The log is so far: see `expect`. Looks at nothing."""
        self._reached = reached

    def owner(self) -> str | None:
        """See `read_owner`. Raises TierError."""
        with failing_as(self.name, f"look at {self.root}"), self.use() as held:
            own = open_directory(RESERVED, held.root, create=False)
            try:
                return read_owner(own)
            finally:
                os.close(own)

    def attach(self) -> None:
        """Make sure that the root's path leads to this archive, and open it again where it was mounted anew, or where
        its private directory for temporary files was removed: that one is made again.

        A directory without this archive's marker is a temporary error and not touched: the mount below it is lost.
        """
        with failing_as(self.name, f"find {self.root}"):
            held = self._held
            if held is None:
                raise OSError(errno.EBADF, "not prepared")
            if self._stands(held):
                return
            try:
                fresh = self._open_root(create=False)
            except FileNotFoundError as error:
                message = f"tier {self.name}: {self.root} has no .tierfs with a marker any more; is it still mounted?"
                raise TierError(message, errno=errno.ENOENT) from error
            self._swap(fresh)
        log.info("tier %s: opened %s again", self.name, self.root)

    def _stands(self, held: Held) -> bool:
        """Whether the opened root is what its path leads to, with its private directory in it."""
        try:
            return same_file(os.fstat(held.root), os.stat(self.root)) and same_file(
                os.fstat(held.tmp), os.stat(RESERVED + b"/tmp", dir_fd=held.root, follow_symlinks=False)
            )
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT, errno.ENOTDIR):
                return False
            raise

    def _swap(self, fresh: Held | None) -> None:
        with self._lock:
            old, self._held = self._held, fresh
            if old is not None:
                old.retired = True
                self._drop(old)

    def _drop(self, held: Held) -> None:
        if held.retired and not held.users:
            os.close(held.tmp)
            os.close(held.root)

    @contextlib.contextmanager
    def use(self) -> Iterator[Held]:
        """The opened root, kept open meanwhile."""
        with self._lock:
            held = self._held
            if held is None:
                raise OSError(errno.EBADF, "the archive is not open")
            held.users += 1
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                self._drop(held)

    def close(self) -> None:
        """Let go of the directories. ``prepare`` opens them again."""
        self._swap(None)

    def usage(self, own_used: int) -> Usage:
        """Space in bytes, given the bytes that tierfs holds here. Raises OSError, like ReplicaStore.usage."""
        with self.use() as held:
            return usage_of(held.root, self.limit, own_used)

    def probe(self) -> None:
        """Write, sync and remove a file. Raises TierError when the archive does not work."""
        self.attach()
        with failing_as(self.name, "try to write"), self.use() as held:
            write_and_remove(held.tmp)

    def temporary(self, key: str) -> TemporaryFile:
        """A file to fill and sync, then to ``publish`` by its name. It may be closed meanwhile."""
        self.attach()
        with failing_as(self.name, "create a file"), self.use() as held:
            return create_temporary(held.tmp, self.prefix().decode() + key)

    def prefix(self) -> bytes:
        """Begins the name of every temporary file of this process."""
        return f"{self._session}.".encode()

    def discard(self, temp: bytes) -> None:
        """Remove a temporary file that is closed; none is fine."""
        with (
            failing_as(self.name, "remove a temporary file"),
            self.use() as held,
            contextlib.suppress(FileNotFoundError),
        ):
            os.unlink(temp, dir_fd=held.tmp)

    def sweep(self, keep: Collection[bytes]) -> None:
        """Remove what earlier processes left in the private directory, except the temporary files ``keep`` and the
        first object of an unfinished exchange."""
        self.attach()
        with failing_as(self.name, "remove temporary files"), self.use() as held:
            for name in map(os.fsencode, os.listdir(held.tmp)):
                if name not in keep and not name.startswith((self.prefix(), ASIDE)):
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(name, dir_fd=held.tmp)


def layout_of(root: Path) -> str:
    """The layout of the archive in this directory; "" when there is none. Raises OSError."""
    try:
        top = os.open(root, DIRECTORY)
        try:
            own = open_directory(RESERVED, top, create=False)
        finally:
            os.close(top)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    try:
        return _layout(own) if _is_there(MARKER, own) else ""
    finally:
        os.close(own)


def _layout(own: int) -> str:
    try:
        fd = os.open(LAYOUT, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=own)
    except FileNotFoundError:
        return "tree"
    with os.fdopen(fd, "rb") as file:
        return file.read(64).decode("ascii", "replace").strip()


def _name(own: int) -> str:
    """What the tier is called by its marker. Raises OSError."""
    fd = os.open(MARKER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=own)
    with os.fdopen(fd, "rb") as file:
        try:
            return str(json.loads(file.read(65536))["name"])
        except (ValueError, KeyError, TypeError):
            return "archive"


def _is_there(name: bytes, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
