"""What is somebody else's is neither used nor believed; what is ours nobody else may look at."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tierfs.control.protocol import MountRecord, list_mounts
from tierfs.errors import MountError, TierError
from tierfs.state import state_lock
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.tree import TreeStore

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
SOMEBODY = 1234


@needs_root
@pytest.mark.parametrize("inside", ["tmp", "data"])
def test_a_tiers_own_directories_are_refused_when_they_are_somebody_elses(tmp_path: Path, inside: str) -> None:
    store = ReplicaStore("t", tmp_path / "t", persistent=True)
    store.prepare()
    store.close()
    os.chown(tmp_path / "t" / inside, SOMEBODY, SOMEBODY)
    with pytest.raises(TierError, match="to user 1234") as refused:
        store.prepare()
    assert not refused.value.temporary


@pytest.mark.parametrize("inside", ["tmp", "data"])
def test_a_symlink_in_place_of_a_tiers_own_directory_is_not_followed(tmp_path: Path, inside: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(b"x")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / inside).symlink_to(tmp_path / "outside")
    with pytest.raises(TierError):
        ReplicaStore("t", tmp_path / "t", persistent=True).prepare()
    assert os.listdir(tmp_path / "outside") == ["precious"]


@pytest.mark.parametrize("inside", [".tierfs", ".tierfs/tmp"])
def test_a_symlink_in_place_of_the_archives_own_directory_is_not_followed(tmp_path: Path, inside: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(b"x")
    (tmp_path / "a").mkdir()
    if "/" in inside:
        (tmp_path / "a" / ".tierfs").mkdir()
    (tmp_path / "a" / inside).symlink_to(tmp_path / "outside")
    store = TreeStore("a", tmp_path / "a")
    with pytest.raises(TierError):
        store.prepare()
    assert os.listdir(tmp_path / "outside") == ["precious"]


def test_the_state_directory_is_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    with state_lock(state):
        assert stat.S_IMODE(state.stat().st_mode) == 0o700


@needs_root
def test_a_state_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, SOMEBODY, SOMEBODY)
    with pytest.raises(MountError, match="belongs to user 1234"), state_lock(state):
        pass
    os.chown(state, 0, 0)
    state.chmod(0o1777)
    with pytest.raises(MountError, match="shared directory"), state_lock(state):
        pass
    assert list(state.iterdir()) == []


@needs_root
@pytest.mark.parametrize("which", ["runtime", "record", "writable"])
def test_a_record_that_somebody_else_wrote_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    runtime = tmp_path / "runtime"
    monkeypatch.setenv("TIERFS_RUNTIME_DIR", str(runtime))
    record = MountRecord(str(tmp_path), "/p.yaml", str(tmp_path), None, os.getpid(), "userspace")
    record.write()
    assert list_mounts() == [record]
    if which == "writable":
        record.directory.chmod(0o777)
    else:
        os.chown(runtime if which == "runtime" else record.directory, SOMEBODY, SOMEBODY)
    assert list_mounts() == []
