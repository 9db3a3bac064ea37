"""The durability ladder on a mount: deadlines, directories' fsync, flushes and ends that run out of time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter, eventually
from tests.mount.test_semantics import MB, limited, mode, paused
from tierfs.testing.mounting import TestMount, is_mounted

__all__ = ["mode"]

BROKEN = ["tier archive: .*trying again"]


@contextlib.contextmanager
def broken_archive(mnt: TestMount) -> Iterator[None]:
    """Nothing can be copied to the archive inside the block."""
    tmp = mnt.archive / ".tierfs" / "tmp"
    if os.geteuid() != 0 or not shutil.which("chattr") or subprocess.run(["chattr", "+i", tmp]).returncode:
        pytest.skip("needs root and a filesystem with immutable directories")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", tmp], check=True)


def drain_status(mnt: TestMount) -> dict[str, object]:
    drain = mnt.status()["drain"]
    assert isinstance(drain, dict)
    return drain


@pytest.mark.timeout(45)  # below the minute after which nothing waits for such a file anyway
def test_fsync_does_not_wait_for_another_file_that_its_program_has_open_again(mounter: Mounter, mode: str) -> None:
    """Touched, then opened to be written: a log."""
    with limited(mounter, mode, rules=[{"match": "**", "fsync": "archive"}]) as mnt:
        (mnt.path / "train.log").touch()
        with (mnt.path / "train.log").open("w") as log:
            log.write("start")
            log.flush()
            with (mnt.path / "model.pt").open("wb") as model:
                model.write(b"m" * MB)
                model.flush()
                os.fsync(model.fileno())
            assert (mnt.archive / "model.pt").read_bytes() == b"m" * MB
        mnt.flush()
        assert (mnt.archive / "train.log").read_text() == "start"


def test_a_missed_deadline_shows_in_status_and_once_in_the_log(mounter: Mounter, mode: str) -> None:
    rules = [{"match": "**/*.pt", "durable_within": "300ms"}]
    with limited(mounter, mode, rules=rules, allow_log=["past their deadline"]) as mnt:
        with paused(mnt):
            (mnt.path / "model.pt").write_bytes(b"m" * MB)
            (mnt.path / "other").write_bytes(b"o" * MB)
            eventually(lambda: "past their deadline" in mnt.log)
            drain = drain_status(mnt)
            assert (drain["late_files"], drain["late_bytes"], drain["late"]) == (1, MB, ["model.pt"])
            assert "past their deadline: 1 files (1MiB), first model.pt" in mnt.cli("status", mnt.path).out
            time.sleep(2.5)  # what is tested is that nothing comes
        mnt.flush()
        assert drain_status(mnt)["late_files"] == 0
        assert mnt.log.count("past their deadline (durable_within)") == 1


def test_fsync_of_a_directory_waits_for_the_tier_of_its_rule(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, rules=[{"match": ["run/**", "run"], "fsync": "archive"}]) as mnt:
        (mnt.path / "run" / "step-1").mkdir(parents=True)
        (mnt.path / "run" / "step-1" / "a").write_bytes(b"a" * MB)
        (mnt.path / "run" / "step-1" / "a").rename(mnt.path / "run" / "b")
        fd = os.open(mnt.path / "run", os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
        assert (mnt.archive / "run" / "b").read_bytes() == b"a" * MB
        assert (mnt.archive / "run" / "step-1").is_dir()
        with paused(mnt):
            (mnt.path / "other").mkdir()
            fd = os.open(mnt.path / "other", os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(fd)  # another rule: returns at once
            os.close(fd)


def test_flush_and_umount_of_a_paused_mount_say_why_and_return_in_time(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode) as mnt, paused(mnt):
        (mnt.path / "model.pt").write_bytes(b"m" * MB)
        for command in ("flush", "umount"):
            began = time.monotonic()
            late = mnt.cli(command, mnt.path, "--timeout", "500ms", check=False)
            assert time.monotonic() - began < 10
            assert late.code == 3
            assert "drains are paused" in late.err
            assert "model.pt" in late.err
        assert is_mounted(mnt.path)


def test_flush_all_lists_what_is_late_and_how_far_it_came(
    mounter: Mounter, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERFS_RUNTIME_DIR", str(tmp_path))  # every mount is this one
    with limited(mounter, mode, allow_log=BROKEN) as mnt:
        with broken_archive(mnt):
            for name in ("a.pt", "b.pt"):
                (mnt.path / name).write_bytes(name.encode() * MB)
            late = mnt.cli("flush", "--all", "--timeout", "4s", "--json", check=False)
            assert late.code == 3
            (answer,) = json.loads(late.out)
            assert answer["missing_files"] == 2
            assert answer["missing_bytes"] == 8 * MB
            assert {m["path"]: m["durable"] for m in answer["missing"]} == {"a.pt": "nvme", "b.pt": "nvme"}
            assert "a.pt (on nvme)" in late.err
            one = mnt.cli("flush", mnt.path / "a.pt", "--timeout", "100ms", "--json", check=False)
            assert one.code == 3
            assert [m["path"] for m in one.json()["missing"]] == ["a.pt"]  # type: ignore[attr-defined]
        assert mnt.cli("flush", "--all", "--timeout", "60s").code == 0
        assert (mnt.archive / "b.pt").read_bytes() == b"b.pt" * MB


def test_sigterm_drains_for_as_long_as_the_policy_says_and_lists_the_rest(
    mounter: Mounter, mode: str, tmp_path: Path
) -> None:
    """Slurm and spot instances give some seconds between SIGTERM and SIGKILL."""
    with limited(mounter, mode, extra={"limits": {"stop": "3s"}}, allow_log=BROKEN) as mnt:
        mnt.umount()
        command = [sys.executable, "-m", "tierfs", "mount", "--foreground", mnt.config, mnt.path]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as service:
            try:
                eventually(lambda: is_mounted(mnt.path) and mnt.cli("status", mnt.path, check=False).code == 0)
                with broken_archive(mnt):
                    (mnt.path / "model.pt").write_bytes(b"m" * MB)
                    service.send_signal(signal.SIGTERM)
                    assert service.wait(30) == 3
            finally:
                service.kill()
        assert "model.pt (on nvme)" in (tmp_path / "log").read_text()
        report = json.loads((mnt.state / "undrained.json").read_text())
        assert [(m["path"], m["durable"]) for m in report["missing"]] == [("model.pt", "nvme")]
        mnt.mount()
        assert (mnt.path / "model.pt").read_bytes() == b"m" * MB
        mnt.flush()
        assert not (mnt.state / "undrained.json").exists()
