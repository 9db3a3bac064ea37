"""The bytes of files on their way into a store of blobs, and out of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tierfs.durable import TemporaryFile
from tierfs.errors import SourceChanged, TierError
from tierfs.tiers.blobs import PART, Blobs, Upload
from tierfs.tiers.content import Content, too_short
from tierfs.tiers.copy import CHUNK, Mapped, Reading, Throttle, chunk_digest, mapping, tree_digest

STREAMS = 8
"""Parts of one file that are sent at a time."""
MOST_PARTS = 9_000
"""Parts of one upload, below the 10,000 that S3 takes."""


class ObjectTemporary:
    """Bytes that wait in the store to be published, whole or in parts.

    Small ones are a blob of their own, which `publish` copies to its name. Large ones that know the name under which
    they will be published are parts of an upload to that very key, which `complete` makes visible there: nothing is
    copied, but they are lost with the process. One thread at a time, but for `part`.
    """

    def __init__(
        self,
        blobs: Blobs,
        name: bytes,
        key: str,
        *,
        direct: bool = False,
        forget: Callable[[bytes], object] = lambda name: None,
    ) -> None:
        """``key``: where the bytes go, with ``direct`` the file's own. ``forget`` is told when it is discarded."""
        self.name = name
        self.key = key
        self.direct = direct
        self.completed = False
        self._blobs = blobs
        self._forget = forget
        self._upload: Upload | None = None
        self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """All of it at once; durable afterwards, unless it waits as a part. Raises TierError."""
        if self.direct:
            self.begin()
            for number, start in enumerate(range(0, len(data), PART)):
                self.part(number, memoryview(data)[start : start + PART])
        else:
            self._blobs.put(self.key, data)

    def begin(self, part_size: int = PART) -> None:
        """Parts follow. Raises TierError."""
        self._upload = self._blobs.begin(self.key, part_size)

    def part(self, number: int, data: memoryview) -> None:
        """See `Upload.part`."""
        assert self._upload is not None
        self._upload.part(number, data)

    def seal(self) -> None:
        """All parts have been given: durable afterwards, unless ``direct``. Raises TierError."""
        if not self.direct and self._upload is not None:
            upload, self._upload = self._upload, None
            upload.complete()

    def complete(self) -> None:
        """Make a direct upload the file, once. Raises TierError, after which it is discarded."""
        assert self.direct
        if not self.completed:
            if self._upload is None:
                self.begin()
                assert self._upload is not None
            self._over = True
            self._upload.complete()
            self.completed = True

    def close(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Give up the parts, also those that threads are sending. Raises nothing."""
        upload = self._upload
        if upload is not None and not self.completed:
            self._over = True
            upload.abort()

    def stop(self) -> None:
        """`abort` without waiting: who sends is told so, sooner or later."""
        threading.Thread(target=self.abort, name="tierfs-abort", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether it was discarded, or failed when it was completed."""
        return self._over and not self.completed

    def discard(self) -> None:
        """Give up the bytes. Raises nothing: what stays goes at the next start."""
        self.abort()
        self._forget(self.name)
        if not self.direct:
            with contextlib.suppress(TierError):
                self._blobs.delete([self.key])


def send_file(
    src_fd: int,
    temp: ObjectTemporary,
    size: int,
    *,
    streams: int = STREAMS,
    throttle: Throttle | None = None,
    cancelled: Callable[[], bool] | None = None,
    stable: bool = False,
    reading: Reading | None = None,
    digests: list[bytes] | None = None,
) -> bytes:
    """Send the first ``size`` bytes of ``src_fd``: the tree digest of what was sent. Parts go in parallel, of a
    ``stable`` source (see `copy_file`) from where they are mapped. Raises OSError, TierError; SourceChanged when
    ``cancelled`` says so or the source is shorter."""
    part_size = PART * max(1, -(-size // (PART * MOST_PARTS)))
    found = [b""] * -(-size // CHUNK)

    def take(offset: int, length: int, whole: Mapped | None) -> memoryview:
        if cancelled is not None and cancelled():
            raise SourceChanged("the copy was cancelled")
        if throttle is not None:
            throttle(length)
        if os.fstat(src_fd).st_size < offset + length:
            raise SourceChanged(f"the file became shorter than {offset + length} bytes while it was copied")
        data = whole.view[offset : offset + length] if whole is not None else _read(src_fd, offset, length)
        for start in range(0, length, CHUNK):
            found[(offset + start) // CHUNK] = chunk_digest(data[start : start + CHUNK])
        return data

    if size <= part_size:
        temp.write(take(0, size, None))
    else:
        temp.begin(part_size)
        with mapping(src_fd, size if stable else 0, reading) as whole:

            def send(number: int) -> None:
                offset = number * part_size
                length = min(part_size, size - offset)
                if whole is None:
                    temp.part(number, take(offset, length, None))
                    return
                with whole.reading:  # until nobody looks at the part any more
                    temp.part(number, take(offset, length, whole))

            try:
                _parallel(send, -(-size // part_size), streams, temp.abort)
            except TierError as error:
                if cancelled is not None and cancelled():
                    raise SourceChanged("the copy was cancelled") from error
                raise
        temp.seal()
    if digests is not None:
        digests[:] = found
    return tree_digest(found)


def _parallel(work: Callable[[int], None], count: int, streams: int, give_up: Callable[[], None]) -> None:
    """``work`` with each number, in order, from several threads. After the first error, ``give_up``: threads whose
    parts wait for an earlier one would wait for ever."""
    failed = threading.Event()
    errors: list[BaseException] = []

    def one(number: int) -> None:
        if failed.is_set():
            return
        try:
            work(number)
        except BaseException as error:
            if not failed.is_set():
                failed.set()
                errors.append(error)
                give_up()

    with ThreadPoolExecutor(min(streams, count), thread_name_prefix="tierfs-send") as pool:
        for _ in pool.map(one, range(count)):
            pass
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its frames know this list, and the source's bytes


def _read(fd: int, offset: int, length: int) -> memoryview:
    view = memoryview(bytearray(length))
    done = 0
    while done < length:
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            raise SourceChanged(f"the file became shorter than {offset + length} bytes while it was copied")
        done += count
    return view


class ObjectContent(Content):
    """A file's bytes in the store, read by ranges from several threads."""

    def __init__(self, blobs: Blobs, key: str, size: int) -> None:
        self._size = size
        self._blobs = blobs
        self._key = key

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> memoryview:
        if offset + length > self._size:
            raise too_short(offset + length)
        return self._blobs.get_range(self._key, offset, length)

    def copy(
        self,
        temp: TemporaryFile,
        size: int,
        *,
        streams: int = STREAMS,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes:
        """With as many ranges at a time as parts are sent: each waits for its answer."""
        return super().copy(temp, size, streams=max(streams, STREAMS), throttle=throttle, cancelled=cancelled)

    def share(self) -> ObjectContent:
        return ObjectContent(self._blobs, self._key, self._size)

    def close(self) -> None:
        """Nothing is open."""
