"""TensorBoard's writer and its reader: tensorboard_job.py write|read DIR STEPS.

The reader follows the growing file, as the TensorBoard server does, until it has seen every step, in order.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.io_wrapper import IsSummaryEventsFile

FLUSH_EVERY = 20
STEP_SECONDS = 0.004
READ_SECONDS = 90


def write(top: Path, steps: int) -> None:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and the reader does without

    with SummaryWriter(str(top), flush_secs=1) as writer:
        for step in range(steps):
            writer.add_scalar("loss", 1 / (step + 1), step)
            if step % 100 == 0:
                writer.add_text("note", "x" * 10_000, step)
            if step % FLUSH_EVERY == 0:
                writer.flush()
            time.sleep(STEP_SECONDS)


def read(top: Path, steps: int) -> None:
    watcher = DirectoryWatcher(str(top), EventFileLoader, IsSummaryEventsFile)
    expected, deadline = 0, time.monotonic() + READ_SECONDS
    while expected < steps:
        assert time.monotonic() < deadline, f"saw {expected} of {steps} steps"
        for event in watcher.Load():
            for value in event.summary.value:
                if value.tag == "loss":
                    assert event.step == expected, (event.step, expected)
                    assert abs(value.tensor.float_val[0] - 1 / (expected + 1)) < 1e-6
                    expected += 1
        time.sleep(0.05)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
