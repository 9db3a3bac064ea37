"""One error tree. Each class carries the errno an application sees, the CLI's exit code and
whether trying again later can help. Raised where found, logged once at the edge."""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Mapping


class TierfsError(Exception):
    """Base of every error tierfs raises on purpose. ``str(error)`` is the message for a person."""

    errno: int = _errno.EIO
    exit_code: int = 1
    temporary: bool = False
    details: Mapping[str, object] | None = None
    """More than a message can say, for programs."""


class ConfigError(TierfsError):
    """The policy file or command line is wrong; nothing was mounted."""

    errno = _errno.EINVAL
    exit_code = 2


class UsageError(TierfsError):
    """A command was called with arguments that do not fit (no such mount, path not on a mount)."""

    errno = _errno.EINVAL
    exit_code = 2


class NotDurableInTime(TierfsError):
    """A flush did not finish before its timeout; the message lists what is missing."""

    errno = _errno.ETIMEDOUT
    exit_code = 3
    temporary = True


class MountError(TierfsError):
    """The mount could not be made or did not answer."""


class CatalogError(TierfsError):
    """The catalog is damaged or from another format version."""


class CatalogDamaged(CatalogError):
    """The catalog, or what belongs to it, is lost or not what was written: `tierfs fsck --rebuild` makes another."""


class TierError(TierfsError):
    """A tier's storage failed. ``temporary`` says whether the migrator tries again."""

    def __init__(self, message: str, *, errno: int = _errno.EIO, temporary: bool = True) -> None:
        super().__init__(message)
        self.errno = errno
        self.temporary = temporary

    @classmethod
    def of(cls, tier: str, action: str, cause: OSError) -> TierError:
        """Wrap an ``OSError`` met on ``tier`` while doing ``action``."""
        code = cause.errno or _errno.EIO
        return cls(f"tier {tier}: {action}: {os.strerror(code)}", errno=code)


class NoAnswer(TierError):
    """A call into a tier did not come back in time. Its thread is still in there, and so is what it works on."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno=_errno.ETIMEDOUT)


class ContentMissing(TierError):
    """A file that was copied to the archive is neither where it waited nor where it belongs: someone removed it."""


class PartsLost(ContentMissing):
    """The same of what was sent in parts, which end with their process, or were sent to another name: no fault."""


class NoSuchBlob(TierError):
    """The store of blobs answered, and has nothing by that key."""

    def __init__(self, tier: str, key: str) -> None:
        super().__init__(f"tier {tier}: there is no {key}", errno=_errno.ENOENT, temporary=False)


class DigestMismatch(TierError):
    """Bytes read from a replica are not the bytes that were written to it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno=_errno.EIO, temporary=False)


class ManifestDamaged(TierError):
    """A manifest in an archive is not what was written, says what cannot be, or is of a format that is not known."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno=_errno.EIO, temporary=False)


class SourceChanged(TierError):
    """The file was opened for writing while it was being copied; the copy is void."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno=_errno.EAGAIN, temporary=True)


class ChunkDamaged(TierError):
    """What an archive holds of a chunk is not what a codec writes: damaged, or stored by something else."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno=_errno.EIO, temporary=False)


class FsError(TierfsError):
    """A filesystem operation is refused with a POSIX errno; expected, never logged."""

    def __init__(self, errno: int, detail: str = "") -> None:
        super().__init__(detail or os.strerror(errno))
        self.errno = errno
