"""The archive, layout ``tree``, in a store of blobs: each file a blob at its own path, all else in records beside.

Same contract as `tierfs.tiers.tree.TreeStore`: every operation may be repeated, and where its result already holds it
succeeds. A store of blobs has no rename and no transactions, only single writes that happen or do not. So each
operation is a row of writes of which any beginning may have happened, in an order with which the operation, taken once
more, ends the same:

- A name gets its bytes first, its record next. What moves stays at its old name until it is whole at the new one.
- A regular file is there if its blob is, any other thing if its record is. A record of a regular file without its blob
  is what a removal left: nothing. So what is removed loses its blob first, and its record last.
- A directory that moves has its record at the new name first; that at the old one goes last, when nothing is left.
- A publish is known by the temporary name in the file's record, never by the size of what stands there.

One process writes, one batch at a time (migrator.archive); others may read meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tierfs.errors import NoSuchBlob, TierError
from tierfs.points import At, reach
from tierfs.tiers.base import refusal
from tierfs.tiers.blobs import Blob, Blobs, unescape
from tierfs.tiers.object_content import ObjectContent
from tierfs.tiers.object_names import (
    JOURNALS,
    LINKS,
    LONG,
    Path,
    Record,
    below,
    content_key,
    decode,
    implied,
    names_below,
    path_hash,
    plain,
    record_key,
    shown,
)
from tierfs.tiers.object_root import ObjectRoot, temporary_key
from tierfs.tiers.root import RESERVED

log = logging.getLogger("tierfs.archive")

KEPT = b"kept"
"""Directory in the private one that takes paths like any other: what is set aside (migrator.archive)."""
AT_ONCE = 16
"""Names of one directory that are moved, or looked at, at a time."""
_FIRST, _SECOND, _THIRD, _DONE = b"1", b"2", b"3", b"4"
"""What the journal of an exchange says: which of its three moves is to be taken."""


Standing = tuple[Path, os.stat_result, bytes | None, dict[bytes, bytes]]
"""(path, status, target of a symlink, xattrs)"""


@dataclass(frozen=True, slots=True)
class Found:
    """What stands at a name."""

    record: Record
    blob: Blob | None
    """Of a regular file."""
    recorded: bool
    """Whether there is a record of it."""


class ObjectTree(ObjectRoot):
    """See `TreeStore`. Thread-safe for different paths. Methods raise TierError."""

    def __init__(self, blobs: Blobs, where: str) -> None:
        super().__init__(blobs, where)
        self._alive: Callable[[], object] = _nothing

    # looking

    def _check(self, path: Path) -> None:
        if not path:
            raise refusal(self.name, "the root itself")
        if path[:1] == (RESERVED,) and (len(path) < 3 or path[1] != KEPT or path[2] == b"tree"):
            raise refusal(self.name, "the name .tierfs in the archive's root is reserved")
        for name in path:
            if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
                raise refusal(self.name, f"{name!r} is not a name")

    def _record(self, path: Path) -> Record | None:
        key = record_key(path)
        raw = self.read(key)
        return None if raw is None else decode(self.name, key, raw)

    def _write(self, record: Record) -> None:
        self.blobs.put(record_key(record.path), record.encode())

    def _find(self, path: Path) -> Found | None:
        """What stands there, with its own attributes; None when nothing does."""
        self._check(path)
        record = self._record(path)
        if record is not None and not record.is_regular:
            return Found(record, None, recorded=True)
        blob = self.blobs.head(content_key(path))
        if blob is not None:
            return Found(record or plain(path, blob.modified_ns), blob, recorded=record is not None)
        if record is None and self._has_below(path):
            return Found(implied(path), None, recorded=False)
        return None

    def _has_below(self, path: Path) -> bool:
        """Whether anything is in this directory, whatever prefixes a listing may still tell."""
        prefix = below(path)
        if prefix is not None and next(self.blobs.scan(prefix), None) is not None:
            return True
        return any(
            record is not None and (not record.is_regular or self.blobs.head(content_key(record.path)) is not None)
            for record in self._records(path)
        )

    def _records(self, directory: Path) -> list[Record]:
        keys = [blob.key for blob in self.blobs.children(names_below(directory)).blobs]

        def get(key: str) -> Record | None:
            raw = self.read(key)
            return None if raw is None else decode(self.name, key, raw)

        return [record for record in self._each(get, keys) if record is not None]

    def _in(self, directory: Path) -> dict[bytes, Record | None]:
        """Names in a directory, sorted; None for those without a record, which are there by their blobs or by what is
        below them. Names that no key of ours has are somebody's and left alone."""
        found: dict[bytes, Record | None] = {}
        prefix = below(directory)
        if prefix is not None:
            listed = self.blobs.children(prefix)
            for key in [blob.key for blob in listed.blobs] + [key[:-1] for key in listed.prefixes]:
                name = unescape(key[len(prefix) :])
                path = (*directory, name)
                if content_key(path) == key and path != (RESERVED,):
                    found[name] = None
        found.update((record.path[-1], record) for record in self._records(directory))
        return dict(sorted(found.items()))

    def _each(self, work: Callable[[str], Record | None], keys: Sequence[str]) -> list[Record | None]:
        if len(keys) < 2:
            return [work(key) for key in keys]
        with ThreadPoolExecutor(min(AT_ONCE, len(keys)), thread_name_prefix="tierfs-tree") as pool:
            return list(pool.map(work, keys))

    def _attributes(self, record: Record) -> Record:
        """With those that it shares with the file's other names."""
        if not record.link:
            return record
        key = LINKS + record.link
        raw = self.read(key)
        return record if raw is None else record.like(decode(self.name, key, raw))

    # making names

    def _make_parents(self, record: Record) -> None:
        """Let the directories above be recorded, if no key that a listing tells leads to the name."""
        if record.is_regular and not content_key(record.path).startswith(LONG):
            return
        missing = []
        above = record.path[:-1]
        while above and above[:1] != (RESERVED,):
            there = self._record(above)
            if there is not None and there.is_directory:
                break
            if there is not None and self._find(above) is not None:
                message = f"tier {self.name}: {shown(above)} is no directory"
                raise TierError(message, errno=errno.ENOTDIR)
            missing.append(above)
            above = above[:-1]
        for directory in reversed(missing):
            self._write(implied(directory))

    def mkdir(self, path: Path) -> None:
        """Make a directory (0755 until ``set_attributes``); one that is there already stays."""
        found = self._find(path)
        if found is None or (found.record.is_directory and not found.recorded):
            self._make_parents(implied(path))
            self._write(implied(path))
        elif not found.record.is_directory:
            raise TierError(f"tier {self.name}: make directory {shown(path)}: it is a file", errno=errno.EEXIST)

    def symlink(self, target: bytes, path: Path) -> None:
        """Make a symlink, over whatever file had its name."""
        self._put(Record(path, stat.S_IFLNK | 0o777, target=target))

    def special(self, path: Path, mode: int, rdev: int) -> None:
        """Make a fifo, socket or device (``mode`` has its type), over whatever file had its name."""
        self._put(Record(path, mode, rdev=rdev))

    def _put(self, record: Record) -> None:
        self._check(record.path)
        there = self._record(record.path)
        self._refuse_directory(record.path, there)
        same = there is not None and (stat.S_IFMT(there.mode), there.rdev, there.target) == (
            stat.S_IFMT(record.mode),
            record.rdev,
            record.target,
        )
        if not same:
            self._make_parents(record)
            self._write(record)
        self.blobs.delete([content_key(record.path)])

    def _refuse_directory(self, path: Path, there: Record | None) -> None:
        """An empty directory gives way to a file, any other is an error."""
        if there is not None and there.is_directory and self._has_below(path):
            raise TierError(f"tier {self.name}: {shown(path)} is a directory with files in it", errno=errno.ENOTEMPTY)

    def link(self, source: Path, path: Path) -> None:
        """Make ``path`` another name of ``source``, over whatever file had that name: a copy that shares its
        attributes. Nothing happens when ``source`` is missing: it was renamed or removed later."""
        self._check(path)
        found = self._find(source)
        if found is None or source == path:
            return
        record = found.record
        if record.is_directory:
            raise TierError(f"tier {self.name}: link {shown(source)}: it is a directory", errno=errno.EPERM)
        there = self._record(path)
        self._refuse_directory(path, there)
        if not record.link:
            record = replace(record, link=secrets.token_hex(16))
            self.blobs.put(LINKS + record.link, record.encode())
            self._write(record)
        if there is not None and there.link == record.link:
            if not record.is_regular:
                return
            blob = self.blobs.head(content_key(path))
            if blob is not None and there.upload == record.upload:
                return
        self._make_parents(record.at(path))
        if record.is_regular:
            self._copy(source, path)
        self._write(record.at(path))
        if not record.is_regular:
            self.blobs.delete([content_key(path)])

    def _copy(self, source: Path, target: Path) -> bool:
        """Copy a file's blob; False when there is none."""
        try:
            self.blobs.copy(content_key(source), content_key(target))
            return True
        except NoSuchBlob:
            return False

    # moving and removing names

    def rename(self, source: Path, target: Path) -> None:
        """Rename, over whatever had the name. A missing source counts as renamed before; a directory is merged into one
        that is there, the moved entries win."""
        self._check(target)
        found = self._find(source)
        if source == target:
            return
        if found is None:
            self.blobs.delete([record_key(source)])
            return
        if found.record.is_directory:
            self._make_parents(found.record.at(target))
            self._move_directory(source, target)
        else:
            self._refuse_directory(target, self._record(target))
            self._move_file(source, target, found)

    def _move_file(self, source: Path, target: Path, found: Found) -> None:
        self._alive()
        self._make_parents(found.record.at(target))
        if found.record.is_regular:
            self._copy(source, target)
        if found.recorded:
            self._write(found.record.at(target))
        else:
            self.blobs.delete([record_key(target)])
        if not found.record.is_regular:
            self.blobs.delete([content_key(target)])
        self.blobs.delete([content_key(source)])
        self.blobs.delete([record_key(source)])

    def _move_directory(self, source: Path, target: Path) -> None:
        record = self._record(source)
        there = self._record(target)
        if there is None or not there.is_directory:
            self._write((record or implied(target)).at(target))
        elif record is not None:
            self._write(record.at(target))
        self.blobs.delete([content_key(target)])  # of the file that stood there
        names = self._in(source)
        files = [name for name, below_it in names.items() if below_it is None or not below_it.is_directory]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tierfs-tree") as pool:
            for _ in pool.map(lambda name: self._move_below(source, target, name), files):
                pass
        for name in sorted(names.keys() - set(files)):
            self._move_directory((*source, name), (*target, name))
        self.blobs.delete([record_key(source)])

    def _move_below(self, source: Path, target: Path, name: bytes) -> None:
        here, there = (*source, name), (*target, name)
        found = self._find(here)
        if found is None:
            self.blobs.delete([record_key(here)])
        elif found.record.is_directory:  # that has no record
            self._move_directory(here, there)
        else:
            there_now = self._record(there)
            if there_now is not None and there_now.is_directory:
                self._refuse_directory(there, there_now)
            self._move_file(here, there, found)

    def exchange(self, a: Path, b: Path, token: str) -> None:
        """Swap two names, once for each ``token``: a journal tells how far it is. It stays until ``forget_exchange``,
        to be called once the caller has durably recorded the swap. The first object is aside meanwhile."""
        self._check(a)
        self._check(b)
        journal, aside = JOURNALS + self._journal(token), (RESERVED, KEPT, b"exchange-" + token.encode())
        stage = self.read(journal)
        if stage is None:
            if self._find(a) is None or self._find(b) is None:
                log.info("archive: an end of an exchange is missing: %r, %r", a, b)
                return
            stage = _FIRST
            self.blobs.put(journal, stage)
        reach(At.PUBLISH_EXCHANGE)
        for step, source, target, following in (
            (_FIRST, a, aside, _SECOND),
            (_SECOND, b, a, _THIRD),
            (_THIRD, aside, b, _DONE),
        ):
            if stage == step:
                self.rename(source, target)
                stage = following
                self.blobs.put(journal, stage)

    def _journal(self, token: str) -> str:
        return f"exchange-{token}"

    def journals(self, token: str) -> list[bytes]:
        """Names that the journal of an exchange may have, for ``sweep``."""
        return [self._journal(token).encode()]

    def forget_exchange(self, token: str) -> None:
        """Remove the journal of an exchange; none is fine."""
        self.blobs.delete([JOURNALS + self._journal(token)])

    def remove(self, path: Path) -> None:
        """Remove a name that is not a directory; a missing one is fine, and a directory stays."""
        self._check(path)
        record = self._record(path)
        if record is None or not record.is_directory:
            self.blobs.delete([content_key(path)])
            if record is not None:
                self.blobs.delete([record_key(path)])

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory; a missing one is fine, and one that holds files of others stays."""
        self._check(path)
        record = self._record(path)
        if record is None or not record.is_directory:
            return
        if self._has_below(path):
            log.info("archive keeps directory %s: it is not empty", shown(path))
            return
        for left in self._records(path):  # of files whose removal was cut short
            self.blobs.delete([record_key(left.path)])
        self.blobs.delete([record_key(path)])

    # content and attributes

    def changing(self, alive: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """To be held while files are moved or removed. ``alive`` is called at each of them: a directory has many."""
        return self._telling(alive)

    @contextlib.contextmanager
    def _telling(self, alive: Callable[[], object]) -> Iterator[None]:
        self._alive = alive
        try:
            yield
        finally:
            self._alive = _nothing

    def lacks(self, path: Path) -> str | None:
        """What is missing of what the regular file there stands for: nothing, it is all in its blob."""
        return None

    def content(self, path: Path) -> ObjectContent:
        """The bytes of a regular file."""
        found = self._find(path)
        if found is None:
            raise TierError(f"tier {self.name}: open {shown(path)}: there is no such file", errno=errno.ENOENT)
        if found.blob is None:
            raise TierError(f"tier {self.name}: open {shown(path)}: not a regular file", errno=errno.EINVAL)
        return ObjectContent(self.blobs, found.blob.key, found.blob.size)

    def content_first(self, paths: Sequence[Path], size: int) -> ObjectContent:
        """Like `content`, for a file that stands at one of ``paths``; one with ``size`` bytes is preferred."""
        self.attach()
        error: TierError | None = None
        last: ObjectContent | None = None
        for path in paths:
            try:
                found = self.content(path)
            except TierError as failed:
                error = error or failed
                continue
            if found.size == size:
                return found
            last = last or found
        if last is not None:
            return last
        raise error or TierError(f"tier {self.name}: the file has no name here", errno=errno.ENOENT)

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
        """Make what waits under this name the file ``path``, with these attributes, durably. False when nothing waits
        there, as after an earlier publish, or when it was sent to another name than this."""
        self._check(path)
        self._refuse_directory(path, self._record(path))
        fresh = Record(path, stat.S_IFREG | stat.S_IMODE(mode), uid, gid, mtime_ns, dict(xattrs), upload=temp.decode())
        self._make_parents(fresh)
        reach(At.PUBLISH_CONTENT)
        with self._lock:
            direct = self._direct.get(temp)
        if direct is None:
            try:
                self.blobs.copy(temporary_key(temp), content_key(path))
            except NoSuchBlob:
                return False
        elif direct.key != content_key(path) or direct.is_lost:
            self.astray(temp)
            return False
        else:
            direct.complete()
        self._write(fresh)
        self._forget(temp)
        return True

    def _forget(self, temp: bytes) -> None:
        if self._drop(temp) is None:
            self.blobs.delete([temporary_key(temp)])

    def stands(self, path: Path, temp: bytes, size: int) -> bool:
        """Whether what waited under this name is the file there."""
        found = self._find(path)
        return found is not None and found.blob is not None and found.record.upload == temp.decode("latin-1")

    def size(self, path: Path) -> int | None:
        """Bytes of the regular file there; None when there is none."""
        found = self._find(path)
        return None if found is None or found.blob is None else found.blob.size

    def status(self, path: Path) -> os.stat_result | None:
        """What lstat would say; None when nothing is there."""
        found = self._find(path)
        return None if found is None else _status(self._attributes(found.record), found.blob)

    def set_attributes(
        self, path: Path, mode: int, uid: int, gid: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]
    ) -> None:
        """Set permission bits, owner, mtime and exactly these user xattrs. A missing path is fine: it was renamed or
        removed later."""
        found = self._find(path)
        if found is None:
            return
        record = found.record
        permissions = record.mode if stat.S_ISLNK(record.mode) else mode
        changed = replace(
            record,
            mode=stat.S_IFMT(record.mode) | stat.S_IMODE(permissions),
            uid=uid,
            gid=gid,
            mtime_ns=mtime_ns,
            xattrs=dict(xattrs) if record.is_regular or record.is_directory else {},
        )
        if record.link:
            self.blobs.put(LINKS + record.link, changed.encode())
        else:
            self._write(changed)

    def sync_directories(self, paths: Iterable[Path]) -> None:
        """Nothing: what a store has taken is durable."""

    # everything

    def standing(self, path: Path) -> Standing | None:
        """What is there; None when nothing is."""
        found = self._find(path)
        if found is None:
            return None
        record = self._attributes(found.record)
        return path, _status(record, found.blob), record.target, dict(record.xattrs)

    def everything(self, top: Path = ()) -> Iterator[Standing]:
        """(path, status, target of a symlink, xattrs) of all below ``top``, each directory before what is in it."""
        todo: list[Path] = [top]
        while todo:
            directory = todo.pop()
            for name in self._in(directory):
                found = self.standing((*directory, name))
                if found is not None:
                    yield found
                    if stat.S_ISDIR(found[1].st_mode):
                        todo.append(found[0])


def _nothing() -> None:
    """Nobody wants to know."""


def _status(record: Record, blob: Blob | None) -> os.stat_result:
    """Two names have the same st_ino if they are names of one file; it has nothing to do with the mount's."""
    size = blob.size if blob is not None else len(record.target or b"")
    identity = record.link or path_hash(record.path)
    links = 2 if record.is_directory or record.link else 1
    seconds = record.mtime_ns // 1_000_000_000
    times = {"st_atime_ns": record.mtime_ns, "st_mtime_ns": record.mtime_ns, "st_ctime_ns": record.mtime_ns}
    fields = (record.mode, int(identity[:15], 16), 0, links, record.uid, record.gid, size, seconds, seconds, seconds)
    return os.stat_result(fields, {**times, "st_blocks": -(-size // 512), "st_rdev": record.rdev})
