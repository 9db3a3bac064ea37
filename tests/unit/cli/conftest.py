"""A mount whose daemon gives canned answers, a policy file and a place for both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.talking import FakeDaemon
from tierfs.control.protocol import MountRecord


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERFS_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def mnt(tmp_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@pytest.fixture
def daemon(mnt: Path, tmp_path: Path) -> Iterator[FakeDaemon]:
    record = MountRecord(str(mnt), str(tmp_path / "c.yaml"), str(tmp_path / "s"), None, os.getpid(), "userspace")
    record.write()
    with FakeDaemon(record) as fake:
        yield fake


@pytest.fixture
def config(tmp_path: Path, mnt: Path) -> Path:
    for name in ("memory", "archive"):
        (tmp_path / name).mkdir()
    path = tmp_path / "c.yaml"
    path.write_text(
        f"mount: {mnt}\nmode: userspace\nstate: {tmp_path}/state\ntiers:\n"
        f"  memory: {{kind: memory, path: {tmp_path}/memory, size: 1MiB}}\n"
        f"  archive: {{kind: dir, path: {tmp_path}/archive}}\n"
    )
    return path
