"""Copies of the catalog on the archive, and what was done on the archive after each: ``.tierfs/catalog`` in its root.

- ``copy-<n>`` is a whole catalog (SQLite, closed), ``copy-<n>.json`` its manifest with size and digest: a copy without
  one, or with another digest, is none. The newest two are kept.
- ``log-<n>`` holds the batches that the archive began after copy n and before the next one: records of
  ``u32 length, u32 crc32, payload``, each synced before the first step of its batch. A record that does not check ends
  the file. Copy n and the logs from n on together say what the archive's names mean now.
- ``clean`` names the copy that was made at a clean umount and is the catalog still: a mount removes it before it
  changes anything.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from tierfs.durable import create_temporary, fsync_directory
from tierfs.errors import TierError
from tierfs.points import At, reach
from tierfs.tiers.base import failing_as, open_directory
from tierfs.tiers.reached import DIRECTORY_NAME, Position, number_of
from tierfs.tiers.root import RESERVED, ArchiveRoot

FORMAT = 1
KEPT = 2
CLEAN = b"clean"
LOG_BYTES = 64 << 20
"""A log of this many bytes is worth another copy."""

_CHUNK = 1 << 20
_RECORD = struct.Struct("<II")
_LONGEST = 64 << 20
_COPY = re.compile(r"copy-(\d{1,18})\.json")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of one copy."""

    number: int
    bytes: int
    digest: str
    uuid: str
    """The catalog's."""
    seq: int
    """The catalog's next sequence number when the copy was made."""
    at_ns: int


