"""Programs written after public bug reports about other mounts (TIERFS_CASES, default ../shared/cases)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "cases"
CASES = Path(os.environ.get("TIERFS_CASES", DEFAULT))
SCRIPTS = sorted(path for path in CASES.glob("[0-9]*") if path.suffix in (".py", ".sh") and os.access(path, os.X_OK))


@pytest.mark.skipif(not SCRIPTS, reason=f"no case scripts in {CASES}")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_case(script: Path, here: Path) -> None:
    done = subprocess.run(
        ["timeout", "-k", "3", "28", script, here],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
