"""The drain: its speed and CPU time, and what a save and a small file feel of it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from statistics import median

import torch

from tests.bench.measuring import Row, cpu_seconds, percentile, seconds, warm_memory
from tests.bench.throughput import BLOCK, random_state
from tierfs.control.client import call, find_mount
from tierfs.testing.mounting import TestMount, mounted


def fio_write_rate(top: Path, size: int) -> float:
    """Bytes per second that the disk takes from ``fio --rw=write --bs=4M --direct=1``, four writes in flight."""
    command = ["fio", "--name=drain", f"--directory={top}", f"--size={size}", "--rw=write", "--bs=4M", "--direct=1"]
    command += ["--ioengine=libaio", "--iodepth=4", "--end_fsync=1", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    (top / "drain.0.0").unlink(missing_ok=True)
    return float(json.loads(done.stdout)["jobs"][0]["write"]["bw_bytes"])


def fill(path: Path, size: int) -> None:
    """As torch.save does with large tensors: in pieces for which the tmpfs takes huge pages, which cost a copy less."""
    data = os.urandom(BLOCK)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // BLOCK):
            file.write(data)


def drain_speed(mount: TestMount, disk: Path, size: int, repeat: int) -> list[Row]:
    speeds, bare, cpu = [], [], []
    daemon = mount.daemon_pid()
    for number in range(repeat):
        bare.append(fio_write_rate(disk, size))
        mount.cli("pause", mount.path)
        path = mount.path / f"drain-{number}"
        fill(path, size)
        before = cpu_seconds(daemon)
        record, _ = find_mount(mount.path)
        started = time.perf_counter()
        call(record, "resume", timeout=10)
        os.setxattr(path, "user.tierfs.flush", b"1")  # returns once it is on the archive
        speeds.append(size / (time.perf_counter() - started))
        cpu.append((cpu_seconds(daemon) - before) / (size / 1e9))
        path.unlink()
    return [
        Row("drain, memory to archive", "GB/s", median(speeds) / 1e9, median(bare) / 1e9, "fio 4M direct", ">= 0.85"),
        Row("daemon's CPU per drained GB", "s", median(cpu), None, "", "<= 0.15"),
    ]


def settle(mount: TestMount) -> None:
    """Until what was removed is gone from the archive's disk, too: one mounted with ``discard`` trims it then, which
    takes the processors of a virtual machine for a second."""
    mount.flush(mount.path, timeout=300)
    os.sync()


def under_drain(mount: TestMount, size: int, repeat: int) -> list[Row]:
    """A save of ``size`` bytes, and opens, while four times as much is drained at full speed. Virtual machines need the
    fastest run beside the median: there the same save takes once or twice its time, idle or not, by what pages the
    hypervisor has given."""
    state = random_state(size)
    saved = mount.path / "save.pt"
    idle, busy, opens = [], [], []
    (mount.path / "small").write_bytes(b"x")
    settle(mount)
    for number in range(repeat):
        mount.cli("pause", mount.path)
        warm_memory(2 * size)
        idle.append(seconds(lambda: torch.save(state, saved)))
        backlog = [mount.path / f"backlog-{number}-{part}" for part in range(4)]
        for path in backlog:
            fill(path, size)
        warm_memory(2 * size)
        call(find_mount(mount.path)[0], "resume", timeout=10)
        done = threading.Event()
        watcher = threading.Thread(target=_open_and_close, args=(mount.path / "small", opens, done))
        busy.append(seconds(lambda: torch.save(state, saved)))
        watcher.start()
        mount.flush(mount.path, timeout=300)
        done.set()
        watcher.join()
        for path in backlog:
            path.unlink()
        settle(mount)
    return [
        Row(
            "torch.save while 4x as much drains",
            "GB/s",
            size / 1e9 / median(busy),
            size / 1e9 / median(idle),
            "idle",
            ">= 0.8",
        ),
        Row("the same, fastest of each", "GB/s", size / 1e9 / min(busy), size / 1e9 / min(idle), "idle", ">= 0.8"),
        Row("open + close under drain, p99", "ms", percentile(opens, 99) * 1e3, None, f"{len(opens)} opens", "< 20"),
        Row("open + close under drain, median", "ms", median(opens) * 1e3, None, "", ""),
    ]


def _open_and_close(path: Path, taken: list[float], done: threading.Event) -> None:
    while not done.wait(0.002):
        taken.append(seconds(lambda: os.close(os.open(path, os.O_RDONLY))))


def draining(mode: str, size: int, repeat: int, base: Path) -> list[Row]:
    disk = base / "disk"
    disk.mkdir()
    memory = f"{(size * 10 >> 20) + 512}MiB"
    with mounted(base, mode=mode, archive=base / "archive", memory=memory) as mount:
        rows = drain_speed(mount, disk, 4 * size, repeat)
        return rows + under_drain(mount, size, repeat)
