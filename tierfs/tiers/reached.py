"""How far the archive has come, so that an older copy of it is not taken for it.

A copy of an archive, such as a backup, has the same marker: by that it is the archive. What it lacks is the end of the
log of batches (`tierfs.tiers.copies`), into which everything goes, synced, before it is done on the archive. The
catalog notes the *position* of the last batch that is done: number of the log and bytes in it. An archive whose log is
not so far is an older copy. The note comes after the log, so a crash between the two leaves an archive that is further
than noted, never one that is refused.

Numbers of logs and of copies of the catalog only grow, and a log goes only once a copy with a higher number is there: a
name with a higher number says as much as the log itself.
"""

from __future__ import annotations

import os
import re

from tierfs.tiers.base import DIRECTORY

Position = tuple[int, int]
"""(number of a log, bytes in it); (0, 0): nothing was logged."""

DIRECTORY_NAME = b"catalog"
"""In the archive's private directory: logs, and copies of the catalog."""
_NAME = re.compile(r"(?:copy|log)-(\d{1,18})(?:\.json)?")
_FOREIGN = 10**12
"""Numbers grow one by one: none that tierfs gives comes near this."""


def number_of(name: str) -> int | None:
    """The number of a log, or of a copy of the catalog; None for any other name, as for one that somebody made up."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and int(match[1]) < _FOREIGN else None


def position(own: int) -> Position:
    """Of the archive with this private directory. Raises OSError."""
    try:
        fd = os.open(DIRECTORY_NAME, DIRECTORY | os.O_NOFOLLOW, dir_fd=own)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0
    try:
        number = max((n for name in os.listdir(fd) if (n := number_of(name)) is not None), default=0)
        try:
            return number, os.stat(f"log-{number}", dir_fd=fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return number, 0
    finally:
        os.close(fd)