class CatalogCopies:
    """Thread-safe. Methods block and raise TierError, except `advance`."""

    def __init__(self, tree: ArchiveRoot) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._number: int | None = None
        self.log_bytes = 0
        """Bytes of the current log."""
        self.reached: Position | None = None
        """Behind the last batch that was logged; None: none was by this process."""

    @contextlib.contextmanager
    def _directory(self, action: str, *, create: bool = False) -> Iterator[int]:
        with failing_as(self._tree.name, action), contextlib.ExitStack() as stack:
            held = stack.enter_context(self._tree.use())
            own = open_directory(RESERVED, held.root, create=False)
            stack.callback(os.close, own)
            fd = open_directory(DIRECTORY_NAME, own, create=create)
            stack.callback(os.close, fd)
            yield fd

    def _numbers(self, fd: int) -> set[int]:
        return {number for name in os.listdir(fd) if (number := number_of(name)) is not None}

    # writing

    def begin(self) -> None:
        """Find the number with which this process goes on; the first call of any other method that writes does it."""
        with self._directory("look for copies of the catalog", create=True) as fd:
            self._begin(fd)

    def _begin(self, fd: int) -> int:
        highest = max(self._numbers(fd), default=0) if self._number is None else 0
        with self._lock:  # never held while the archive is asked: the event loop takes it, too
            if self._number is None:
                self._number = highest + 1
            return self._number

    def advance(self) -> int:
        """What is logged from now on comes after the copy with the number returned. After `begin`."""
        with self._lock:
            assert self._number is not None
            self._number += 1
            self.log_bytes = 0
            return self._number

    def append(self, payload: bytes) -> None:
        """Log a batch, synced. Nothing of it stays when this fails. One thread at a time."""
        with self._directory("log a batch", create=True) as directory:
            number = self._begin(directory)
            name = b"log-%d" % number
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(name, flags, 0o600, dir_fd=directory)
            try:
                before = os.fstat(fd).st_size
                packed = record(payload)
                try:
                    if os.write(fd, packed) != len(packed):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(fd)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, before)
                    raise
                if not before:
                    fsync_directory(directory)
                self.log_bytes = before + len(packed)
                self.reached = number, self.log_bytes
                self._tree.note(self.reached)
            finally:
                os.close(fd)

    def put(
        self,
        source: Path,
        number: int,
        uuid: str,
        seq: int,
        at_ns: int,
        alive: Callable[[int], object] = lambda size: None,
    ) -> Manifest:
        """Make ``source``, a closed catalog, the copy ``number``, and let those before the last two go. ``alive`` is
        called with the bytes of each piece, and before the sync of all."""
        with source.open("rb") as file, self._directory("copy the catalog", create=True) as directory:
            hasher, size = xxhash.xxh3_128(), 0
            temp = create_temporary(directory, "copying")
            try:
                while data := file.read(_CHUNK):
                    hasher.update(data)
                    size += len(data)
                    alive(len(data))
                    while data:
                        data = data[os.write(temp.fd, data) :]
                alive(size)
                temp.commit(directory, b"copy-%d" % number)
            finally:
                temp.discard()
            manifest = Manifest(number, size, hasher.hexdigest(), uuid, seq, at_ns)
            reach(At.COPY_NAMED)
            self._write(directory, b"copy-%d.json" % number, json.dumps({"format": FORMAT, **asdict(manifest)}))
            self._rotate(directory)
        return manifest

    def _write(self, directory: int, name: bytes, text: str) -> None:
        temp = create_temporary(directory, "copying")
        try:
            os.write(temp.fd, text.encode() + b"\n")
            temp.commit(directory, name)
        finally:
            temp.discard()

    def _rotate(self, directory: int) -> None:
        kept = sorted((manifest.number for manifest in self._manifests(directory)), reverse=True)[:KEPT]
        for name in os.listdir(directory):
            number = number_of(name)
            # Logs are numbered like the copy that they follow; a copy that failed leaves a log without one.
            if (number is not None and number < min(kept)) or name.startswith("copying."):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)

    # clean

    def declare_clean(self, manifest: Manifest) -> None:
        """This copy is the catalog, until `forget_clean`."""
        with self._directory("mark the copy of the catalog") as directory:
            self._write(directory, CLEAN, str(manifest.number))

    def forget_clean(self) -> None:
        """The catalog is about to change. Nothing of that may happen unless this succeeds."""
        try:
            with self._directory("unmark the copy of the catalog") as directory, contextlib.suppress(FileNotFoundError):
                os.unlink(CLEAN, dir_fd=directory)
                fsync_directory(directory)
        except TierError as error:
            if error.errno != errno.ENOENT:
                raise

    def clean(self) -> Manifest | None:
        """The copy that is the catalog as it was closed."""
        with self._reading("look for copies of the catalog") as directory:
            if directory is None:
                return None
            raw = _read_file(directory, CLEAN.decode(), 64)
            found = [m for m in self._manifests(directory) if raw is not None and raw.strip() == b"%d" % m.number]
            return found[0] if found else None

    # reading

    @contextlib.contextmanager
    def _reading(self, action: str) -> Iterator[int | None]:
        """None when there is no such directory."""
        with contextlib.ExitStack() as stack:
            try:
                fd: int | None = stack.enter_context(self._directory(action))
            except TierError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                fd = None
            yield fd

    def manifests(self) -> list[Manifest]:
        """Of all copies, newest first; whether a copy is whole shows when it is fetched."""
        with self._reading("look for copies of the catalog") as directory:
            return [] if directory is None else self._manifests(directory)

    def _manifests(self, directory: int) -> list[Manifest]:
        found = []
        for name in os.listdir(directory):
            match = _COPY.fullmatch(name)
            raw = _read_file(directory, name, 4096) if match else None
            manifest = parse_manifest(raw, int(match[1])) if match and raw is not None else None
            if manifest is not None:
                found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.number, reverse=True)

    def fetch(self, manifest: Manifest, target: Path) -> bool:
        """Copy it to ``target``, synced; False, and nothing left there, when it is not whole."""
        with self._directory("fetch the copy of the catalog") as directory:
            hasher, size = xxhash.xxh3_128(), 0
            try:
                fd = os.open(b"copy-%d" % manifest.number, _READ, dir_fd=directory)
            except FileNotFoundError:
                return False
            with open(fd, "rb") as source, target.open("wb") as file:
                while (data := source.read(_CHUNK)) and size <= manifest.bytes:
                    hasher.update(data)
                    size += len(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if (size, hasher.hexdigest()) != (manifest.bytes, manifest.digest):
                target.unlink()
                return False
        return True

    def logged(self, first: int) -> Iterator[bytes]:
        """What was logged after copy ``first``, in order. A file that is damaged ends at the damage."""
        with self._reading("read the log of batches") as directory:
            if directory is None:
                return
            logs = {number_of(name): name for name in os.listdir(directory) if re.fullmatch(r"log-\d+", name)}
            for number in sorted(number for number in logs if number is not None and number >= first):
                try:
                    fd = os.open(logs[number], _READ, dir_fd=directory)
                except OSError:
                    continue
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    os.close(fd)
                    continue
                with open(fd, "rb") as file:
                    yield from _records(file.read)


def record(payload: bytes) -> bytes:
    """A batch as it is logged."""
    return _RECORD.pack(len(payload), zlib.crc32(payload)) + payload


def records(raw: bytes) -> Iterator[bytes]:
    """The batches that were logged; they end at the first damage."""
    return _records(io.BytesIO(raw).read)


def _records(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while len(head := read(_RECORD.size)) == _RECORD.size:
        length, checksum = _RECORD.unpack(head)
        if length > _LONGEST:
            return
        payload = read(length)
        if len(payload) != length or zlib.crc32(payload) != checksum:
            return
        yield payload


def _read_file(directory: int, name: str, limit: int) -> bytes | None:
    try:
        fd = os.open(name, _READ, dir_fd=directory)
    except OSError:
        return None
    try:
        return os.read(fd, limit)
    except OSError:  # a directory
        return None
    finally:
        os.close(fd)


def parse_manifest(raw: bytes, number: int) -> Manifest | None:
    """None when it is damaged or of another format."""
    try:
        found = json.loads(raw)
        if found.pop("format") != FORMAT:
            return None
        manifest = Manifest(**found)
        numbers = (manifest.number, manifest.bytes, manifest.seq, manifest.at_ns)
        good = all(type(value) is int and 0 <= value < 1 << 63 for value in numbers) and manifest.number == number
        return manifest if good and _DIGEST.fullmatch(manifest.digest) and isinstance(manifest.uuid, str) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
