"""Loaded by every Python process of a mount that a test made with `held_mounter` (test_recall): lets the test hold the
recalls of the daemon. While the file ``hold`` is in the directory TIERFS_TEST_SEAM, no chunk is read from the archive,
except those whose number ``allow-<number>`` names; each chunk that is read is appended to ``order``."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tierfs.migrator import gradual

seam = Path(os.environ["TIERFS_TEST_SEAM"])
read_chunk = gradual.read_chunk


def held(fd: int, offset: int, length: int) -> memoryview:
    number = offset // gradual.CHUNK
    while (seam / "hold").exists() and not (seam / f"allow-{number}").exists():
        time.sleep(0.005)
    with (seam / "order").open("a") as order:
        order.write(f"{number}\n")
    return read_chunk(fd, offset, length)


gradual.read_chunk = held
gradual.READ_SECONDS = float(os.environ.get("TIERFS_TEST_READ_SECONDS", gradual.READ_SECONDS))
