"""Programs written after public bug reports about other mounts: ``tests/cases``, or the directory TIERFS_CASES.

Most of them mainly wait, to see whether something changes later: these run several at a time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tierfs.testing.mounting import TestMount

from .conftest import TEST_LIMIT

CASES = Path(os.environ.get("TIERFS_CASES", Path(__file__).parents[1] / "cases"))
SCRIPTS = sorted(path for path in CASES.glob("[0-9]*") if path.suffix in (".py", ".sh") and os.access(path, os.X_OK))

ALONE = ("01_", "09_", "13_", "16_", "17_", "36_", "39_", "46_", "47_")
"""These measure what others would change (the free space), or are busy: each script gives up after 19 s."""
AT_ONCE = 3

Done = subprocess.CompletedProcess[str]


def run(script: Path, mountpoint: Path) -> Done:
    """In a directory of its own."""
    here = Path(tempfile.mkdtemp(prefix="case-", dir=mountpoint))
    here.chmod(0o755)
    done = subprocess.run(
        ["timeout", "-k", "3", "28", script, here],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "SETTLE": "2", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    shutil.rmtree(here)
    return done


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.name.startswith(ALONE)], ids=lambda path: path.stem
)
def test_case_alone(script: Path, shared_mnt: TestMount) -> None:
    with shared_mnt.abort_after(TEST_LIMIT):
        done = run(script, shared_mnt.path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, shared_mnt: TestMount) -> Iterator[Mapping[Path, Future[Done]]]:
    """What comes of the scripts of `test_case` that this run is to do."""
    chosen = {
        item.callspec.params["script"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_case.__name__
    }
    with shared_mnt.abort_after(TEST_LIMIT), ThreadPoolExecutor(AT_ONCE) as pool:
        yield {script: pool.submit(run, script, shared_mnt.path) for script in sorted(chosen)}


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if not path.name.startswith(ALONE)], ids=lambda path: path.stem
)
def test_case(script: Path, outcomes: Mapping[Path, Future[Done]]) -> None:
    done = outcomes[script].result()
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_cases() -> None:
    assert SCRIPTS, f"no executable scripts in {CASES}"
