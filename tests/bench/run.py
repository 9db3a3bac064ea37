"""`make bench`: what the mount costs, as ratios to the bare thing measured in the same run.

    python -m tests.bench.run [--mode passthrough|userspace] [--gib 1] [--repeat 3] [--json FILE]

Every pair is measured alternately and the medians compared, so that a slow minute of the machine hits both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from tierfs.testing.mounting import TestMount, mounted

BLOCK = 8 << 20
FILES = 2000
DISKS = os.environ.get("TIERFS_BENCH_DIR", "/var/tmp")


@dataclass(frozen=True)
class Row:
    """One comparison. ``ratio`` is mount / bare, so 1.0 means the mount costs nothing; None where there is no bare."""

    name: str
    unit: str
    mount: float
    bare: float | None
    against: str

    @property
    def ratio(self) -> float | None:
        return self.mount / self.bare if self.bare else None


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def rates(repeat: int, amount: float, mount: Callable[[], None], bare: Callable[[], None]) -> tuple[float, float]:
    """``amount`` per second on either side: medians of alternating runs after one that warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeat + 1):
        for side, work in enumerate((mount, bare)):
            taken = seconds(work)
            if number:
                times[side].append(taken)
    return amount / median(times[0]), amount / median(times[1])


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


def torch_save(state: dict[str, torch.Tensor], top: Path) -> Callable[[], None]:
    return lambda: torch.save(state, top / "save.pt")


def writes(top: Path, size: int, data: mmap.mmap) -> Callable[[], None]:
    def work() -> None:
        fd = os.open(top / "blocks", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for _ in range(size // BLOCK):
            os.write(fd, data)
        os.close(fd)

    return work


def reads(top: Path, size: int, data: mmap.mmap) -> Callable[[], None]:
    def work() -> None:
        fd = os.open(top / "blocks", os.O_RDONLY)
        for _ in range(size // BLOCK):
            os.readv(fd, [data])
        os.close(fd)

    return work


def creates(top: Path) -> Callable[[], None]:
    def work() -> None:
        directory = tempfile.mkdtemp(dir=top)
        for number in range(FILES):
            os.close(os.open(f"{directory}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))

    return work


def fio_write_rate(top: Path, size: int) -> float:
    """Bytes per second that the disk takes, as the drain writes: direct, 4 MiB, four at a time."""
    command = ["fio", "--name=drain", f"--directory={top}", f"--size={size}", "--rw=write", "--bs=4m", "--direct=1"]
    command += ["--ioengine=libaio", "--iodepth=4", "--end_fsync=1", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    (top / "drain.0.0").unlink(missing_ok=True)
    return float(json.loads(done.stdout)["jobs"][0]["write"]["bw_bytes"])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drains(mount: TestMount, disk: Path, size: int, repeat: int) -> tuple[Row, Row]:
    data = os.urandom(1 << 20)
    speeds, bare, cpu = [], [], []
    daemon = mount.daemon_pid()
    for number in range(repeat):
        bare.append(fio_write_rate(disk, size))
        mount.cli("pause", mount.path)
        path = mount.path / f"drain-{number}"
        with path.open("wb", buffering=0) as file:
            for _ in range(size >> 20):
                file.write(data)
        before = cpu_seconds(daemon)
        started = time.perf_counter()
        mount.cli("resume", mount.path)
        mount.flush(mount.path, timeout=300)
        speeds.append(size / (time.perf_counter() - started))
        cpu.append((cpu_seconds(daemon) - before) / (size / 1e9))
        path.unlink()
    return (
        Row("drain, memory to archive", "GB/s", median(speeds) / 1e9, median(bare) / 1e9, "fio direct 4 MiB"),
        Row("daemon's CPU per drained GB", "s", median(cpu), None, ""),
    )


def measure(mode: str, size: int, repeat: int, base: Path) -> list[Row]:
    state = {f"layer{n}": torch.randn(size // 16 // 4) for n in range(16)}
    data = mmap.mmap(-1, BLOCK)
    data.write(os.urandom(BLOCK))
    disk = base / "disk"
    disk.mkdir()
    # the memory tier must hold several dirty generations of one file, or the drain is what is measured
    memory = f"{(size * 6 >> 20) + 512}MiB"
    rows = []
    with (
        bare_tmpfs(base / "bare", 3 * size + (512 << 20)) as bare,
        mounted(base, mode=mode, archive=base / "archive", memory=memory) as mount,
    ):
        mount.cli("pause", mount.path)
        comparisons: list[tuple[str, str, float, Callable[[], None], Callable[[], None]]] = [
            ("torch.save", "GB/s", size / 1e9, torch_save(state, mount.path), torch_save(state, bare)),
            ("8 MiB writes", "GB/s", size / 1e9, writes(mount.path, size, data), writes(bare, size, data)),
            ("8 MiB reads", "GB/s", size / 1e9, reads(mount.path, size, data), reads(bare, size, data)),
            ("create + close", "1/s", FILES, creates(mount.path), creates(bare)),
        ]
        for name, unit, amount, on_mount, on_bare in comparisons:
            fast, plain = rates(repeat, amount, on_mount, on_bare)
            rows.append(Row(name, unit, fast, plain, "tmpfs huge=within_size"))
        for path in mount.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        mount.cli("resume", mount.path)
        mount.flush(timeout=300)
        rows += drains(mount, disk, size, repeat)
    return rows


def show(rows: list[Row], mode: str, size: int) -> None:
    table = Table(title=f"mode {mode}, {size / (1 << 30):g} GiB")
    for heading in ("what", "mount", "bare", "unit", "ratio", "against"):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "against") else "right")
    for row in rows:
        bare = f"{row.bare:.4g}" if row.bare else ""
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        table.add_row(row.name, f"{row.mount:.4g}", bare, row.unit, ratio, row.against)
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="What the mount costs, as ratios.")
    parser.add_argument("--mode", choices=("passthrough", "userspace"), action="append", help="default: both")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the large files (default 1)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here as well; - is standard output")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("bench: needs root, for the tmpfs that it compares with", file=sys.stderr)
        return 2
    size = int(options.gib * (1 << 30)) // BLOCK * BLOCK
    results = {}
    for mode in options.mode or ("passthrough", "userspace"):
        base = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir=DISKS))
        try:
            rows = measure(mode, size, options.repeat, base)
        finally:
            shutil.rmtree(base, ignore_errors=True)
        if options.json != Path("-"):
            show(rows, mode, size)
        results[mode] = [{**asdict(row), "ratio": row.ratio} for row in rows]
    if options.json:
        text = json.dumps({"bytes": size, "modes": results}, indent=2)
        print(text) if options.json == Path("-") else options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
