"""Blobs in an object store: S3 and what is compatible, Google Cloud Storage, Azure, through obstore.

Every call is obstore's synchronous one, which releases the GIL and is made from a thread of the caller's. Requests that
fail in a way that may pass are repeated by obstore a few times, within the patience; everything else is the caller's.

**Uploads.** obstore has no calls for single parts: it takes an iterator of buffers and sends those in parallel. So each
upload has a thread of its own in that one call, and `ObjectUpload.part` hands it the buffers through `_Feed`. But for a
short last part nothing is copied: the buffers go from the mapping to the socket. `part` returns when the last reference
to its buffer is gone, which is when the part is sent or given up, so that the mapping may be cut off then.

**Forks.** obstore has one runtime of threads per process, which begins with the first request and does not survive a
fork: in the child every call would hang. So there they are refused; who forks asks the store before in a process apart.

What obstore cannot do: tell the uploads in parts that a store still has. When a process or the server dies in the
middle of one, its parts stay, unseen and paid for, until `abort_stale` or a rule of the bucket removes them.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tierfs.errors import NoSuchBlob, TierError
from tierfs.tiers.blobs import (
    LONGEST_KEY,
    OWN,
    PART,
    Blob,
    Blobs,
    Children,
    Data,
    Upload,
    buffers,
    check_key,
    check_prefix,
)
from tierfs.tiers.object_access import PATIENCE, Access, connect
from tierfs.tiers.object_errors import Place, translate
from tierfs.tiers.s3_uploads import S3Uploads
from tierfs.types import Usage

T = TypeVar("T")

STREAMS = 8
"""Parts of one upload that are sent at a time."""
SMALLEST_PART = 5 << 20
"""S3's limit for all parts but the last."""
MOST_PARTS = 10_000
PAGE = 1000
"""Keys of one page of a listing."""
DELETED_AT_ONCE = 1000
COPIED_AT_ONCE = 5 << 30
"""The largest object that S3 copies in one request."""
UNLIMITED = 1 << 60
"""Bytes that an object store without a size counts as having."""
GAP = 256 << 10
"""Bytes between two ranges that are read along rather than asked for apart."""
_NOTHING = memoryview(b"")
_TAKEN = ("AlreadyExistsError", "PreconditionError")
_UNTOLD = ("NotSupportedError", "NotImplementedError")


class _Runtime:
    """obstore's."""

    process: int | None = None
    """Where it runs."""


