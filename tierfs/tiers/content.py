"""The bytes of a replica, for whoever reads them: of one file (`FileContent`), or of an archive's chunks
(`tierfs.tiers.chunked`). Nothing here checks what comes against the replica's digest: readers do.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable

from tierfs.durable import TemporaryFile
from tierfs.errors import SourceChanged
from tierfs.tiers.copy import (
    CHUNK,
    PREALLOCATE_ABOVE,
    SMALL,
    Destination,
    Throttle,
    chunk_digest,
    copy_file,
    digest_file,
    each_chunk,
    read_chunk,
    tree_digest,
    zero_digest,
)


class Content(ABC):
    """Open for reading, by several threads, until it is closed. Methods raise OSError, TierError, SourceChanged."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes."""

    @abstractmethod
    def read(self, offset: int, length: int) -> memoryview:
        """``length`` <= CHUNK bytes, good until this thread's next read. SourceChanged when there are fewer."""

    @abstractmethod
    def share(self) -> Content:
        """The same once more, to be closed by itself."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def dense(self) -> bool:
        """Whether hardly any of it is zero, as far as that is known without reading it."""
        return True

    @property
    def written(self) -> bytes | None:
        """Tree digest of what was written, where that is known here."""
        return None

    def forget(self) -> None:  # noqa: B027
        """Let the next reads be of what the storage has, not of what memory still knows of it."""

    def digest(
        self,
        size: int,
        *,
        streams: int = 2,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes:
        """Tree digest of the first ``size`` bytes."""
        digests = [b""] * -(-size // CHUNK)

        def work(offset: int, length: int) -> None:
            digests[offset // CHUNK] = chunk_digest(self.read(offset, length))

        each_chunk(range(0, size, CHUNK), size, work, streams, throttle, cancelled)
        return tree_digest(digests)

    def copy(
        self,
        temp: TemporaryFile,
        size: int,
        *,
        streams: int = 3,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes:
        """Copy the first ``size`` bytes into the empty ``temp``, which is not synced: their tree digest. What is zero
        is left a hole."""
        digests = [b""] * -(-size // CHUNK)
        with Destination(temp.fd) as target:
            if size > PREALLOCATE_ABOVE and self.dense:
                target.preallocate(size)
            if size > SMALL:
                target.prefer_direct()

            def work(offset: int, length: int) -> None:
                data = self.read(offset, length)
                digest = digests[offset // CHUNK] = chunk_digest(data)
                if digest != zero_digest(length):
                    target.write(data, offset)

            each_chunk(range(0, size, CHUNK), size, work, streams, throttle, cancelled)
            target.truncate(size)
        return tree_digest(digests)


class FileContent(Content):
    """All of a file."""

    def __init__(self, fd: int) -> None:
        """``fd`` is taken over."""
        self.fd = fd

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, offset: int, length: int) -> memoryview:
        return read_chunk(self.fd, offset, length)

    def share(self) -> FileContent:
        return FileContent(os.dup(self.fd))

    def close(self) -> None:
        os.close(self.fd)

    @property
    def dense(self) -> bool:
        """Whether hardly any of it is zero, as far as that is known without reading it."""
        return True

    @property
    def written(self) -> bytes | None:
        """Tree digest of what was written, where that is known here."""
        return None

    def forget(self) -> None:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def digest(
        self,
        size: int,
        *,
        streams: int = 2,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes:
        return digest_file(self.fd, size, streams=streams, throttle=throttle, cancelled=cancelled)

    def copy(
        self,
        temp: TemporaryFile,
        size: int,
        *,
        streams: int = 3,
        throttle: Throttle | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes:
        return copy_file(self.fd, temp, size, streams=streams, throttle=throttle, cancelled=cancelled, stable=False)


def opened(opener: Callable[[], int]) -> Callable[[], Content]:
    """What opens a file, as what opens its content."""
    return lambda: FileContent(opener())


def too_short(wanted: int) -> SourceChanged:
    return SourceChanged(f"the file ends before byte {wanted}")
