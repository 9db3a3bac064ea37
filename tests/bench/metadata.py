"""Small operations: creates, opens, cached stats; and all of it again with a large catalog."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.bench.measuring import Row, Work, alternating, bare_tmpfs, cpu_seconds, resident_bytes, seconds
from tests.bench.throughput import example_passthrough
from tierfs.catalog import Catalog
from tierfs.state import CATALOG
from tierfs.testing.mounting import TestMount, mounted
from tierfs.types import ROOT_INO, Ino, Replica, ReplicaState

FILES = 2000


def creates(top: Path, count: int = FILES) -> Work:
    def work() -> None:
        directory = tempfile.mkdtemp(dir=top)
        for number in range(count):
            os.close(os.open(f"{directory}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))

    return work


def stats(directory: Path, count: int = FILES) -> Work:
    names = [os.fspath(directory / str(number)) for number in range(count)]

    def work() -> None:
        for name in names:
            os.stat(name)

    return work


def switches(pid: int) -> int:
    """How often the process went to sleep and was woken: once at least per request it serves."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    return 0


def cached_stats(mount: TestMount) -> list[Row]:
    directory = mount.path / "stats"
    directory.mkdir()
    for number in range(FILES):
        (directory / str(number)).touch()
    work = stats(directory)
    work()
    pid = mount.daemon_pid()
    best = min(_daemon_wakeups(pid, work) for _ in range(5))
    return [
        Row("stat of a cached name", "1/s", FILES / median([seconds(work) for _ in range(5)]), None, ""),
        Row(f"daemon's wake-ups during {FILES} cached stats", "", best, None, "its own timers", "no request"),
    ]


def _daemon_wakeups(pid: int, work: Work) -> int:
    before = switches(pid)
    work()
    return switches(pid) - before


def metadata(mode: str, repeat: int, base: Path) -> list[Row]:
    target = ">= 1500 /s" if mode == "passthrough" else ">= 2500 /s"
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(bare_tmpfs(base / "bare", 512 << 20))
        sides = {"tmpfs huge=within_size": bare}
        (bare / "example").mkdir()
        example = stack.enter_context(example_passthrough(base, bare / "example"))
        if example is not None:
            sides["pyfuse3 passthroughfs"] = example
        mount = stack.enter_context(mounted(base, mode=mode, archive=base / "archive"))
        mount.cli("pause", mount.path)
        on_mount, *others = alternating(repeat, creates(mount.path), *map(creates, sides.values()))
        rows = [
            Row("create + close", "1/s", FILES / on_mount, FILES / taken, against, target)
            for against, taken in zip(sides, others, strict=True)
        ]
        status = mount.status()
        processes = [pid for key in ("keeper_pid", "daemon_pid") if isinstance(pid := status[key], int)]
        before = sum(map(cpu_seconds, processes))
        creates(mount.path)()
        spent = (sum(map(cpu_seconds, processes)) - before) / FILES * 1e6
        rows.append(Row("CPU of keeper and daemon per create + close", "us", spent, None, ""))
        rows += cached_stats(mount)
        clear(mount)
        return rows


def clear(mount: TestMount) -> None:
    """What was deleted before it was drained costs no drain."""
    for directory in mount.path.iterdir():
        shutil.rmtree(directory)
    mount.cli("resume", mount.path)


def populate(state: Path, files: int) -> None:
    """Into the catalog of a state directory enter ``files`` files that are durable on the archive, 10,000 to a
    directory; no bytes stand behind them."""
    catalog = Catalog(state / CATALOG)
    directory = 0
    for number in range(files):
        with catalog.transaction():
            if number % 10_000 == 0:
                directory = catalog.add_inode(0o40755, 0, 0, 1, nlink=2).ino
                catalog.add_entry(ROOT_INO, b"d%d" % number, directory)
                catalog.touch_directory(ROOT_INO, 1, 1)
                catalog.put_published(ROOT_INO, b"d%d" % number, directory, directory)
            ino = catalog.add_inode(0o100644, 0, 0, 1).ino
            name = b"checkpoint-%d.pt" % number
            catalog.add_entry(directory, name, ino)
            catalog.put_replica(Replica(Ino(ino), 1, "archive", ReplicaState.DURABLE, "", 1000, bytes(16)))
            catalog.put_published(directory, name, ino, ino)
    catalog.close()


def many_files(mode: str, files: int, repeat: int, base: Path) -> list[Row]:
    with mounted(base, mode=mode, archive=base / "archive") as mount:
        mount.cli("pause", mount.path)
        creates(mount.path)()
        empty = FILES / median([seconds(creates(mount.path)) for _ in range(repeat)])
        clear(mount)
        mount.umount(timeout=120)
        keep = mount.state.with_name("keep")
        shutil.copytree(mount.state, keep)
        populate(mount.state, files)
        taken = seconds(mount.mount)
        mount.cli("pause", mount.path)
        creates(mount.path)()
        full = FILES / median([seconds(creates(mount.path)) for _ in range(repeat)])
        started = time.perf_counter()
        status = mount.status()
        answered = time.perf_counter() - started
        pid = status["daemon_pid"]
        assert isinstance(pid, int)
        resident = resident_bytes(pid)
        pauses = [mount.strike() for _ in range(3)] if mode == "passthrough" else []
        mount.umount("--no-drain", timeout=120)
        # What the large catalog says is on the archive is not there: what fsck is to check is the small one.
        mount.state.rename(base / "large")
        keep.rename(mount.state)
    rows = [
        Row(f"mount with {files:,} files", "s", taken, None, "", "< 3"),
        Row(f"create + close with {files:,} files", "1/s", full, empty, "an empty catalog", ">= 0.8"),
        Row(f"daemon's memory with {files:,} files", "MB", resident / 1e6, None, "", "< 400"),
        Row(f"status with {files:,} files", "s", answered, None, "", ""),
    ]
    if pauses:
        rows.append(Row(f"an operation meets a dead daemon, {files:,} files", "s", max(pauses), None, "", "< 0.5"))
    return rows
