"""Power cuts while programs save, rename and delete: fifty of them, or, with ``-m nightly``, two hundred.

State, nvme and archive lie on one filesystem in an image, which lies on an xfs that can clone a file at an instant. A
cut is such a clone: what had reached the disk is in it, what was in the page cache is not, and the memory tier is
gone. It is mounted, recovered by a real mount, and compared with what tests/fault/history.py says may be there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fault import cut_mount
from tests.fault.history import Content, History, content_id, content_of
from tests.mount.conftest import make_base, need_mode
from tierfs.control.client import call, find_mount
from tierfs.testing.mounting import is_mounted, run_cli
from tierfs.tiers.copy import CHUNK
from tierfs.tiers.export import archive_at
from tierfs.tiers.walk import walk

CUTS, MANY_CUTS = 25, 100
"""For each kind of disk."""
FICLONE = 0x40049409
DISKS = {"ext4": 256 << 20, "xfs": 320 << 20}
DIRECTORIES = ("run", "run/checkpoint-1", "run/checkpoint-2", "logs")
NAMES = ("model.pt", "optim.pt", "latest", "state.json", "events")


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@contextlib.contextmanager
def image(path: Path, kind: str, where: Path, size: int | None = None) -> Iterator[None]:
    """The filesystem in the file ``path`` mounted at ``where``; made first when ``size`` is given."""
    where.mkdir(exist_ok=True)
    if size is not None:
        with path.open("wb") as file:
            file.truncate(size)
        run(f"mkfs.{kind}", "-q", *(["-f", "-m", "reflink=1"] if kind == "xfs" else ["-F"]), path)
    run("mount", "-o", "loop,nouuid" if kind == "xfs" else "loop", path, where)
    try:
        yield
    finally:
        run("umount", "-l", where)


def clone(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        fcntl.ioctl(new, FICLONE, old.fileno())


def policy_file(disk: Path, base: Path, name: str, mode: str, layout: str) -> Path:
    for directory in ("nvme", "archive"):
        (disk / directory).mkdir(exist_ok=True)
    path = base / f"{name}.yaml"
    policy = {
        "mode": mode,
        "state": str(disk / "state"),
        "tiers": {
            "memory": {"kind": "memory", "size": "64MiB"},
            "nvme": {"kind": "dir", "path": str(disk / "nvme")},
            "archive": {"kind": "dir", "path": str(disk / "archive"), "layout": layout},
        },
    }
    path.write_text(yaml.safe_dump(policy, sort_keys=False))
    return path


def read_tree(top: Path, lost: set[str] | None = None) -> dict[str, Content | None]:
    """Relative path → which event wrote it. Files of which no bytes are left give EIO: they are not there, but in
    ``lost``."""
    tree: dict[str, Content | None] = {}
    for directory, directories, files in os.walk(top):
        if Path(directory) == top and ".tierfs" in directories:
            directories.remove(".tierfs")
        for name in files:
            path = Path(directory, name)
            shown = str(path.relative_to(top))
            try:
                tree[shown] = content_id(path.read_bytes())
            except OSError as error:
                if lost is None or error.errno != errno.EIO:
                    raise
                lost.add(shown)
    return tree


def read_archive(top: Path) -> dict[str, Content | None]:
    """The same of an archive, read without a mount."""
    tree: dict[str, Content | None] = {}
    with archive_at(str(top)) as store:
        for standing in walk(store):
            if stat.S_ISREG(standing.status.st_mode):
                content = store.content(standing.path)
                size = content.size
                data = b"".join(bytes(content.read(at, min(CHUNK, size - at))) for at in range(0, size, CHUNK))
                assert content.written in (None, content.digest(size))
                tree[os.fsdecode(b"/".join(standing.path))] = content_id(data)
                content.close()
    return tree


def fsck(config: Path, lost: set[str]) -> list[dict[str, str]]:
    """What it finds, but for the names of the files that are ``lost``, the memory that is unmounted again, and copies
    that the mount had not recorded when it was killed."""
    problems: list[dict[str, str]] = json.loads(run_cli("fsck", "--json", config).out)
    return [
        problem
        for problem in problems
        if problem["path"].split(" (inode")[0] not in lost and problem["severity"] not in ("memory", "orphan")
    ]


class Workload(threading.Thread):
    """What training does to its files, at random, until told to stop."""

    def __init__(self, top: Path, seed: int) -> None:
        super().__init__(name="workload")
        self.top = top
        self.choose = random.Random(seed)
        self.history = History()
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        for directory in DIRECTORIES:
            (top / directory).mkdir()

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.step()
        except BaseException as error:
            self.failure = error

    def path(self) -> str:
        return f"{self.choose.choice(DIRECTORIES)}/{self.choose.choice(NAMES)}"

    def step(self) -> None:
        kind = self.choose.choices(
            ("save", "rewrite", "rename", "unlink", "directory", "flush"), weights=(8, 2, 4, 3, 1, 2)
        )[0]
        files = self.history.files()
        if kind == "save" or not files:
            self.save(self.path(), "wb")
            return
        path = self.choose.choice(sorted(files))
        if kind == "rewrite":
            self.save(path, "r+b")
        elif kind == "rename" and (path2 := self.path()) != path:
            with self.lock:
                self.history.rename(path, path2)
            os.replace(self.top / path, self.top / path2)
        elif kind == "unlink":
            with self.lock:
                self.history.unlink(path)
            (self.top / path).unlink()
        elif kind == "directory":
            with self.lock:
                self.history.rename_directory("run/checkpoint-1", "run/tmp")
            (self.top / "run/checkpoint-1").rename(self.top / "run/tmp")
            with self.lock:
                self.history.rename_directory("run/tmp", "run/checkpoint-1")
            (self.top / "run/tmp").rename(self.top / "run/checkpoint-1")
        elif kind == "flush":
            whole = self.choose.random() < 0.5
            if whole:  # returns once the archive shows everything up to now
                call(find_mount(self.top)[0], "flush", {"path": path}, timeout=60)
            else:  # returns once the file's bytes are durable; its name may be undone
                os.setxattr(self.top / path, "user.tierfs.flush", b"1")
            with self.lock:
                (self.history.flushed if whole else self.history.file_flushed)(path)

    def save(self, path: str, mode: str) -> None:
        with self.lock:
            event = self.history.save(path)
        with (self.top / path).open(mode, buffering=0) as file:
            data = memoryview(content_of(event))
            for start in range(0, len(data), 1 << 20):
                file.write(data[start : start + (1 << 20)])
            file.truncate()


@contextlib.contextmanager
def recovered(disk: Path, base: Path, layout: str) -> Iterator[Path]:
    """The tree of a disk after the cut, mounted anew; ended without ceremony, since the disk is thrown away."""
    config = policy_file(disk, base, "cut", "userspace", layout)
    mountpoint = base / "cut-mnt"
    mountpoint.mkdir(exist_ok=True)
    process, answer = cut_mount.start(config, mountpoint, base / "cut.log")
    try:
        assert answer == "ok\n", f"{answer!r}\n{(base / 'cut.log').read_text()[-3000:]}"
        yield mountpoint
    finally:
        process.kill()
        process.join()
        for path in (mountpoint, disk / "state" / "memory" / "memory"):
            if is_mounted(path):
                run("umount", "-l", path)


def collect(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tierfs", "gc", str(config)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", DISKS)
def test_every_cut_leaves_what_may_be_left(kind: str) -> None:
    cut_power(kind, CUTS, seed=20261130)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_cut_leaves_what_may_be_left_of_an_archive_of_chunks() -> None:
    """Also while its garbage is collected."""
    cut_power("ext4", CUTS, seed=20261130, layout="chunks")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", DISKS)
def test_two_hundred_cuts_leave_what_may_be_left(kind: str) -> None:
    cut_power(kind, MANY_CUTS, seed=int.from_bytes(os.urandom(4), "little"))


def cut_power(kind: str, cuts: int, seed: int, layout: str = "tree") -> None:
    need_mode("passthrough")
    if not (shutil.which("mkfs.xfs") and shutil.which(f"mkfs.{kind}")):
        pytest.skip("needs xfsprogs and e2fsprogs")
    print(f"seed {seed}")  # the workload's; what the disk has at a cut is up to the machine
    choose = random.Random(seed)
    base = make_base("tierfs-cut-")
    mnt, disk, copy = base / "mnt", base / "disk", base / "copy"
    mnt.mkdir()
    try:
        with (
            image(base / "ground.img", "xfs", base / "ground", 3 << 30),
            image(base / "ground" / "disk.img", kind, disk, DISKS[kind]),
        ):
            config = policy_file(disk, base, "live", "passthrough", layout)
            assert run_cli("mount", config, mnt).code == 0
            workload = Workload(mnt, seed)
            workload.start()
            try:
                for number in range(cuts):
                    collecting = collect(config) if layout == "chunks" and number % 2 else None
                    time.sleep(choose.uniform(0.0, 0.15))
                    with workload.lock:
                        promised = workload.history.copy()
                    clone(base / "ground" / "disk.img", base / "ground" / "cut.img")
                    with workload.lock:
                        history = workload.history.copy()
                    history.keep_promises(promised)
                    assert collecting is None or collecting.wait(60) == 0
                    with image(base / "ground" / "cut.img", kind, copy):
                        faults = history.faults(read_archive(copy / "archive"), archive=True)
                        assert not faults, f"cut {number}, archive: {faults}"
                        with recovered(copy, base, layout) as tree:
                            lost: set[str] = set()
                            faults = history.faults(read_tree(tree, lost))
                            assert not faults, f"cut {number}: {faults}\n{(base / 'cut.log').read_text()[-2000:]}"
                        if number % 10 == 0:
                            problems = fsck(base / "cut.yaml", lost)
                            assert not problems, f"cut {number}: {problems}"
                    assert workload.failure is None, workload.failure
            finally:
                workload.ended.set()
                workload.join(60)
                umount = run_cli("umount", mnt)
            assert umount.code == 0, umount.err
            assert history.events > cuts, "nothing happened between the cuts"
            assert run_cli("fsck", config).code == 0
    finally:
        for path in (mnt, disk / "state" / "memory" / "memory"):
            if is_mounted(path):
                subprocess.run(["umount", "-l", path], check=False)
        shutil.rmtree(base, ignore_errors=True)
