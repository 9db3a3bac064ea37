"""The object storage driver against ``rclone copyto``, both with 8 streams of 16 MiB, on the same server.

The file lies on a tmpfs, as the memory tier's do. CPU is that of the client alone.
"""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from tests.bench.draining import fill
from tests.bench.measuring import Row, bare_tmpfs, seconds
from tests.servers import BUCKET, KEY, SECRET, Server, program, seaweedfs
from tierfs.tiers.objects import ObjectBlobs

STREAMS, PART = 8, 16 << 20


def cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def rclone(server: Server, *arguments: str) -> None:
    settings = {"TYPE": "s3", "PROVIDER": "SeaweedFS", "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
    settings |= {"ENDPOINT": server.endpoint, "REGION": "us-east-1"}
    environment = {f"RCLONE_CONFIG_S3_{name}": value for name, value in settings.items()}
    command = [
        program("rclone") or "rclone",
        "copyto",
        *arguments,
        "--config=",
        "--s3-no-check-bucket",
        "--ignore-times",
    ]
    command += [f"--s3-upload-concurrency={STREAMS}", "--s3-chunk-size=16M", "--s3-upload-cutoff=16M"]
    command += [f"--multi-thread-streams={STREAMS}", "--multi-thread-chunk-size=16M", "--multi-thread-cutoff=16M"]
    subprocess.run(command, check=True, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)


def upload(blobs: ObjectBlobs, key: str, source: Path) -> None:
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        view = memoryview(mapping)
        started = blobs.begin(key, PART)
        with ThreadPoolExecutor(STREAMS) as pool:
            parts = range(-(-len(view) // PART))
            list(pool.map(lambda number: started.part(number, view[number * PART : (number + 1) * PART]), parts))
        started.complete()
        view.release()


def download(blobs: ObjectBlobs, key: str, target: Path) -> None:
    found = blobs.head(key)
    assert found is not None
    size = found.size
    with target.open("wb") as file, ThreadPoolExecutor(STREAMS) as pool:
        fd = file.fileno()
        os.ftruncate(fd, size)

        def fetch(start: int) -> None:
            os.pwrite(fd, blobs.get_range(key, start, min(PART, size - start)), start)

        list(pool.map(fetch, range(0, size, PART)))


def measured(work: Callable[[], object], who: int) -> tuple[float, float]:
    """Seconds and CPU seconds."""
    before = cpu(who)
    taken = seconds(work)
    return taken, cpu(who) - before


def objects(size: int, repeat: int, base: Path) -> list[Row]:
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    rows: list[Row] = []
    with bare_tmpfs(base / "tmpfs", 4 * size) as memory, seaweedfs(base / "server") as server:
        blobs = ObjectBlobs.open("archive", f"s3://{BUCKET}/bench", endpoint=server.endpoint)
        source, back = memory / "source", memory / "back"
        fill(source, size)
        there = f"s3:{BUCKET}/bench/rclone"
        sides: dict[str, list[tuple[Callable[[], object], int]]] = {
            "upload": [
                (lambda: upload(blobs, "own", source), resource.RUSAGE_SELF),
                (lambda: rclone(server, str(source), there), resource.RUSAGE_CHILDREN),
            ],
            "download": [
                (lambda: download(blobs, "own", back), resource.RUSAGE_SELF),
                (lambda: rclone(server, there, str(back)), resource.RUSAGE_CHILDREN),
            ],
        }
        for what, both in sides.items():
            taken: list[list[tuple[float, float]]] = [[], []]
            for number in range(repeat + 1):
                for results, (work, who) in zip(taken, both, strict=True):
                    back.unlink(missing_ok=True)
                    result = measured(work, who)
                    if number:
                        results.append(result)
                    assert what == "upload" or back.stat().st_size == size
            own, other = ([median(values) for values in zip(*results, strict=True)] for results in taken)
            gigabytes = size / 1e9
            rows.append(
                Row(f"object {what}", "GB/s", gigabytes / own[0], gigabytes / other[0], "rclone copyto", ">= 0.9")
            )
            rows.append(
                Row(f"… CPU per GB, {what}", "s", own[1] / gigabytes, other[1] / gigabytes, "rclone copyto", "<= 1.0")
            )
        back.unlink(missing_ok=True)
        download(blobs, "own", back)
        assert subprocess.run(["cmp", source, back]).returncode == 0, "what came back is not what was sent"
    return rows
