"""Loaded by every Python process of a mount made by a test that has the fixture ``seam`` (test_recall): lets the test
hold the recalls of the daemon; the commands beside it need not load what a daemon does. While the file ``hold`` is in
the directory TIERFS_TEST_SEAM, no chunk is read from the archive, except those whose number ``allow-<number>`` names;
each chunk that is read is appended to ``order``. Recalls of whole files are held, too: copies from below
TIERFS_TEST_FROM."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def install() -> None:
    from tierfs.migrator import gradual
    from tierfs.tiers import content

    seam = Path(os.environ["TIERFS_TEST_SEAM"])
    copy = gradual.Recall._copy
    copy_file = content.copy_file

    def held(recall: gradual.Recall, number: int) -> bool:
        while (seam / "hold").exists() and not (seam / f"allow-{number}").exists():
            time.sleep(0.005)
        with (seam / "order").open("a") as order:
            order.write(f"{number}\n")
        return copy(recall, number)

    def held_small(fd: int, *args: object, **kwargs: object) -> bytes:
        start = os.environ["TIERFS_TEST_FROM"]
        while (seam / "hold").exists() and os.readlink(f"/proc/self/fd/{fd}").startswith(start):
            time.sleep(0.005)
        return copy_file(fd, *args, **kwargs)

    gradual.Recall._copy = held
    content.copy_file = held_small


if "mount" in sys.orig_argv:
    install()
