from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.durable import create_temporary


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_commit_gives_the_name_and_replaces(tmp_path: Path, directory: int) -> None:
    (tmp_path / "final").write_bytes(b"old")
    temp = create_temporary(directory, "k")
    assert temp.path.parent == tmp_path
    assert temp.path.stat().st_mode & 0o777 == 0o600
    os.write(temp.fd, b"new")
    assert (tmp_path / "final").read_bytes() == b"old"
    temp.commit(directory, b"final")
    assert (tmp_path / "final").read_bytes() == b"new"
    temp.close()
    assert os.listdir(tmp_path) == ["final"]


def test_commit_again_does_not_rename_again(tmp_path: Path, directory: int) -> None:
    temp = create_temporary(directory)
    temp.commit(directory, b"a")
    os.rename(tmp_path / "a", tmp_path / "b")
    temp.commit(directory, b"a")
    temp.discard()
    assert os.listdir(tmp_path) == ["b"]


def test_discard_removes_and_may_be_repeated(tmp_path: Path, directory: int) -> None:
    temp = create_temporary(directory)
    temp.discard()
    temp.discard()
    temp.close()
    assert os.listdir(tmp_path) == []


def test_order_of_the_steps(monkeypatch: pytest.MonkeyPatch, directory: int) -> None:
    temp = create_temporary(directory)
    steps: list[object] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append("dir" if fd == directory else "file"))
    monkeypatch.setattr(os, "rename", lambda *a, **k: (steps.append("rename"), rename(*a, **k)))
    temp.commit(directory, b"x")
    assert steps == ["file", "rename", "dir"]
    temp.close()


def test_failed_sync_keeps_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: int) -> None:
    (tmp_path / "x").write_bytes(b"old")
    temp = create_temporary(directory)

    def fail(fd: int) -> None:
        raise OSError(5, "disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        temp.commit(directory, b"x")
    temp.discard()
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
