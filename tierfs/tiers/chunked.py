"""The archive, layout `chunks`: the tree of names as with layout `tree`, but each regular file in it is a manifest
(docs/FORMAT.md), and its bytes are chunks that all files share (`tiers.pool`).

So what makes, moves and removes names, and what replays the mount's operations with it, is `TreeStore`'s: only bytes go
another way. Sizes that this store tells are those of the files, not of their manifests. A regular file that does not
begin like a manifest is somebody else's, and is read as it stands there.

The order of steps: chunks, each synced and then named; the directories of these names synced; the manifest synced in
the temporary area; and, in its turn, renamed over the file's name, which is the commit point. A crash leaves chunks
that nothing names: garbage. Only `tierfs.fsck.collect` removes chunks, see `tiers.turnstile`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tierfs.chunks import manifest
from tierfs.chunks.codec import Codec
from tierfs.chunks.manifest import Manifest
from tierfs.durable import TemporaryFile, create_temporary
from tierfs.errors import DigestMismatch, ManifestDamaged, TierError
from tierfs.points import At, reach
from tierfs.tiers.base import failing_as, open_directory, usage_of
from tierfs.tiers.content import Content, FileContent, too_short
from tierfs.tiers.copy import Reading, Throttle
from tierfs.tiers.intake import Intake
from tierfs.tiers.pool import ChunkPool
from tierfs.tiers.root import RESERVED
from tierfs.tiers.tree import Path, TreeStore
from tierfs.tiers.turnstile import among_others
from tierfs.types import Usage

MAGIC = b"tierfs-manifest "
"""How every manifest begins, of whatever format."""
_FIRST = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size")
_SIZE = _FIRST.index("st_size")
KEPT_BYTES = 48 << 20
"""Bytes of decoded chunks that one open content keeps: reads come in parts of chunks."""


def read_manifest(fd: int) -> Manifest | None:
    """What an open file says; None when it is no manifest but somebody's file. Raises OSError, ManifestDamaged."""
    if os.pread(fd, len(MAGIC), 0) != MAGIC:
        return None
    raw, size = bytearray(), os.fstat(fd).st_size
    if size > manifest.LIMIT:
        raise ManifestDamaged(f"manifest: {size} bytes are more than {manifest.LIMIT}")
    while part := os.pread(fd, 1 << 20, len(raw)):
        raw += part
    return manifest.decode(bytes(raw))


Fetch = Callable[[bytes, int, bool], memoryview]
"""(id, length, whether the storage is to be asked and not what memory knows of it) → the chunk's bytes, checked. Raises
TierError; DigestMismatch when they are not to be had."""


class ChunkedContent(Content):
    """A file put together from its chunks, each fetched once however many threads wait for it."""

    def __init__(self, found: Manifest, fetch: Fetch) -> None:
        self.manifest = found
        self._fetch = fetch
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._coming: dict[int, threading.Event] = {}
        self._fresh = False
        self._users = 1

    @property
    def size(self) -> int:
        return self.manifest.size

    @property
    def dense(self) -> bool:
        return len({chunk.id for chunk in self.manifest.chunks}) == len(self.manifest.chunks)

    @property
    def written(self) -> bytes:
        return self.manifest.digest

    def read(self, offset: int, length: int) -> memoryview:
        if offset + length > self.manifest.size:
            raise too_short(offset + length)
        parts = self.manifest.parts(offset, length)
        if len(parts) == 1:
            part = parts[0]
            return self._chunk(part.chunk)[part.inside : part.inside + part.length]
        data = memoryview(bytearray(length))
        for part in parts:
            chunk = self._chunk(part.chunk)
            at = part.offset - offset
            data[at : at + part.length] = chunk[part.inside : part.inside + part.length]
        return data

    def _chunk(self, number: int) -> memoryview:
        while True:
            with self._lock:
                if number in self._kept:
                    self._kept.move_to_end(number)
                    return self._kept[number]
                coming = self._coming.get(number)
                if coming is None:
                    mine = self._coming[number] = threading.Event()
                    break
            coming.wait()
        try:
            wanted = self.manifest.chunks[number]
            data = self._fetch(wanted.id, wanted.length, self._fresh)
            with self._lock:
                self._kept[number] = data
                while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                    self._kept.popitem(last=False)
            return data
        finally:
            with self._lock:
                del self._coming[number]
            mine.set()

    def share(self) -> ChunkedContent:
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._kept.clear()

    def forget(self) -> None:
        with self._lock:
            self._fresh = True
            self._kept.clear()


