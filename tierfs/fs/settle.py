"""Versions that a former daemon left open."""

from __future__ import annotations

import os

from tierfs.fs.open_files import OpenFiles
from tierfs.points import At, reach


def settle(files: OpenFiles) -> None:
    """After `OpenFiles.adopt`: close every version that was open for writing and no longer is."""
    reach(At.RESTART_ADOPTED)
    for replica in files.catalog.open_replicas():
        inode = files.inodes.get(replica.ino)
        if inode is not None and inode.writers:
            continue
        attributes = files.catalog.attributes(replica.ino)
        if attributes is None:
            with files.catalog.transaction():
                files.remove_content(replica.ino)
            continue
        _, rule = files.rule_of(files.catalog.path_of(replica.ino))
        fd = files.local.open_now(replica)
        try:
            closed = files.close_version(replica, os.fstat(fd), rule)
        finally:
            os.close(fd)
        if inode is not None:
            inode.replica = closed
    reach(At.RESTART_SETTLED)