class ObjectBlobs:
    """See `Blobs`."""

    def __init__(self, name: str, access: Access, *, size: int | None = None, streams: int = STREAMS) -> None:
        """``size`` in bytes limits the capacity."""
        self._name = name
        self._access = access
        self._store = access.store
        self._size = size
        self._most_streams = self.streams = streams
        self._place = Place(name, access.provider, access.url, access.bucket, access.endpoint, access.region)
        self._room = LONGEST_KEY - len(access.prefix.encode()) - 1
        self._atomic = False
        self._uploads: set[ObjectUpload] = set()
        """Those that are under way."""
        self._beginning = threading.Lock()

    @classmethod
    def open(
        cls,
        name: str,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        patience: float = PATIENCE,
        size: int | None = None,
        streams: int = STREAMS,
    ) -> ObjectBlobs:
        """The tier ``name`` at a URL such as s3://bucket/prefix; ``patience`` in seconds is the longest that a request
        takes, repetitions included. Asks nothing of the server. Raises ConfigError."""
        access = connect(name, url, endpoint=endpoint, region=region, patience=patience)
        return cls(name, access, size=size, streams=streams)

    def __repr__(self) -> str:
        return f"ObjectBlobs({self._name!r}, {self._access!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def url(self) -> str:
        return self._access.url

    @property
    def atomic_create(self) -> bool:
        return self._atomic

    # writing

    def put(self, key: str, data: Data | Sequence[Data]) -> str | None:
        self._check(key)
        with _Lent(data) as views:
            return self._etag(self._call(f"write {key}", self._store.put, key, views, use_multipart=False))

    def put_if_absent(self, key: str, data: Data | Sequence[Data]) -> bool:
        self._check(key)
        if not self._atomic and self.head(key) is not None:
            return False
        with _Lent(data) as views:
            return self._create(key, views)

    def _create(self, key: str, data: list[memoryview]) -> bool:
        """Write a blob if the server finds that there is none; one that does not look writes it anyway."""
        self._awake()
        try:
            self._store.put(key, data, mode="create", use_multipart=False)
            return True
        except Exception as error:
            if type(error).__name__ in _TAKEN:
                return False
            untold = type(error).__name__ in _UNTOLD
            failure = translate(self._place, f"write {key}", error)
        if not untold:
            raise failure
        self._call(f"write {key}", self._store.put, key, data, use_multipart=False)
        return True

    def copy(self, source: str, target: str) -> None:
        self._check(source)
        self._check(target)
        if self._access.provider == "s3":
            found = self.head(source)
            if found is None:
                raise NoSuchBlob(self._name, source)
            if found.size > COPIED_AT_ONCE:
                return self._copy_through(found, target)
        self._call(f"copy {source}", self._store.copy, source, target, overwrite=True, missing=source)

    def _copy_through(self, source: Blob, target: str) -> None:
        """Copy an object that is too large for one request by reading and sending it."""
        size = max(PART, -(-source.size // MOST_PARTS))
        upload = self.begin(target, size)
        try:

            def send(number: int) -> None:
                start = number * size
                upload.part(number, self.get_range(source.key, start, min(size, source.size - start)))

            with ThreadPoolExecutor(self._most_streams) as pool:
                for _ in pool.map(send, range(-(-source.size // size))):
                    pass
            upload.complete()
        finally:
            upload.abort()

    def begin(self, key: str, part_size: int = PART) -> Upload:
        self._check(key)
        if part_size < SMALLEST_PART:
            raise TierError(f"tier {self._name}: parts have at least {SMALLEST_PART} bytes", temporary=False)
        self._awake()
        upload = ObjectUpload(self, key, part_size)
        with self._beginning:
            self._uploads.add(upload)
        upload.start()
        return upload

    def went(self, *, well: bool) -> None:
        """Uploads that do not end in time share a slow line with fewer parts at once from now on, or more again."""
        with self._beginning:
            self.streams = min(self._most_streams, self.streams * 2) if well else max(1, self.streams // 2)

    def ended(self, upload: ObjectUpload) -> None:
        with self._beginning:
            self._uploads.discard(upload)

    def delete(self, keys: Iterable[str]) -> None:
        todo = list(keys)
        for key in todo:
            self._check(key)
        for start in range(0, len(todo), DELETED_AT_ONCE):
            self._delete(todo[start : start + DELETED_AT_ONCE])

    def _delete(self, keys: list[str]) -> None:
        try:
            self._call(f"remove {keys[0]}", self._store.delete, keys, missing=keys[0])
        except NoSuchBlob:
            for key in keys if len(keys) > 1 else ():  # which of them, the store does not say
                self._delete([key])

    # reading

    def head(self, key: str) -> Blob | None:
        self._check(key)
        try:
            return self._head(key)
        except TierError as error:
            if not isinstance(error, NoSuchBlob) and error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOENT):
                raise
            unexplained = error
        # The answer to HEAD has no body to say why, and a bucket that is gone is no blob that was never there.
        try:
            self._call(f"look at {key}", self._store.get_range, key, start=0, length=1, missing=key)
        except NoSuchBlob:
            return None
        if isinstance(unexplained, NoSuchBlob):
            return self._head(key)  # it came just now
        raise unexplained

    def _head(self, key: str) -> Blob:
        return _blob(self._call(f"look at {key}", self._store.head, key, missing=key))

    def get(self, key: str) -> memoryview:
        self._check(key)

        def read() -> tuple[int, memoryview]:
            result = self._store.get(key)
            return result.meta["size"], memoryview(result.bytes())

        size, data = self._call(f"read {key}", read, missing=key)
        return self._whole(key, 0, size, data)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        self._check(key)
        if length == 0:
            return _NOTHING
        data = self._call(f"read {key}", self._store.get_range, key, start=start, length=length, missing=key)
        return self._whole(key, start, length, memoryview(data))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self._check(key)
        requests = _together(ranges)
        # obstore would put ranges together itself, and cut an answer that is too short where it is not.
        answers = (
            self._call(
                f"read {key}",
                self._store.get_ranges,
                key,
                starts=[start for start, _ in requests],
                ends=[end for _, end in requests],
                coalesce=0,
                missing=key,
            )
            if requests
            else []
        )
        got = [
            (start, self._whole(key, start, end - start, memoryview(answer)))
            for (start, end), answer in zip(requests, answers, strict=True)
        ]
        found = []
        for start, length in ranges:
            begin, data = got[bisect_right(got, start, key=lambda each: each[0]) - 1] if length else (start, _NOTHING)
            found.append(data[start - begin : start - begin + length])
        return found

    def _whole(self, key: str, start: int, length: int, data: memoryview) -> memoryview:
        if len(data) != length:
            raise TierError(
                f"tier {self._name}: read {key}: {self._place.server} sent {len(data)} bytes from {start} on instead "
                f"of {length}"
            )
        return data

    def scan(self, prefix: str = "") -> Iterator[Blob]:
        check_prefix(self._name, prefix)
        action = f"list {prefix or self.url}"
        pages = iter(self._call(action, self._store.list, prefix[:-1] or None, chunk_size=PAGE))
        return self._listed(action, pages, own=prefix.startswith(OWN + "/"))

    def _listed(self, action: str, pages: Iterator[list[Any]], *, own: bool) -> Iterator[Blob]:
        while page := self._call(action, next, pages, None):
            for meta in page:
                blob = _blob(meta)
                if own or not blob.key.startswith(OWN + "/"):
                    yield blob

    def children(self, prefix: str = "") -> Children:
        check_prefix(self._name, prefix)
        found = self._call(f"list {prefix or self.url}", self._store.list_with_delimiter, prefix[:-1] or None)
        prefixes = sorted(f"{name}/" for name in found["common_prefixes"] if prefix or name != OWN)
        blobs = sorted((_blob(meta) for meta in found["objects"]), key=lambda blob: blob.key)
        return Children(prefixes, blobs)

    # the rest

    def abort_stale(self, older_than: float) -> int | None:
        if self._access.provider != "s3":
            return None
        with self._beginning:
            prefix = f"{self._access.prefix}/" if self._access.prefix else ""
            live = {prefix + upload.key for upload in self._uploads}
        return S3Uploads(self._access, self._place).abort_stale(older_than, live)

    def usage(self, own_used: int) -> Usage:
        capacity = self._size or UNLIMITED
        return Usage(capacity, own_used, max(0, capacity - own_used))

    def probe(self) -> None:
        key = f"{OWN}/probe-{secrets.token_hex(8)}"
        said = secrets.token_bytes(16)
        self._call("try to write", self._store.put, key, [memoryview(said)], use_multipart=False)
        failure: TierError | None = None
        try:
            self._try(key, said)
        except TierError as error:
            failure = error
        try:
            self._call("try to remove", self._store.delete, [key])
        except TierError as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def _try(self, key: str, said: bytes) -> None:
        if self._call("try to read", lambda: bytes(self._store.get_range(key, start=1, length=8))) != said[1:9]:
            raise self._no_store("gives other bytes than were written")
        found = self._call("try to list", self._store.list_with_delimiter, OWN)
        if all(meta["path"] != key for meta in found["objects"]):
            raise self._no_store("does not list what was written")
        self._atomic = not self._create(key, [memoryview(said)])

    def _no_store(self, why: str) -> TierError:
        message = f"tier {self._name}: {self._place.server} {why}; is it an object store?"
        return TierError(message, errno=errno.EPROTO, temporary=False)

    def close(self) -> None:
        """There is nothing to let go of: connections end by themselves when they are idle."""

    def _check(self, key: str) -> None:
        check_key(self._name, key, room=self._room)

    def _awake(self) -> None:
        """Refuse to hang in a runtime that stayed behind in the parent."""
        if _Runtime.process is None:
            _Runtime.process = os.getpid()
        elif _Runtime.process != os.getpid():
            message = f"tier {self._name}: object stores were used before this process was forked"
            raise TierError(message, errno=errno.EDEADLK, temporary=False)

    def _call(
        self, action: str, function: Callable[..., T], *args: Any, missing: str | None = None, **options: Any
    ) -> T:
        """Call obstore; its errors become TierErrors that refer to nothing else. ``missing``: see `translate`."""
        self._awake()
        try:
            return function(*args, **options)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            failure = translate(self._place, action, error, missing)
        raise failure

    @staticmethod
    def _etag(result: Any) -> str | None:
        etag = result["e_tag"]
        return None if etag is None else str(etag)


class _Lent:
    """Buffers lent to obstore, which on leaving has let go of all of them: requests that were given up are taken down a
    moment later, and what the buffers are mapped from may be cut off afterwards."""

    def __init__(self, data: Data | Sequence[Data]) -> None:
        self._views = [view[:] for view in buffers(data)]  # of our own: their end is the end of their use
        self._returned = threading.Condition()
        self._watched = [weakref.ref(view, self._let_go) for view in self._views]
        self._out = len(self._views)

    def _let_go(self, _: object) -> None:
        with self._returned:
            self._out -= 1
            self._returned.notify_all()

    def __enter__(self) -> list[memoryview]:
        return self._views

    def __exit__(self, *_: object) -> None:
        self._views.clear()
        with self._returned:
            while self._out:
                self._returned.wait()


class _Discarded(Exception):
    """Makes obstore discard an upload."""


class _Feed:
    """The buffers of an upload, in order, as they come. obstore iterates; each call of `part` puts one in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # with an RLock: buffers are let go of by whoever holds it, too
        self._waiting: dict[int, memoryview] = {}
        self._next = 0
        self._complete = self._discarded = self._over = False

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> memoryview:
        with self._changed:
            while not (self._discarded or self._next in self._waiting):
                if self._complete:
                    if self._waiting:
                        raise _Discarded(f"part {self._next} is missing")
                    raise StopIteration
                self._changed.wait()
            if self._discarded:
                raise _Discarded
            self._next += 1
            return self._waiting.pop(self._next - 1)

    def put(self, number: int, data: memoryview) -> None:
        """Returns once nobody refers to the buffer, which was sent or not: the end of the upload tells."""
        released = _Flag()

        def let_go(_: object) -> None:
            with self._changed:
                released.up = True
                self._changed.notify_all()

        view = data[:]  # one of our own: its end is the end of its use
        watched = weakref.ref(view, let_go)
        self.give(number, view)
        del view
        with self._changed:
            while not released.up:
                self._changed.wait()
        del watched

    def give(self, number: int, data: memoryview) -> None:
        """As `put`, but for a buffer that is the feed's to keep."""
        with self._changed:
            if not (self._over or self._complete or self._discarded) and number >= self._next:
                self._waiting[number] = data
                self._changed.notify_all()

    def end(self, *, complete: bool) -> None:
        """No more parts come."""
        with self._changed:
            self._complete = self._complete or complete
            self._discarded = self._discarded or not complete
            self._changed.notify_all()

    def over(self) -> None:
        """Nobody iterates any more."""
        with self._changed:
            self._over = True
            self._waiting.clear()
            self._changed.notify_all()


class _Flag:
    up = False


class ObjectUpload:
    """See `Upload`."""

    def __init__(self, blobs: ObjectBlobs, key: str, part_size: int) -> None:
        self.key = key
        self.part_size = part_size
        self._blobs = blobs
        self._feed = _Feed()
        self._error: TierError | None = None
        self._etag: str | None = None
        self._parts: set[int] = set()
        self._last: int | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tierfs-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        blobs = self._blobs
        try:
            result = blobs._store.put(
                self.key,
                self._feed,
                use_multipart=True,
                chunk_size=self.part_size,
                max_concurrency=blobs.streams,
            )
            self._etag = blobs._etag(result)
            blobs.went(well=True)
        except BaseException as error:
            if isinstance(error, _Discarded):
                self._error = self._refusal("was discarded")
            else:
                self._error = translate(blobs._place, f"write {self.key}", error)
                if self._error.errno == errno.ETIMEDOUT:
                    blobs.went(well=False)
        finally:
            self._feed.over()
            blobs.ended(self)

    def part(self, number: int, data: Data) -> None:
        (view,) = buffers(data) or [memoryview(b"")]
        with self._lock:
            self._admit(number, len(view))
        if len(view) == self.part_size:
            self._feed.put(number, view)
        elif len(view):  # obstore keeps a short part until it knows that it is the last: not from somebody's mapping
            self._feed.give(number, memoryview(bytes(view)))
        self._check()

    def _check(self) -> None:
        """Raise what went wrong: an error of its own each time, for its traceback refers to the buffer of the call."""
        if self._error is not None:
            raise TierError(str(self._error), errno=self._error.errno, temporary=self._error.temporary)

    def _admit(self, number: int, size: int) -> None:
        """Only what makes the parts that were announced: a wrong one would shift all bytes behind it."""
        if number in self._parts or not 0 <= number < MOST_PARTS or size > self.part_size:
            raise self._refusal(f"has no room for part {number} with {size} bytes")
        if size < self.part_size:
            if self._last is not None or any(other > number for other in self._parts):
                raise self._refusal(f"has a part {number} with {size} bytes that is not the last")
            self._last = number
        elif self._last is not None and number > self._last:
            raise self._refusal(f"has a part {number} after its last")
        self._parts.add(number)

    def _refusal(self, why: str) -> TierError:
        message = f"tier {self._blobs.name}: the upload of {self.key} {why}"
        return TierError(message, errno=errno.EINVAL, temporary=False)

    def complete(self) -> str | None:
        self._feed.end(complete=True)
        self._thread.join()
        self._check()
        return self._etag

    def abort(self) -> None:
        self._feed.end(complete=False)
        self._thread.join()


def _together(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end) of what to ask for, in order: ranges that overlap or have little between them make one."""
    merged: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if not length:
            continue
        if merged and start - merged[-1][1] <= GAP:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + length))
        else:
            merged.append((start, start + length))
    return merged


def _blob(meta: Any) -> Blob:
    etag = meta["e_tag"]
    modified = meta["last_modified"]
    return Blob(meta["path"], meta["size"], None if etag is None else str(etag), int(modified.timestamp() * 1e9))


def _conforms(blobs: ObjectBlobs) -> Blobs:
    return blobs
