"""What every benchmark shares: rows of results, alternating runs, the bare tmpfs to compare with, CPU accounting."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, madvise(2); Python has no name for it yet"""

Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One result. ``ratio`` is mount / bare, so 1.0 means the mount costs nothing; None where there is no bare.
    ``target`` is what the project wants: of the ratio where there is one, else of the value."""

    name: str
    unit: str
    mount: float
    bare: float | None
    against: str
    target: str = ""

    @property
    def ratio(self) -> float | None:
        return self.mount / self.bare if self.bare else None


def seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def warm_memory(size: int) -> None:
    """Have the hypervisor back ``size`` bytes of free memory, in huge pages, as the tmpfs takes them. A virtual machine
    gives free memory back after seconds (free page reporting), and what touches it first then runs at a thirtieth of
    the speed."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_POPULATE_WRITE)


def alternating(repeat: int, *sides: Work, warm: int = 0, before: Work = lambda: None) -> list[float]:
    """Median seconds of each side, run in turn ``repeat`` times after one run that warms up: a slow minute of the
    machine hits all of them. ``before`` each run that is called, and ``warm`` bytes of memory are warmed."""
    times: list[list[float]] = [[] for _ in sides]
    for number in range(repeat + 1):
        for taken, work in zip(times, sides, strict=True):
            before()
            if warm:
                warm_memory(warm)
            spent = seconds(work)
            if number:
                taken.append(spent)
    return [median(taken) for taken in times]


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def bare_tmpfs(where: Path, size: int) -> Iterator[Path]:
    """What the memory tier is, without tierfs in front."""
    where.mkdir()
    options = f"size={size},huge=within_size,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=False)
