"""Programs written after public bug reports about other mounts: ``tests/cases``, or the directory TIERFS_CASES."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(os.environ.get("TIERFS_CASES", Path(__file__).parents[1] / "cases"))
SCRIPTS = sorted(path for path in CASES.glob("[0-9]*") if path.suffix in (".py", ".sh") and os.access(path, os.X_OK))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_case(script: Path, here: Path) -> None:
    done = subprocess.run(
        ["timeout", "-k", "3", "28", script, here],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "SETTLE": "2", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_cases() -> None:
    assert SCRIPTS, f"no executable scripts in {CASES}"
