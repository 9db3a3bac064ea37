"""`make bench`: what the mount costs, as ratios to the bare thing measured in the same run.

    python -m tests.bench.run [--mode passthrough|userspace] [--only throughput|draining|metadata|many|codecs|objects]
                              [--gib 1] [--repeat 3] [--files 1000000] [--json FILE]

The parts `codecs` (needs no root) and `objects` need no mount and are measured once.

Every pair is measured alternately and the medians compared, so that a slow minute of the machine hits both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.codecs import codecs
from tests.bench.draining import draining
from tests.bench.measuring import Row
from tests.bench.metadata import many_files, metadata
from tests.bench.objects import objects
from tests.bench.throughput import BLOCK, throughput

ON_A_MOUNT = ("throughput", "draining", "metadata", "many")
WITHOUT = ("codecs", "objects")
DISKS = os.environ.get("TIERFS_BENCH_DIR", "/var/tmp")


def show(rows: list[Row], title: str) -> None:
    table = Table(title=title)
    for heading in ("what", "mount", "bare", "unit", "ratio", "against", "wanted"):
        table.add_column(heading, justify="right" if heading in ("mount", "bare", "ratio") else "left")
    for row in rows:
        bare = f"{row.bare:.4g}" if row.bare else ""
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        table.add_row(row.name, f"{row.mount:.4g}", bare, row.unit, ratio, row.against, row.target)
    console = Console()
    Console(width=None if console.is_terminal else 150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="What the mount costs, as ratios.")
    parser.add_argument("--mode", choices=("passthrough", "userspace"), action="append", help="default: both")
    parser.add_argument("--only", choices=(*ON_A_MOUNT, *WITHOUT), action="append")
    parser.add_argument("--files", type=int, default=1_000_000, help="size of the large catalog")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the large files (default 1)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here as well; - is standard output")
    options = parser.parse_args()
    wanted = options.only or [*ON_A_MOUNT, *WITHOUT]
    on_mount = [name for name in wanted if name in ON_A_MOUNT]
    if (on_mount or "objects" in wanted) and os.geteuid() != 0:
        print("bench: needs root, for the tmpfs that it compares with", file=sys.stderr)
        return 2
    size = int(options.gib * (1 << 30)) // BLOCK * BLOCK
    results: dict[str, list[Row]] = {}
    for mode in (options.mode or ("passthrough", "userspace")) if on_mount else ():
        parts: dict[str, Callable[[Path], list[Row]]] = {
            "throughput": lambda base, mode=mode: throughput(mode, size, options.repeat, base),  # type: ignore[misc]
            "draining": lambda base, mode=mode: draining(mode, size, options.repeat, base),  # type: ignore[misc]
            "metadata": lambda base, mode=mode: metadata(mode, options.repeat, base),  # type: ignore[misc]
            "many": lambda base, mode=mode: many_files(mode, options.files, options.repeat, base),  # type: ignore[misc]
        }
        rows: list[Row] = []
        for name in on_mount:
            base = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir=DISKS))
            try:
                rows += parts[name](base)
            finally:
                shutil.rmtree(base, ignore_errors=True)
        results[mode] = rows
        if options.json != Path("-"):
            show(rows, f"mode {mode}, {size / (1 << 30):g} GiB")
    if "codecs" in wanted:
        results["no mount"] = codecs(options.repeat)
        if options.json != Path("-"):
            show(results["no mount"], "codecs, per core")
    if "objects" in wanted:
        base = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir=DISKS))
        try:
            results["object store"] = objects(size, options.repeat, base)
        finally:
            shutil.rmtree(base, ignore_errors=True)
        if options.json != Path("-"):
            show(results["object store"], f"object store, {size / (1 << 30):g} GiB")
    if options.json:
        modes = {mode: [{**asdict(row), "ratio": row.ratio} for row in rows] for mode, rows in results.items()}
        text = json.dumps({"bytes": size, "modes": modes}, indent=2)
        print(text) if options.json == Path("-") else options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
