"""Backing files of kernel passthrough: registered on the FUSE connection by ioctl, named by a small id."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

BACKING_OPEN = 0x4010E501
"""FUSE_DEV_IOC_BACKING_OPEN, argument struct fuse_backing_map {i32 fd, u32 flags, u64 padding}"""
BACKING_CLOSE = 0x4004E502
"""FUSE_DEV_IOC_BACKING_CLOSE, argument u32 id"""

_MAP = struct.Struct("<iIQ")
_ID = struct.Struct("<I")

RECLAIM_WINDOW = 256
"""How far below the id answered last an unanswered one may lie: as many opens may wait for each other."""


class BackingIds:
    """Raises OSError: EPERM without CAP_SYS_ADMIN, EINVAL for a descriptor that cannot back a file."""

    def __init__(self, device_fd: int) -> None:
        self._device_fd = device_fd

    def open(self, fd: int) -> int:
        """Register ``fd``'s file; the id is valid until `close`, whatever becomes of the descriptor."""
        return int(fcntl.ioctl(self._device_fd, BACKING_OPEN, bytearray(_MAP.pack(fd, 0, 0))))

    def close(self, backing_id: int) -> None:
        """Closing an id twice is not an error: a resent release may come after the first one's effect."""
        try:
            fcntl.ioctl(self._device_fd, BACKING_CLOSE, _ID.pack(backing_id))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def reclaim(self, known: set[int], last: int) -> None:
        """Free ids that a dead daemon registered but whose reply never reached the kernel.

        Call before registering any other id. The kernel hands ids out cyclically upwards, so those lie between
        ``last`` (the one answered last, less slack for replies out of order) and a fresh probe.
        """
        probe_file = os.memfd_create("tierfs-probe", os.MFD_CLOEXEC)
        try:
            probe = self.open(probe_file)
        finally:
            os.close(probe_file)
        self.close(probe)
        for backing_id in range(max(1, last - RECLAIM_WINDOW), probe):
            if backing_id not in known:
                self.close(backing_id)
