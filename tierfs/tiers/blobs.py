"""A flat store of blobs by key: what a directory and an object store have in common, and layouts are built upon.

Keys are text with ``/`` between their segments, as S3 has them. A key is no directory: none may be the beginning of
another up to a ``/``, for a plain directory cannot hold both. What begins with ``.tierfs/`` is the drivers' own, but
for ``.tierfs/kept/``, where the layouts keep what is no part of the namespace; ``scan`` and ``children`` tell of
neither unless asked for it.

All calls are synchronous and may come from any thread; they raise nothing but TierError. Each ends within the store's
patience, so that whoever gave it a thread gets that back.
"""

from __future__ import annotations

import errno
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tierfs.errors import TierError
from tierfs.types import Usage

Data: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""Bytes that are sent from where they are; nothing copies them in Python."""

PART = 16 << 20
"""Bytes of a part of an upload, if not told otherwise."""
LONGEST_KEY = 1024
"""Bytes of a key in UTF-8, S3's limit, the store's own prefix included."""
OWN, KEPT = ".tierfs", "kept"
"""First segment of keys that are none of the namespace's, and the second of those that layouts may use."""

_UNFIT = re.compile("[\\\\\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What XML, in which S3 lists keys, cannot say or hides, and the backslash, which SeaweedFS takes for a slash."""
_TO_ESCAPE = re.compile("[%\\\\\x00-\x1f\x7f-\x9f\udc80-\udcff\ufffe\uffff]")
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Blob:
    """What a store says of a blob. ``etag`` differs between two contents of a key, as far as the store can tell."""

    key: str
    size: int
    etag: str | None
    modified_ns: int
    """When it was written, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Children:
    """What lies directly below a prefix: prefixes (with ``/`` at the end) and blobs, both in order. A prefix may be
    told for a while after its last blob was removed."""

    prefixes: list[str]
    blobs: list[Blob]


class Upload(Protocol):
    """A blob sent in parts, which nobody sees until `complete`. Whatever happens, `complete` or `abort` must follow."""

    @property
    def key(self) -> str: ...
    @property
    def part_size(self) -> int: ...

    def part(self, number: int, data: Data) -> None:
        """Send a part, numbered from 0. Each but the last has ``part_size`` bytes.

        Parts may come in any order from as many threads as shall send at once, but one waits until those before it have
        come. Once this returns, or raises, the store looks at ``data`` no more, so that what it is mapped from may be
        cut off. A part that fails may be known only by a later call.
        """

    def complete(self) -> str | None:
        """Make the blob visible, durably and whole, over what the key had: its etag. When this raises, the parts are
        discarded, and the key has what it had, or, if the store's answer was lost, the new blob."""

    def abort(self) -> None:
        """Discard the parts, as far as the store can be reached. Harmless after `complete` or another `abort`."""


class Blobs(Protocol):
    """The store. Writes are atomic: a key has its old content or its new."""

    @property
    def name(self) -> str:
        """The tier's."""

    @property
    def atomic_create(self) -> bool:
        """Whether of two `put_if_absent` of one key at most one says that it wrote, whoever calls it; known once
        `probe` has succeeded. Content-addressed blobs can do without; locks cannot."""

    def put(self, key: str, data: Data | Sequence[Data]) -> str | None:
        """Write a blob from one buffer or several in a row, durably: its etag."""

    def put_if_absent(self, key: str, data: Data | Sequence[Data]) -> bool:
        """Write a blob, durably, unless there is one: whether it was written. False, too, means that it is durable; a
        store whose answer was lost may say so of what this very call wrote."""

    def head(self, key: str) -> Blob | None:
        """None when there is none."""

    def get(self, key: str) -> memoryview:
        """The whole blob. Raises NoSuchBlob."""

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        """Exactly these bytes. Raises NoSuchBlob; TierError when the blob has fewer."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Many ranges (start, length), in parallel; neighbours are asked for together."""

    def scan(self, prefix: str = "") -> Iterator[Blob]:
        """All blobs whose keys begin with ``prefix`` ("" or with ``/`` at the end), in no order, page by page: what
        changes meanwhile is told or not."""

    def children(self, prefix: str = "") -> Children:
        """What lies directly below ``prefix``, all at once."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove blobs; those that are not there count as removed."""

    def copy(self, source: str, target: str) -> None:
        """Copy a blob within the store, over what the target had, without sending it where the store can do so.
        Raises NoSuchBlob."""

    def begin(self, key: str, part_size: int = PART) -> Upload:
        """Start an upload in parts."""

    def abort_stale(self, older_than: float) -> int | None:
        """Discard the parts of uploads begun over ``older_than`` seconds ago that no process goes on with: how many
        uploads; None where the store cannot tell, and rules of the bucket must see to it."""

    def usage(self, own_used: int) -> Usage:
        """Space in bytes, given the bytes that tierfs holds here."""

    def probe(self) -> None:
        """Write, read, list and remove a blob: raises TierError when any of it does not work, saying what to do."""

    def close(self) -> None:
        """Let go of what the store holds open."""


def check_key(tier: str, key: str, *, room: int = LONGEST_KEY) -> None:
    """Raises TierError unless this is a key that leads nowhere else: no empty segment, no ``.`` or ``..``, nothing that
    a listing could not say. ``room``: the bytes that it may have."""
    if _UNFIT.search(key) is not None:
        raise _refused(tier, key, "has a character that keys cannot have")
    segments = key.split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        raise _refused(tier, key, "has an empty segment or one that is . or ..")
    if segments[0] == OWN and segments[1:2] != [KEPT]:
        raise _refused(tier, key, "is reserved")
    if len(key.encode()) > room:
        raise _refused(tier, key, f"is longer than {room} bytes", errno.ENAMETOOLONG)


def check_prefix(tier: str, prefix: str) -> None:
    """Raises TierError unless this is empty or a key with ``/`` at the end."""
    if prefix:
        if not prefix.endswith("/"):
            raise _refused(tier, prefix, "does not end with /, as prefixes do")
        check_key(tier, prefix[:-1])


def _refused(tier: str, key: str, why: str, code: int = errno.EINVAL) -> TierError:
    shown = ascii(key if len(key) <= 100 else key[:100] + "…")
    return TierError(f"tier {tier}: the key {shown} {why}", errno=code, temporary=False)


def escape(name: bytes) -> str:
    """A file's name as a segment of a key, readable where the name is. `unescape` gives it back."""
    if name in (b".", b".."):
        return name.decode().replace(".", "%2E")
    return _TO_ESCAPE.sub(_percent, name.decode(errors="surrogateescape"))


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode(errors="surrogateescape"))


def unescape(segment: str) -> bytes:
    return _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), segment.encode())


def buffers(data: Data | Sequence[Data]) -> list[memoryview]:
    """One buffer or several as bytes, without those that are empty."""
    several = [data] if isinstance(data, bytes | bytearray | memoryview | mmap.mmap) else data
    views = [memoryview(one) for one in several]
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views if view.nbytes]
