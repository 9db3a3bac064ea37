"""TensorBoard's writer and its reader: tensorboard_job.py write|read DIR.

Both are told on stdin, one number a line, and answer with a number on stdout when it is done: the writer how many steps
to add and flush (it answers with all steps so far), the reader up to how many steps to follow the growing file, as the
TensorBoard server does. So neither depends on how fast the machine is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.io_wrapper import IsSummaryEventsFile

FLUSH_EVERY = 20
STEP_SECONDS = 0.002
STALL_SECONDS = 60
"""Without a new step while some are awaited: they do not come any more."""


def write(top: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and the reader does without

    step = 0
    with SummaryWriter(str(top), flush_secs=1) as writer:
        for line in sys.stdin:
            for _ in range(int(line)):
                writer.add_scalar("loss", 1 / (step + 1), step)
                if step % 100 == 0:
                    writer.add_text("note", "x" * 10_000, step)
                if step % FLUSH_EVERY == 0:
                    writer.flush()
                step += 1
                time.sleep(STEP_SECONDS)
            writer.flush()
            print(step, flush=True)


def read(top: Path) -> None:
    watcher = DirectoryWatcher(str(top), EventFileLoader, IsSummaryEventsFile)
    seen = 0
    for line in sys.stdin:
        wanted, deadline = int(line), time.monotonic() + STALL_SECONDS
        while seen < wanted:
            assert time.monotonic() < deadline, f"saw {seen} of {wanted} steps"
            for event in watcher.Load():
                for value in event.summary.value:
                    if value.tag == "loss":
                        assert event.step == seen, (event.step, seen)
                        assert abs(value.tensor.float_val[0] - 1 / (seen + 1)) < 1e-6
                        seen += 1
                        deadline = time.monotonic() + STALL_SECONDS
            time.sleep(0.05)
        print(seen, flush=True)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
