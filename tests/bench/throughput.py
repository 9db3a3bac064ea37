"""Large writes and reads through the mount, against the tmpfs alone and against pyfuse3's own example on it."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from tests.bench.measuring import Row, Work, alternating, bare_tmpfs
from tierfs.testing.mounting import is_mounted, mounted

BLOCK = 8 << 20
SAVED = "save.pt"


def torch_save(state: dict[str, torch.Tensor], top: Path) -> Work:
    return lambda: torch.save(state, top / SAVED)


def writes(top: Path, size: int, data: mmap.mmap) -> Work:
    def work() -> None:
        fd = os.open(top / SAVED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for _ in range(size // BLOCK):
            os.write(fd, data)
        os.close(fd)

    return work


def reads(top: Path, size: int, data: mmap.mmap) -> Work:
    def work() -> None:
        fd = os.open(top / SAVED, os.O_RDONLY)
        for _ in range(size // BLOCK):
            os.readv(fd, [data])
        os.close(fd)

    return work


def used_bytes(top: Path) -> int:
    status = os.statvfs(top)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def random_state(size: int) -> dict[str, torch.Tensor]:
    """Tensors of ``size`` bytes in all."""
    return {f"layer{number}": torch.randn(size // 16 // 4) for number in range(16)}


@contextlib.contextmanager
def example_passthrough(base: Path, root: Path) -> Iterator[Path | None]:
    """pyfuse3's own passthroughfs over ``root``, from its source package; None when that cannot be had."""
    where, package = base / "example", f"pyfuse3=={version('pyfuse3')}"
    where.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(base),
        package,
    ]
    fetched = subprocess.run(command, capture_output=True, text=True)
    archives = list(base.glob("pyfuse3-*.tar.gz"))
    if not archives:
        print(f"bench: no {package} source to compare with: {fetched.stderr.strip()[-200:]}", file=sys.stderr)
        yield None
        return
    with tarfile.open(archives[0]) as archive:
        member = next(name for name in archive.getnames() if name.endswith("/examples/passthroughfs.py"))
        source = archive.extractfile(member)
        assert source is not None
        program = base / "passthroughfs.py"
        program.write_bytes(source.read())
    log = base / "example.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, program, root, where], stdout=out, stderr=out)
    try:
        for _ in range(200):
            if is_mounted(where):
                break
            time.sleep(0.05)
        yield where
    finally:
        subprocess.run(["fusermount3", "-u", "-z", where], check=False)
        process.wait(20)


def throughput(mode: str, size: int, repeat: int, base: Path) -> list[Row]:
    """Against the bare tmpfs; in mode userspace against the example on the same tmpfs, too."""
    state, data = random_state(size), mmap.mmap(-1, BLOCK)
    data.write(os.urandom(BLOCK))
    # The memory tier must hold several dirty generations of one file, or the drain is what is measured.
    memory = f"{(size * 6 >> 20) + 512}MiB"
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(bare_tmpfs(base / "bare", 4 * size + (512 << 20)))
        sides = {"tmpfs huge=within_size": bare}
        if mode == "userspace":
            (bare / "example").mkdir()
            example = stack.enter_context(example_passthrough(base, bare / "example"))
            if example is not None:
                sides["pyfuse3 passthroughfs"] = example
        mount = stack.enter_context(mounted(base, mode=mode, archive=base / "archive", memory=memory))
        mount.cli("pause", mount.path)
        tops = mount.path, *sides.values()

        def cleared() -> None:
            """The bare tmpfs would reuse the pages of what it replaces, the mount frees them while it writes."""
            for top in tops:
                (top / SAVED).unlink(missing_ok=True)
            while used_bytes(mount.memory) > BLOCK:
                time.sleep(0.05)

        def written() -> None:
            for top in tops:
                if not (top / SAVED).exists():
                    writes(top, size, data)()

        rows = []
        for name, make, before in (
            ("torch.save", lambda top: torch_save(state, top), cleared),
            ("torch.save over the last one", lambda top: torch_save(state, top), lambda: None),
            ("8 MiB writes", lambda top: writes(top, size, data), cleared),
            ("8 MiB reads", lambda top: reads(top, size, data), written),
        ):
            taken = alternating(repeat, *map(make, tops), warm=2 * size, before=before)
            for against, spent in zip(sides, taken[1:], strict=True):
                target = ">= 0.95" if mode == "passthrough" else ">= 0.9" if "pyfuse3" in against else ""
                rows.append(Row(name, "GB/s", size / 1e9 / taken[0], size / 1e9 / spent, against, target))
        for path in mount.path.iterdir():
            path.unlink()
        mount.cli("resume", mount.path)
        return rows
