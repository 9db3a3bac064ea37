"""The demo takes away what it made, however it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import eventually
from tierfs.control.protocol import mount_table

DEMO = Path(__file__).parents[2] / "demo" / "demo.py"
RUN = """
import runpy, sys, tempfile
base = sys.argv.pop(1)
tempfile.mkdtemp = lambda **options: base
runpy.run_path({!r}, None, "__main__")
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or any(importlib.util.find_spec(name) is None for name in ("torch", "rich")),
    reason="needs root and torch",
)


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as path:
        made = Path(path) / "demo"
        made.mkdir()
        yield made


def processes(base: Path) -> list[bytes]:
    """Command lines that name ``base``."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes())
    return [line for line in found if bytes(base) in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_ended_leaves_nothing_behind(base: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", RUN.format(str(DEMO)), str(base), "--saves", "40", "--width", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        try:
            eventually(lambda: any((base / "mnt").glob("*.pt")), seconds=60)
            demo.send_signal(number)
            output, _ = demo.communicate(timeout=60)
        finally:
            demo.kill()
    assert demo.returncode == 128 + number
    assert "Traceback" not in output
    assert "interrupted" in output
    assert not base.exists()
    assert not [point for point in mount_table() if Path(point).is_relative_to(base)]
    assert processes(base) == []
