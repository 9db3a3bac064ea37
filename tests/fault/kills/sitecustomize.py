"""Loaded by every Python process of the mounts of test_kill_points: makes it die at a point. In the directory
TIERFS_TEST_POINTS a file named like a point says who dies there (``daemon``, or ``both``: its keeper, too) and at which
time that it is passed; before the process dies the file gets another name, ``reached-`` and the point's."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

if {"mount", "fsck", "gc"} & set(sys.orig_argv):
    from tierfs import points

    ARMED = Path(os.environ["TIERFS_TEST_POINTS"])
    _lock = threading.Lock()

    def strike(point: points.Point) -> None:
        file = ARMED / point.name
        if not file.exists():
            return
        with _lock:
            who, left = file.read_text().split()
            if int(left) > 1:
                file.write_text(f"{who} {int(left) - 1}")
                return
            file.rename(ARMED / f"reached-{point.name}")
            if who == "both":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # the signal is on its way; nothing more may happen

    points.struck = strike
