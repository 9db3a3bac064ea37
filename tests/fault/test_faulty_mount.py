"""Real mounts whose tiers fail or hang."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.conftest import Switches
from tests.mount.conftest import MODES, Mounter, eventually, make_base, passthrough_obstacle
from tierfs.testing.mounting import TestMount, mounted

HERE = Path(__file__).parent
LIMIT = 150.0
NOISE = ["tier (nvme|archive): .*trying again", "nothing came for 10 s", "open: .*nothing came"]
QUICK = {"limits": {"read_timeout": "10s", "tier_timeout": "2s"}}


@contextlib.contextmanager
def mount(mounter: Mounter, mode: str, switches: Switches, **options: object) -> Iterator[TestMount]:
    with mounter(mode, allow_log=NOISE, **options) as made, made.abort_after(LIMIT):
        try:
            yield made
        finally:
            switches.repair()


def training(what: str, top: Path, steps: int) -> None:
    command = [sys.executable, "-W", "ignore", HERE / "training.py", what, top, str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "layout"), [*((mode, "tree") for mode in MODES), ("passthrough", "chunks")])
def test_a_training_run_on_faulty_tiers_ends_without_an_error(
    mounter: Mounter, mode: str, layout: str, switches: Switches, tmp_path: Path
) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    steps = 12
    rules = [{"match": "**/train.log", "ack": "nvme"}, {"match": "**/model.pt", "fsync": "nvme"}, {"match": "**"}]
    with mount(mounter, mode, switches, rules=rules, stored={"layout": layout}) as mnt:
        switches.errors(0.1, "nvme", "archive")
        top = mnt.path / "run"
        top.mkdir()
        training("train", top, steps)
        mnt.flush(timeout=100)
        switches.repair()
        mnt.cli("export", mnt.archive, "run", tmp_path / "run")
        training("check", tmp_path / "run", steps)
        names = [top / "step-12" / "model.pt", top / "step-11" / "model.pt"]
        for tier in ("memory", "nvme"):
            mnt.evict(*names, tier=tier)
        training("check", top, steps)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_a_mount_goes_on_while_a_tier_hangs(mounter: Mounter, mode: str, switches: Switches, tier: str) -> None:
    other = ({"nvme", "archive"} - {tier}).pop()
    with mount(mounter, mode, switches, extra=QUICK) as mnt:
        (mnt.path / "before").write_bytes(b"b" * (1 << 20))
        mnt.flush()
        mnt.evict(mnt.path / "before", tier="memory")
        switches.hang(tier)
        for number in range(6):
            (mnt.path / f"f{number}").write_bytes(bytes([number]) * (2 << 20))
        state_of(mnt, tier, "down")
        started = time.monotonic()
        for number in range(6):
            path = mnt.path / f"f{number}"
            with path.open("r+b") as file:
                file.write(b"again")
            os.truncate(path, 1 << 20)
            path.rename(mnt.path / f"g{number}")
            assert (mnt.path / f"g{number}").read_bytes()[:6] == b"again" + bytes([number])
            assert os.statvfs(mnt.path).f_blocks > 0
        (mnt.path / "g5").unlink()
        if tier == "nvme":
            assert (mnt.path / "before").read_bytes() == b"b" * (1 << 20), "the archive has it, too"
        assert time.monotonic() - started < 20, "something waited for the tier"
        eventually(lambda: tier_of(mnt, other)["state"] == "ok", f"{other} is taken along", seconds=60)
        threads = len(list(Path(f"/proc/{mnt.daemon_pid()}/task").iterdir()))
        assert threads < 60
        late = mnt.cli("flush", mnt.path, "--timeout", "1s", check=False)
        assert late.code == (3 if tier == "archive" else 0), "what the archive has is as durable as can be"
        assert tier == "nvme" or "archive" in late.err
        switches.repair()
        mnt.flush()
        state_of(mnt, tier, "ok")
        for number in range(5):
            expected = b"again" + bytes([number]) * ((1 << 20) - 5)
            assert (mnt.archive / f"g{number}").read_bytes() == expected == (mnt.path / f"g{number}").read_bytes()
        assert not (mnt.archive / "g5").exists()


def tier_of(mnt: TestMount, name: str) -> dict[str, object]:
    tiers = mnt.status()["tiers"]
    assert isinstance(tiers, list)
    return next(tier for tier in tiers if tier["name"] == name)


def state_of(mnt: TestMount, name: str, state: str) -> None:
    eventually(lambda: tier_of(mnt, name)["state"] == state, f"{name} never became {state}", seconds=60)
    assert (tier_of(mnt, name)["last_error"] is None) == (state == "ok")


def test_the_archive_is_a_filesystem_that_really_hangs(mounter: Mounter) -> None:
    """A FUSE filesystem whose process is stopped: system calls on it do not return. It is tierfs itself."""
    base = make_base("tierfs-test-")
    mode = "userspace" if passthrough_obstacle() else "passthrough"
    try:
        with mounter("userspace") as inner, inner.abort_after(LIMIT):
            server = inner.daemon_pid()
            archive = inner.path / "archive"
            with mounted(base, mode=mode, archive=archive, allow_log=NOISE, extra=QUICK) as mnt:
                with mnt.abort_after(LIMIT):
                    try:
                        hang_and_go_on(mnt, server)
                    finally:
                        os.kill(server, signal.SIGCONT)
                mnt.umount()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def hang_and_go_on(mnt: TestMount, server: int) -> None:
    cold = mnt.path / "cold"
    cold.write_bytes(b"c" * (1 << 20))
    mnt.flush()
    mnt.evict(cold, tier="memory")
    os.kill(server, signal.SIGSTOP)
    for number in range(4):
        (mnt.path / f"f{number}").write_bytes(bytes([number]) * (2 << 20))
    state_of(mnt, "archive", "down")
    started = time.monotonic()
    with (mnt.path / "f0").open("r+b") as file:
        file.write(b"again")
    os.truncate(mnt.path / "f1", 1 << 20)
    (mnt.path / "f2").rename(mnt.path / "g2")
    (mnt.path / "f3").unlink()
    assert (mnt.path / "g2").read_bytes() == b"\2" * (2 << 20)
    assert os.statvfs(mnt.path).f_blocks > 0
    assert time.monotonic() - started < 20, "something waited for the archive"
    started = time.monotonic()
    with pytest.raises(OSError, match=r"Input/output error|timed out"):
        cold.read_bytes()
    assert 5 < time.monotonic() - started < 30
    assert len(list(Path(f"/proc/{mnt.daemon_pid()}/task").iterdir())) < 80
    os.kill(server, signal.SIGCONT)
    mnt.flush()
    state_of(mnt, "archive", "ok")
    assert cold.read_bytes() == b"c" * (1 << 20)
    assert (mnt.archive / "f0").read_bytes() == b"again" + bytes((2 << 20) - 5)
    assert (mnt.archive / "f1").read_bytes() == b"\1" * (1 << 20)
    assert sorted(path.name for path in mnt.archive.iterdir() if path.name != ".tierfs") == ["cold", "f0", "f1", "g2"]
