"""The private part of an archive in a store of blobs: marker and owner, what waits to be published, how far its log is.

Whoever empties the bucket, or gives the archive's place to another, is found by the marker: it is looked at every
`LOOK` seconds before anything is written, and only the archive's own is accepted.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Collection

from tierfs.errors import NoSuchBlob, TierError
from tierfs.tiers.base import catalog_refusal, parse_marker, refusal, refuse_strangers
from tierfs.tiers.blobs import Blobs
from tierfs.tiers.object_content import ObjectTemporary
from tierfs.tiers.object_names import CATALOG, FORMAT, JOURNALS, MARKER, OWNER, TEMPORARY, Path, content_key
from tierfs.tiers.reached import Position, number_of
from tierfs.types import Usage

log = logging.getLogger("tierfs.archive")

LOOK = 10.0
_PARTS = b".parts"
"""At the end of the names of temporaries that are parts of an upload to the file's own key."""
MOST_DIRECT = 8
"""Uploads in parts that may wait for their turn at a time: each has a thread. More wait as blobs of their own."""


class ObjectRoot:
    """Thread-safe once prepared. Methods raise TierError."""

    chunked = False

    def __init__(self, blobs: Blobs, where: str) -> None:
        """``where``: the store's URL, for messages."""
        self.blobs = blobs
        self.root = where
        self.uuid = ""
        self._lock = threading.Lock()
        self._session = secrets.token_hex(4)
        self._began: tuple[int, float] | None = None
        """Process that looked at the archive first, and when: uploads from before are none of its own."""
        self._direct: dict[bytes, ObjectTemporary] = {}
        self._looked = -LOOK
        self._strayed: set[str] = set()
        """Inodes whose bytes were sent to a name where they were not published in the end: not again."""

    @property
    def name(self) -> str:
        """The tier's."""
        return self.blobs.name

    def prepare(self) -> None:
        """Create or check the archive. What earlier processes left stays until ``sweep``."""
        self.blobs.probe()
        found = self._marker()
        if found is None:
            fresh = {"name": self.name, "uuid": str(uuid.uuid4()), "format": FORMAT}
            self.blobs.put_if_absent(MARKER, json.dumps(fresh).encode() + b"\n")
            found = self._marker()
        if found is None:
            raise TierError(f"tier {self.name}: {self.root} does not keep what was written")
        self._check_same(found)
        self.uuid = found
        self._looked = time.monotonic()
        if self._began is None or self._began[0] != os.getpid():
            self._began = os.getpid(), self._looked

    def is_there(self) -> bool:
        """Whether this is an archive at all, whoever's it is and whatever its tier is called."""
        return self.blobs.head(MARKER) is not None

    def _marker(self) -> str | None:
        """The uuid; None when there is none."""
        raw = self.read(MARKER)
        return None if raw is None else parse_marker(self.name, raw, self.root, MARKER, FORMAT)

    def read(self, key: str) -> bytes | None:
        """A small blob; None when there is none."""
        try:
            return bytes(self.blobs.get(key))
        except NoSuchBlob:
            return None

    def _check_same(self, found: str) -> None:
        if self.uuid and found != self.uuid:
            raise TierError(f"tier {self.name}: another archive lies at {self.root} now")

    def attach(self) -> None:
        """Make sure that this archive is still there, unless that was seen a moment ago. Where nobody called `prepare`,
        because the store may be away when a daemon is started again, this takes its place, but makes nothing."""
        if time.monotonic() - self._looked < LOOK:
            return
        found = self._marker()
        if found is None:
            message = f"tier {self.name}: {self.root} has no marker of tierfs any more; was the bucket emptied?"
            raise TierError(message, errno=errno.ENOENT)
        self._check_same(found)
        self.uuid = found
        self._looked = time.monotonic()
        if self._began is None or self._began[0] != os.getpid():
            self._began = os.getpid(), self._looked

    def probe(self) -> None:
        """Write, read, list and remove a blob."""
        self._looked = -LOOK
        self.attach()
        self.blobs.probe()

    def usage(self, own_used: int) -> Usage:
        return self.blobs.usage(own_used)

    def close(self) -> None:
        """Give up what waits, and let go of the store. ``prepare`` begins again."""
        with self._lock:
            waiting, self._direct = list(self._direct.values()), {}
        for temp in waiting:
            temp.abort()
        self.blobs.close()

    # the catalog to which the archive belongs

    def owner(self) -> str | None:
        """The catalog that knows what is here; None when none claimed it."""
        raw = self.read(OWNER)
        return None if raw is None else raw.decode(errors="replace").strip()

    def refuse_strangers(self) -> None:
        """See `tierfs.tiers.base.refuse_strangers`."""
        children = self.blobs.children()
        refuse_strangers(self.name, self.root, [*children.prefixes, *(blob.key for blob in children.blobs)])

    def check_catalog(self, catalog: str, *, claim: bool, known: bool = False) -> None:
        """See `tierfs.tiers.base.check_owner`."""
        owner = self.owner()
        why = catalog_refusal(self.name, self.root, OWNER, owner, catalog, known=known)
        if why is not None:
            raise refusal(self.name, why)
        if owner is None and claim:
            self.blobs.put(OWNER, catalog.encode() + b"\n")

    def position(self) -> Position:
        """How far the log of batches here is: `tierfs.tiers.reached`."""
        sizes: dict[int, int] = {}
        for blob in self.blobs.scan(CATALOG):
            first = blob.key[len(CATALOG) :].split("/")[0]
            number = number_of(first)
            if number is not None:
                sizes[number] = sizes.get(number, 0) + (blob.size if first.startswith("log") else 0)
        highest = max(sizes, default=0)
        return highest, sizes.get(highest, 0)

    def expect(self, reached: Position) -> None:
        """Refuse an older copy of the archive, in which the log is not so far."""
        if self.position() < reached:
            raise refusal(
                self.name,
                f"{self.root} is an older copy of the archive: what was published since that copy was made is missing. "
                f"Was the bucket restored from a backup? Name the archive itself; if this is all that is left of it, "
                f"`tierfs fsck --repair CONFIG` makes there again what the other tiers have, and names the rest",
            )

    def note(self, reached: Position) -> None:
        """The log is so far. A bucket does not change into an older one while it is mounted: nothing to remember."""

    # what waits

    def temporary(self, key: str, path: Path | None = None) -> ObjectTemporary:
        """Bytes to send, then to ``publish`` by their name. With ``path``, where the file will most likely be
        published, a large one is sent to its own key."""
        self.attach()
        name = self.prefix() + f"{key}.{secrets.token_hex(8)}".encode()
        with self._lock:
            if path is not None and len(self._direct) < MOST_DIRECT and _inode(name) not in self._strayed:
                name += _PARTS
                made = ObjectTemporary(self.blobs, name, content_key(path), direct=True, forget=self._drop)
                self._direct[name] = made
                return made
        return ObjectTemporary(self.blobs, name, temporary_key(name))

    def ends_with_process(self, temp: bytes) -> bool:
        """Whether what waits as ``temp`` is lost when its process ends."""
        return temp.endswith(_PARTS)

    def astray(self, temp: bytes) -> None:
        """What was sent to its own name is not published there after all."""
        with self._lock:
            self._strayed.add(_inode(temp))
        self.discard(temp)

    def _drop(self, temp: bytes) -> ObjectTemporary | None:
        with self._lock:
            return self._direct.pop(temp, None)

    def prefix(self) -> bytes:
        """Begins the name of every temporary of this process, which may be one of several forks."""
        return f"{self._session}-{os.getpid():x}.".encode()

    def discard(self, temp: bytes) -> None:
        """Give up what waits under this name; none is fine."""
        direct = self._drop(temp)
        if direct is not None:
            direct.abort()
        else:
            self.blobs.delete([temporary_key(temp)])

    def sweep(self, keep: Collection[bytes]) -> None:
        """Remove what earlier processes left, except the temporaries ``keep`` and the journals among them."""
        self.attach()
        own = self.prefix().decode()
        kept = {name.decode("latin-1") for name in keep}
        left = []
        for prefix in (TEMPORARY, JOURNALS):
            names = ((blob.key, blob.key[len(prefix) :]) for blob in self.blobs.scan(prefix))
            left += [key for key, name in names if name not in kept and not name.startswith(own)]
        self.blobs.delete(left)
        if self._began is not None:
            try:
                self.blobs.abort_stale(time.monotonic() - self._began[1])
            except TierError as error:  # such as no permission to list them
                log.info("%s; let a rule of the bucket remove the parts of uploads that were cut short", error)


def _inode(temp: bytes) -> str:
    """Of the replica key in a temporary name."""
    return temp.decode("latin-1").split(".")[1].partition("-")[0]


def temporary_key(temp: bytes) -> str:
    return TEMPORARY + temp.decode("latin-1")