class ChunkedStore(TreeStore):
    """See above. Thread-safe like `TreeStore`."""

    layout = "chunks"
    chunked = True

    def usage(self, own_used: int) -> Usage:
        with self.use() as held:
            # Files may have many times the bytes that they occupy together.
            space = os.fstatvfs(held.root)
            return usage_of(held.root, self.limit, min(own_used, (space.f_blocks - space.f_bfree) * space.f_frsize))

    # writing

    @contextlib.contextmanager
    def changing(self, alive: Callable[[], object]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with failing_as(self.name, "lock"):
                own = open_directory(RESERVED, stack.enter_context(self.use()).root, create=False)
                stack.callback(os.close, own)
                stack.enter_context(among_others(self.name, own, alive))
            yield

    @contextlib.contextmanager
    def pool(self, *, write: bool = False) -> Iterator[ChunkPool]:
        """The chunks. Raises OSError."""
        with self.use() as held:
            own = open_directory(RESERVED, held.root, create=False)
            try:
                pool = ChunkPool(own, held.tmp if write else None, self.prefix().decode())
            finally:
                os.close(own)
            with pool:
                yield pool

    def store(
        self,
        fd: int,
        size: int,
        temp: TemporaryFile,
        codec: str,
        *,
        stable: bool,
        reading: Reading,
        streams: int,
        nice: int = 0,
        throttle: Throttle,
        cancelled: Callable[[], bool],
        alive: Callable[[], object],
    ) -> tuple[bytes, list[bytes]]:
        """Store the first ``size`` bytes of an open file and write the manifest to ``temp``, which is not synced: their
        tree digest, and those of its parts. See `Intake`. Raises OSError, TierError, SourceChanged."""
        with self.changing(alive), self.pool(write=True) as pool:
            intake = Intake(
                pool,
                fd,
                size,
                Codec.labelled(codec),
                streams=streams,
                nice=nice,
                throttle=throttle,
                cancelled=cancelled,
            )
            made, digests = intake.store(stable=stable, reading=reading)
            pool.sync()
            reach(At.CHUNKS_SYNCED)
            write_all(temp.fd, manifest.encode(made))
        return made.digest, digests

    def publish(
        self,
        temp: bytes,
        path: Path,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        xattrs: Mapping[bytes, bytes],
        *,
        sync_dir: bool = True,
    ) -> bool:
        try:
            self._inscribe(temp, mode, uid, gid, mtime_ns, xattrs)
        except ManifestDamaged:
            self.discard(temp)  # as if it had been removed: it is made again
        return super().publish(temp, path, mode, uid, gid, mtime_ns, xattrs, sync_dir=sync_dir)

    def _inscribe(
        self, temp: bytes, mode: int, uid: int, gid: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]
    ) -> None:
        """Let the manifest that waits under this name say of the file what the archive's filesystem may refuse."""
        with failing_as(self.name, "publish"), self.use() as held:
            try:
                fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=held.tmp)
            except FileNotFoundError:
                return
            try:
                found = read_manifest(fd)
            finally:
                os.close(fd)
            if found is None:
                raise ManifestDamaged("manifest: what waits to be published is none")
            told = {name: value for name, value in xattrs.items() if manifest.is_xattr(name)}
            wanted = replace(
                found,
                mode=stat.S_IFREG | stat.S_IMODE(mode),
                uid=uid,
                gid=gid,
                mtime_ns=mtime_ns,
                xattrs=told,
            )
            if wanted == found:
                return
            fresh = create_temporary(held.tmp, self.prefix().decode() + "manifest")
            try:
                write_all(fresh.fd, manifest.encode(wanted))
                fresh.commit(held.tmp, temp, sync_dir=False)
            finally:
                fresh.discard()

    # reading

    def content(self, path: Path) -> Content:
        fd = self.open(path)
        try:
            found = self._manifest(fd)
        except BaseException:
            os.close(fd)
            raise
        if found is None:
            return FileContent(fd)
        os.close(fd)
        return ChunkedContent(found, self.fetch)

    def _manifest(self, fd: int) -> Manifest | None:
        with failing_as(self.name, "read a manifest"):
            try:
                return read_manifest(fd)
            except ManifestDamaged as error:
                raise DigestMismatch(f"tier {self.name}: {error}") from error

    def fetch(self, ident: bytes, length: int, fresh: bool = False) -> memoryview:
        """A chunk's bytes. Raises TierError; DigestMismatch when they are not what was written, or are not there
        although the archive is."""
        try:
            with failing_as(self.name, "read a chunk"), self.pool() as pool:
                try:
                    return pool.fetch(ident, length, fresh=fresh)
                except DigestMismatch as error:
                    raise DigestMismatch(f"tier {self.name}: {error}") from error
        except TierError as error:
            if error.errno != errno.ENOENT:
                raise
        self.attach()
        raise DigestMismatch(f"tier {self.name}: chunk {ident.hex()} is missing")

    def content_first(self, paths: Sequence[Path], size: int) -> Content:
        self.attach()
        error: TierError | None = None
        last: Content | None = None
        for path in paths:
            try:
                content = self.content(path)
            except TierError as failed:
                error = error or failed
                continue
            if content.size == size:
                return content
            if last is None:
                last = content
            else:
                content.close()
        if last is not None:
            return last
        raise error or TierError(f"tier {self.name}: the file has no name here", errno=errno.ENOENT)

    def lacks(self, path: Path) -> str | None:
        fd = self.open(path)
        with failing_as(self.name, "look at chunks"):
            try:
                found = read_manifest(fd)
            except ManifestDamaged as error:
                return str(error)
            finally:
                os.close(fd)
            if found is None:
                return None
            with self.pool() as pool:
                wanted = found.references()
                missing = sum(pool.size(ident) is None for ident in wanted)
        return f"{missing} of its {len(wanted)} chunks are missing" if missing else None

    def size(self, path: Path) -> int | None:
        status = self.status(path)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def seen(self, parent: int, name: bytes, status: os.stat_result) -> os.stat_result:
        if not stat.S_ISREG(status.st_mode):
            return status
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
        except PermissionError:
            return status
        try:
            found = read_manifest(fd)
        except ManifestDamaged:
            return status
        finally:
            os.close(fd)
        return status if found is None else _with_size(status, found.size)


def _with_size(status: os.stat_result, size: int) -> os.stat_result:
    values = list(status)
    values[_SIZE] = size
    rest = {name: getattr(status, name) for name in dir(status) if name.startswith("st_") and name not in _FIRST}
    rest["st_blocks"] = -(-size // 512)
    return os.stat_result(values, rest)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

