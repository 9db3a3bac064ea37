from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.durable import create_temporary, remove_unfinished, write_whole


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


def kill_in_rename(directory: Path, name: str) -> None:
    """A process dies in `write_whole`, after all but the rename."""
    program = f"""
import os, pathlib, signal, tierfs.durable
os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
tierfs.durable.write_whole(pathlib.Path({str(directory)!r}), {name!r}, "new")
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL


def test_a_file_whose_writer_was_killed_is_what_it_was_and_nothing_is_left_behind(tmp_path: Path) -> None:
    for name in ("recovery.json", "undrained.json"):
        write_whole(tmp_path, name, "old")
        kill_in_rename(tmp_path, name)
        assert (tmp_path / name).read_text() == "old"
    assert len(os.listdir(tmp_path)) == 4
    write_whole(tmp_path, "recovery.json", "newer")
    assert len(os.listdir(tmp_path)) == 3
    remove_unfinished(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "recovery.json": "newer",
        "undrained.json": "old",
    }


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_file_that_cannot_be_written_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    write_whole(tmp_path, "report", "old")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path, "report", "new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"report": "old"}


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".report.tmp").symlink_to("theirs")
    with pytest.raises(OSError, match="symbolic"):
        write_whole(tmp_path, "report", "new")
    assert (tmp_path / "theirs").read_text() == "theirs"
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["theirs"]
