"""Keys and records of an archive's tree in a store of blobs: what docs/FORMAT.md, "Object stores", describes.

A regular file's bytes are the blob at its own path. Everything else that a tree has, and a store of blobs has not, is
in small records below ``.tierfs/kept/tree/``: one for each name, found by its directory. A name that no key can be,
because it or its path is too long, has its bytes there, too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tierfs.errors import TierError
from tierfs.tiers.blobs import KEPT, OWN, escape, unescape

Path = tuple[bytes, ...]

FORMAT = 1
PRIVATE = f"{OWN}/{KEPT}/tree/"
"""Prefix of all that is not a file's own blob."""
NAMES, LINKS, TEMPORARY, LONG = PRIVATE + "names/", PRIVATE + "links/", PRIVATE + "tmp/", PRIVATE + "long/"
JOURNALS, MARKER, OWNER, CATALOG = (
    PRIVATE + "exchange/",
    PRIVATE + "marker",
    PRIVATE + "owner",
    PRIVATE + "catalog/",
)
LONGEST_PATH = 900
"""Bytes of a key that is a file's path; S3's limit is 1024, which the store's own prefix counts in."""
LONGEST_NAME = 255
"""Bytes of a segment: that of a plain directory, which may hold blobs as well."""


def shown(path: Path) -> str:
    """For people."""
    return b"/".join(path).decode(errors="replace")


def path_hash(path: Path) -> str:
    return hashlib.blake2b(b"/".join(path), digest_size=16).hexdigest()


def content_key(path: Path) -> str:
    """Where a regular file's bytes are."""
    segments = [escape(name) for name in path]
    key = "/".join(segments)
    if len(key.encode()) <= LONGEST_PATH and all(len(segment.encode()) <= LONGEST_NAME for segment in segments):
        return key
    return LONG + path_hash(path)


def below(path: Path) -> str | None:
    """Prefix of the keys of the files in a directory, but for those whose path is too long; None when that is all."""
    if not path:
        return ""
    key = content_key(path)
    return None if key.startswith(LONG) else key + "/"


def names_below(path: Path) -> str:
    """Prefix of the records of the names in a directory."""
    return f"{NAMES}{path_hash(path)}/"


def record_key(path: Path) -> str:
    """Where the record of a name is. A raw ``%`` at the beginning of a segment is in no escaped name."""
    segment = escape(path[-1])
    if len(segment.encode()) > LONGEST_NAME:
        segment = "%" + path_hash(path[-1:])
    return names_below(path[:-1]) + segment


@dataclass(frozen=True, slots=True)
class Record:
    """What a name is, and its attributes. That of a regular file counts only while the file's blob is there."""

    path: Path
    mode: int
    """With the type, as in st_mode."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)
    rdev: int = 0
    target: bytes | None = None
    """Of a symlink."""
    link: str = ""
    """Names with the same one are names of one file, whose attributes `LINKS` has."""
    upload: str = ""
    """The temporary name under which the bytes came: tells whether a publish was done."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    def at(self, path: Path) -> Record:
        return replace(self, path=path)

    def like(self, other: Record) -> Record:
        """With the attributes of ``other``."""
        return replace(
            self, mode=other.mode, uid=other.uid, gid=other.gid, mtime_ns=other.mtime_ns, xattrs=other.xattrs
        )

    def encode(self) -> bytes:
        said = {
            "format": FORMAT,
            "path": "/".join(map(escape, self.path)),
            "mode": self.mode,
            "uid": self.uid,
            "gid": self.gid,
            "mtime_ns": self.mtime_ns,
            "xattrs": {_text(name): _text(value) for name, value in sorted(self.xattrs.items())},
            "rdev": self.rdev,
            "target": None if self.target is None else _text(self.target),
            "link": self.link,
            "upload": self.upload,
        }
        return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def decode(tier: str, key: str, raw: bytes) -> Record:
    """Raises TierError."""
    try:
        said = json.loads(raw)
        if said["format"] != FORMAT:
            message = f"tier {tier}: {key} has format {said['format']!r}; this tierfs knows format {FORMAT}"
            raise TierError(message, errno=errno.EPROTO, temporary=False)
        numbers = [said[name] for name in ("mode", "uid", "gid", "mtime_ns", "rdev")]
        if not all(type(number) is int for number in numbers):
            raise ValueError("not a number")
        mode, uid, gid, mtime_ns, rdev = numbers
        target = said["target"]
        return Record(
            tuple(unescape(segment) for segment in said["path"].split("/")) if said["path"] else (),
            mode,
            uid,
            gid,
            mtime_ns,
            {_bytes(name): _bytes(value) for name, value in said["xattrs"].items()},
            rdev,
            None if target is None else _bytes(target),
            str(said["link"]),
            str(said["upload"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TierError(f"tier {tier}: {key} is damaged", errno=errno.EUCLEAN, temporary=False) from None


def plain(path: Path, modified_ns: int) -> Record:
    """Of a blob that somebody put there."""
    return Record(path, stat.S_IFREG | 0o644, mtime_ns=modified_ns)


def implied(path: Path) -> Record:
    """Of a directory that is there only because something is in it."""
    return Record(path, stat.S_IFDIR | 0o755)


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
