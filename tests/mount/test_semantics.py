"""What docs/SEMANTICS.md states and no other test shows, each as the example that the statement is about."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import MODES, Mounter, eventually
from tests.mount.test_posix import RENAME_EXCHANGE, renameat2
from tierfs.fs.copies import RENAME_AT_ONCE
from tierfs.testing.mounting import TestMount, is_mounted

MB = 1 << 20
LIMIT = 100.0


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def limited(mounter: Mounter, mode: str, **options: object) -> Iterator[TestMount]:
    with mounter(mode, **options) as mnt, mnt.abort_after(LIMIT):
        yield mnt


@contextlib.contextmanager
def paused(mnt: TestMount) -> Iterator[None]:
    """Nothing is drained inside the block."""
    mnt.cli("pause", mnt.path)
    try:
        yield
    finally:
        mnt.cli("resume", mnt.path)


def tiers_of(mnt: TestMount, path: Path) -> set[str]:
    """Tiers that hold the current version."""
    info = mnt.info(path)
    replicas = info["replicas"]
    assert isinstance(replicas, list)
    return {replica["tier"] for replica in replicas if replica["version"] == info["version"]}


def tier_status(mnt: TestMount, name: str) -> dict[str, object]:
    tiers = mnt.status()["tiers"]
    assert isinstance(tiers, list)
    return next(tier for tier in tiers if tier["name"] == name)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# write, close, fsync


def test_write_and_close_wait_for_no_tier_below(mnt: TestMount) -> None:
    with paused(mnt):
        (mnt.path / "model.pt").write_bytes(bytes(64 * MB))
        fd = os.open(mnt.path / "model.pt", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        assert mnt.info(mnt.path / "model.pt")["durable"] is None
        assert tiers_of(mnt, mnt.path / "model.pt") == {"memory"}


@pytest.mark.parametrize("tier", ["nvme", "archive"])
@pytest.mark.parametrize("call", ["close", "fsync"])
def test_close_and_fsync_return_once_durable_on_their_tier(
    mounter: Mounter, mode: str, tier: str, call: str
) -> None:
    rules = [{"match": "**/*.pt", call: tier}]
    with limited(mounter, mode, rules=rules) as mnt:
        content = os.urandom(5 * MB + 1)
        returned: list[object] = []
        with paused(mnt):
            # opened in here: a child process that is started while a file is open closes it, too, and would wait
            fd = os.open(mnt.path / "model.pt", os.O_WRONLY | os.O_CREAT)
            os.write(fd, content)

            def finish() -> None:
                os.close(fd) if call == "close" else os.fsync(fd)
                returned.append(mnt.info(mnt.path / "model.pt")["durable"])

            thread = in_thread(finish)
            thread.join(0.5)
            assert thread.is_alive(), f"{call} returned although nothing was drained"
        thread.join(30)
        assert returned
        assert returned[0] in (tier, "archive")
        if tier == "archive":
            assert (mnt.archive / "model.pt").read_bytes() == content
        if call == "fsync":
            os.close(fd)
        (mnt.path / "other.txt").write_bytes(b"another rule: close returns at once")


WAITS_IN_FSYNC = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, b"bytes")
print("waits", flush=True)
os.fsync(fd)
print("returned", flush=True)
"""


def test_who_waits_in_fsync_can_be_killed_and_is_not_disturbed_otherwise(mounter: Mounter) -> None:
    with limited(mounter, "passthrough", rules=[{"match": "**", "fsync": "nvme"}]) as mnt, paused(mnt):
        command = [sys.executable, "-c", WAITS_IN_FSYNC, mnt.path / "log"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as waiter:
            assert waiter.stdout is not None
            assert waiter.stdout.readline() == b"waits\n"
            eventually(lambda: "State:\tS" in Path(f"/proc/{waiter.pid}/status").read_text())  # sleeps in the call
            waiter.send_signal(signal.SIGUSR1)
            with pytest.raises(subprocess.TimeoutExpired):
                waiter.wait(0.5)
            waiter.kill()
            assert waiter.wait(10) == -signal.SIGKILL
            assert waiter.stdout.read() == b""


def test_written_on_after_fsync_is_drained_again(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, rules=[{"match": "**", "fsync": "archive"}]) as mnt:
        fd = os.open(mnt.path / "log", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"first ")
        os.fsync(fd)
        assert (mnt.archive / "log").read_bytes() == b"first "
        os.write(fd, b"second")
        os.close(fd)
        mnt.flush()
        assert (mnt.archive / "log").read_bytes() == b"first second"


def test_a_rule_chooses_the_tier_that_acknowledges(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, rules=[{"match": "**/*.log", "ack": "nvme"}]) as mnt, paused(mnt):
        (mnt.path / "train.log").write_bytes(b"straight to disk")
        (mnt.path / "model.pt").write_bytes(b"memory first")
        assert tiers_of(mnt, mnt.path / "train.log") == {"nvme"}
        assert tiers_of(mnt, mnt.path / "model.pt") == {"memory"}


def test_a_rule_without_drain_keeps_its_files_to_itself(mounter: Mounter, mode: str) -> None:
    rules = [{"match": "**/*.scratch", "ack": "nvme", "drain": "none"}]
    with limited(mounter, mode, rules=rules) as mnt:
        (mnt.path / "a.scratch").write_bytes(b"stays")
        (mnt.path / "b.pt").write_bytes(b"goes")
        mnt.flush(mnt.path / "b.pt")
        assert (mnt.archive / "b.pt").read_bytes() == b"goes"
        (mnt.path / "dir").mkdir()
        (mnt.path / "dir" / "c.scratch").write_bytes(b"too")
        mnt.flush()
        assert mnt.info(mnt.path / "a.scratch")["durable"] == "nvme"
        assert sorted(path.name for path in mnt.archive.iterdir() if path.name != ".tierfs") == ["b.pt", "dir"]
        refused = mnt.cli("flush", mnt.path / "a.scratch", check=False)
        assert refused.code == 2
        assert "a.scratch stays on nvme" in refused.err
        mnt.flush(mnt.path / "a.scratch", to="nvme")
        os.setxattr(mnt.path / "a.scratch", "user.tierfs.flush", b"")
        mnt.umount()
        mnt.mount()
        assert (mnt.path / "a.scratch").read_bytes() == b"stays"
        assert tiers_of(mnt, mnt.path / "a.scratch") == {"nvme"}


def test_a_file_renamed_to_a_rule_that_drains_further_does(mounter: Mounter, mode: str) -> None:
    rules: list[dict[str, object]] = [
        {"match": ["**/*.tmp", "tmp-*/**"], "drain": "none"},
        {"match": "**/*.log", "drain": "nvme"},
    ]
    with limited(mounter, mode, rules=rules) as mnt:
        (mnt.path / "closed.tmp").write_bytes(b"closed")
        (mnt.path / "closed.tmp").rename(mnt.path / "closed.pt")
        with (mnt.path / "open.tmp").open("wb", buffering=0) as file:
            file.write(b"o")
            (mnt.path / "open.tmp").rename(mnt.path / "open.pt")
            file.write(b"pen")
        (mnt.path / "a.log").write_bytes(b"log")
        mnt.flush(mnt.path / "a.log", to="nvme")
        (mnt.path / "a.log").rename(mnt.path / "log.pt")
        (mnt.path / "tmp-1" / "deep").mkdir(parents=True)
        (mnt.path / "tmp-1" / "deep" / "shard").write_bytes(b"shard")
        (mnt.path / "x.tmp").write_bytes(b"swapped")
        renameat2(mnt.path / "x.tmp", mnt.path / "log.pt", RENAME_EXCHANGE)
        mnt.flush()
        assert not (mnt.archive / "tmp-1" / "deep" / "shard").exists()
        (mnt.path / "tmp-1").rename(mnt.path / "step-1")
        mnt.flush()
        for path, content in {
            "closed.pt": b"closed",
            "open.pt": b"open",
            "log.pt": b"swapped",
            "step-1/deep/shard": b"shard",
        }.items():
            assert (mnt.archive / path).read_bytes() == content


def test_a_large_directory_renamed_to_a_rule_that_drains_further_does(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, rules=[{"match": "tmp/**", "drain": "none"}]) as mnt:
        (mnt.path / "tmp").mkdir()
        number = RENAME_AT_ONCE + 100
        for n in range(number):
            (mnt.path / "tmp" / f"{n}").write_bytes(b"%d" % n)
        (mnt.path / "tmp").rename(mnt.path / "done")
        mnt.flush()
        assert {path.name: path.read_bytes() for path in (mnt.archive / "done").iterdir()} == {
            f"{n}": b"%d" % n for n in range(number)
        }


def test_rules_that_changed_between_mounts_are_followed(mounter: Mounter, mode: str) -> None:
    rules = [{"match": "**/*.scratch", "drain": "none"}, {"match": "**/*.log", "drain": "nvme"}]
    with limited(mounter, mode, rules=rules) as mnt:
        for number in range(200):
            (mnt.path / f"{number}.scratch").write_bytes(b"%d" % number)
        (mnt.path / "a.log").write_bytes(b"log")
        mnt.flush()
        mnt.umount()
        policy = mnt.config.read_text()
        mnt.config.write_text(policy.replace("drain: none", "drain: archive").replace("drain: nvme", "drain: archive"))
        mnt.mount()
        mnt.flush()
        assert {path.name: path.read_bytes() for path in mnt.archive.iterdir() if path.name != ".tierfs"} == {
            **{f"{number}.scratch": b"%d" % number for number in range(200)},
            "a.log": b"log",
        }


# crashes


def test_a_userspace_mount_ends_with_its_daemon_and_its_files_stay(mounter: Mounter) -> None:
    with limited(mounter, "userspace") as mnt:
        mnt.cli("pause", mnt.path)
        (mnt.path / "model.pt").write_bytes(b"m" * MB)
        (mnt.path / "dir").mkdir()
        pid = mnt.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        with pytest.raises(OSError, match="not connected"):
            os.listdir(mnt.path)
        mnt.umount()
        assert not is_mounted(mnt.path)
        mnt.mount()
        assert sorted(os.listdir(mnt.path)) == ["dir", "model.pt"]
        assert (mnt.path / "model.pt").read_bytes() == b"m" * MB


def reboot(mnt: TestMount) -> None:
    """What a reboot does: the mount and the memory tier are gone, the disks stay."""
    mnt.umount("--no-drain")
    subprocess.run(["umount", mnt.memory], check=True)
    mnt.mount()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a tmpfs of its own")
def test_after_losing_the_memory_tier_files_fall_back_and_are_listed(mounter: Mounter, mode: str) -> None:
    noise = [r"rolled back: run/old\.pt", r"lost: run/new\.pt"]
    with limited(mounter, mode, allow_log=noise) as mnt:
        (mnt.path / "run").mkdir()
        (mnt.path / "run" / "safe.pt").write_bytes(b"s" * MB)
        (mnt.path / "run" / "old.pt").write_bytes(b"1" * MB)
        mnt.flush()
        mnt.cli("pause", mnt.path)
        (mnt.path / "run" / "old.pt").write_bytes(b"2" * 2 * MB)
        (mnt.path / "run" / "new.pt").write_bytes(b"n" * MB)
        reboot(mnt)
        assert (mnt.path / "run" / "safe.pt").read_bytes() == b"s" * MB
        assert (mnt.path / "run" / "old.pt").read_bytes() == b"1" * MB
        with pytest.raises(OSError, match="Input/output error"):
            (mnt.path / "run" / "new.pt").read_bytes()
        assert "rolled back: run/old.pt" in mnt.log
        assert "lost: run/new.pt" in mnt.log
        flushed = mnt.cli("flush", mnt.path, check=False)  # waits for nothing that cannot come
        assert flushed.code == 1
        assert "run/new.pt" in flushed.err
        assert mnt.info(mnt.path / "run" / "new.pt")["lost"]
        assert not mnt.info(mnt.path / "run" / "old.pt")["lost"]
        with pytest.raises(OSError, match="Input/output error"):
            os.setxattr(mnt.path / "run" / "new.pt", "user.tierfs.flush", b"")
        (mnt.path / "run" / "new.pt").unlink()
        mnt.flush()


def test_a_tier_of_another_state_directory_is_refused(mnt: TestMount, tmp_path: Path) -> None:
    """A policy copied for a second run, with one path not changed: its mount would remove the first one's files."""
    (tmp_path / "mnt").mkdir()
    (mnt.path / "file.pt").write_bytes(b"1" * MB)
    mnt.flush()
    copied = tmp_path / "copied.yaml"
    copied.write_text(mnt.config.read_text().replace(str(mnt.state), str(tmp_path / "state")))
    refused = mnt.cli("mount", copied, tmp_path / "mnt", check=False)
    assert refused.code == 1
    assert "belong to another state directory" in refused.err
    assert not is_mounted(tmp_path / "state" / "memory" / "memory"), "a refused mount leaves nothing behind"
    assert (mnt.path / "file.pt").read_bytes() == b"1" * MB


@pytest.mark.parametrize("tier", ["archive", "nvme"])
def test_a_tier_that_is_not_there_at_the_mount_is_refused(mnt: TestMount, tier: str) -> None:
    """An NFS that is not mounted at boot leaves an empty directory: nothing may count as durable there."""
    mnt.allow_log = [r"is it mounted\?", r"ended with code 1 before the mount was ready"]
    (mnt.path / "file.pt").write_bytes(b"1" * MB)
    mnt.flush()
    mnt.umount()
    where = mnt.archive if tier == "archive" else mnt.nvme
    assert where is not None
    aside = where.with_name(where.name + "-aside")
    where.rename(aside)
    where.mkdir()
    refused = mnt.cli("mount", mnt.config, mnt.path, check=False)
    shutil.rmtree(where)
    aside.rename(where)
    assert refused.code == 1
    assert "is it mounted?" in refused.err
    mnt.mount()
    assert (mnt.path / "file.pt").read_bytes() == b"1" * MB


# the last good copy


def test_an_overwrite_leaves_the_durable_version_until_the_new_one_is_durable(mnt: TestMount) -> None:
    (mnt.path / "last.pt").write_bytes(b"1" * 3 * MB)
    mnt.flush()
    with paused(mnt):
        (mnt.path / "last.pt").write_bytes(b"2" * MB)
        (mnt.path / "new").write_bytes(b"3" * MB)
        (mnt.path / "new").rename(mnt.path / "renamed-over.pt")
        assert (mnt.archive / "last.pt").read_bytes() == b"1" * 3 * MB
    mnt.flush()
    assert (mnt.archive / "last.pt").read_bytes() == b"2" * MB
    assert (mnt.archive / "renamed-over.pt").read_bytes() == b"3" * MB


def test_a_delete_reaches_the_archive_after_what_was_closed_before_it(mnt: TestMount) -> None:
    """A trainer writes checkpoint 2 and at once deletes checkpoint 1."""
    (mnt.path / "1.pt").write_bytes(b"1" * MB)
    mnt.flush()
    with paused(mnt):
        (mnt.path / "2.pt").write_bytes(b"2" * 32 * MB)
        (mnt.path / "1.pt").unlink()
    deadline = time.monotonic() + 30
    while (mnt.archive / "1.pt").exists():
        assert time.monotonic() < deadline
    assert (mnt.archive / "2.pt").stat().st_size == 32 * MB


def test_open_files_are_not_evicted(mnt: TestMount) -> None:
    (mnt.path / "model.pt").write_bytes(b"m" * MB)
    mnt.flush()
    with (mnt.path / "model.pt").open("rb") as reader:
        mnt.evict(mnt.path / "model.pt")
        assert "memory" in tiers_of(mnt, mnt.path / "model.pt")
        assert reader.read() == b"m" * MB

    def evicted() -> bool:  # the release of the last descriptor comes after close() returned
        mnt.evict(mnt.path / "model.pt")
        return "memory" not in tiers_of(mnt, mnt.path / "model.pt")

    eventually(evicted)
    assert (mnt.path / "model.pt").read_bytes() == b"m" * MB


# room


def test_a_file_that_memory_has_no_room_for_is_created_one_tier_lower(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, memory="64MiB") as mnt, paused(mnt):
        contents = {f"{n}.pt": bytes([n]) * (20 * MB) for n in range(5)}
        for name, content in contents.items():
            (mnt.path / name).write_bytes(content)
        assert tiers_of(mnt, mnt.path / "0.pt") == {"memory"}
        assert tiers_of(mnt, mnt.path / "4.pt") == {"nvme"}
        for name, content in contents.items():
            assert (mnt.path / name).read_bytes() == content


def test_clean_copies_make_room_in_memory(mounter: Mounter, mode: str) -> None:
    rules = [{"match": "**/*.best", "keep": {"memory": "all"}}]
    with limited(mounter, mode, memory="64MiB", rules=rules) as mnt:
        (mnt.path / "model.best").write_bytes(b"b" * MB)
        for number in range(6):
            (mnt.path / f"{number}.pt").write_bytes(bytes([number]) * (20 * MB))
            mnt.flush()
        eventually(lambda: int(str(tier_status(mnt, "memory")["used"])) <= 55 * MB)
        assert "memory" in tiers_of(mnt, mnt.path / "model.best")
        for number in range(6):
            assert (mnt.path / f"{number}.pt").read_bytes() == bytes([number]) * (20 * MB)


def test_keep_none_leaves_memory_once_durable_below(mounter: Mounter, mode: str) -> None:
    rules = [{"match": "**/*.pt", "keep": {"memory": "none"}}]
    with limited(mounter, mode, rules=rules) as mnt:
        (mnt.path / "model.pt").write_bytes(b"m" * MB)
        mnt.flush(to="nvme")
        eventually(lambda: "memory" not in tiers_of(mnt, mnt.path / "model.pt"))
        assert (mnt.path / "model.pt").read_bytes() == b"m" * MB


def test_statfs_counts_all_tiers(mnt: TestMount) -> None:
    tiers = mnt.status()["tiers"]
    assert isinstance(tiers, list)
    found = os.statvfs(mnt.path)
    assert found.f_blocks * found.f_frsize == sum(tier["capacity"] // 4096 * 4096 for tier in tiers)
    assert {tier["name"] for tier in tiers} == {"memory", "nvme", "archive"}


# same bytes


def test_a_recall_refuses_bytes_that_were_not_written(mounter: Mounter, mode: str) -> None:
    noise = [r"does not have the bytes written to it", r"Input/output error", "digest", "recall"]
    with limited(mounter, mode, allow_log=noise) as mnt:
        (mnt.path / "model.pt").write_bytes(b"m" * MB)
        mnt.flush()
        for tier in ("memory", "nvme"):
            mnt.evict(mnt.path / "model.pt", tier=tier)
        assert tiers_of(mnt, mnt.path / "model.pt") == {"archive"}
        before = (mnt.archive / "model.pt").stat()
        with (mnt.archive / "model.pt").open("r+b") as damaged:
            damaged.seek(MB // 2)
            damaged.write(b"M")
        os.utime(mnt.archive / "model.pt", ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(OSError, match="Input/output error"):
            (mnt.path / "model.pt").read_bytes()
        assert "archive" in mnt.log
        with (mnt.archive / "model.pt").open("r+b") as repaired:
            repaired.seek(MB // 2)
            repaired.write(b"m")
        assert (mnt.path / "model.pt").read_bytes() == b"m" * MB


def test_warmup_brings_files_up_ahead_of_need(mnt: TestMount) -> None:
    (mnt.path / "dir").mkdir()
    (mnt.path / "dir" / "model.pt").write_bytes(b"m" * MB)
    mnt.flush()
    for tier in ("memory", "nvme"):
        mnt.evict(mnt.path / "dir", tier=tier)
    assert tiers_of(mnt, mnt.path / "dir" / "model.pt") == {"archive"}
    mnt.cli("warmup", mnt.path / "dir")
    assert tiers_of(mnt, mnt.path / "dir" / "model.pt") == {"memory", "archive"}


# a tier that fails


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("chattr"), reason="needs root and chattr")
def test_an_archive_that_fails_costs_only_time(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, allow_log=["tier archive: .*trying again"]) as mnt:
        (mnt.path / "before.pt").write_bytes(b"b" * MB)
        mnt.flush()
        broken = mnt.archive / ".tierfs" / "tmp"
        if subprocess.run(["chattr", "+i", broken], capture_output=True).returncode:
            pytest.skip("the archive's filesystem knows no immutable directories")
        try:
            (mnt.path / "model.pt").write_bytes(b"m" * MB)
            eventually(lambda: tier_status(mnt, "archive")["state"] == "failing")
            assert "archive" in str(tier_status(mnt, "archive")["last_error"])
            assert (mnt.path / "before.pt").read_bytes() == b"b" * MB
            (mnt.path / "model.pt").rename(mnt.path / "renamed.pt")
            late = mnt.cli("flush", mnt.path, "--timeout", "1s", check=False)
            assert (late.code, late.out) == (3, "")
            assert "renamed.pt" in late.err
            mnt.flush(to="nvme")
        finally:
            subprocess.run(["chattr", "-i", broken], check=True)
        mnt.flush()
        assert (mnt.archive / "renamed.pt").read_bytes() == b"m" * MB
        assert tier_status(mnt, "archive")["state"] == "ok"


# names, owners, attributes


def test_the_archives_own_name_is_reserved_at_the_root(mnt: TestMount) -> None:
    with pytest.raises(PermissionError):
        (mnt.path / ".tierfs").mkdir()
    (mnt.path / "file").touch()
    with pytest.raises(PermissionError):
        (mnt.path / "file").rename(mnt.path / ".tierfs")
    (mnt.path / "below").mkdir()
    (mnt.path / "below" / ".tierfs").touch()
    mnt.flush()
    assert (mnt.archive / "below" / ".tierfs").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs other users")
def test_files_belong_to_who_made_them(mnt: TestMount) -> None:
    mnt.path.chmod(0o777)
    program = (
        "import os, sys; os.chdir(sys.argv[1]); os.mkdir('dir'); open('dir/file', 'w').close();"
        "os.symlink('dir', 'link'); os.mkfifo('fifo')"
    )
    # a copy of the interpreter's own environment may lie in a directory closed to others
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
    subprocess.run([python, "-I", "-c", program, mnt.path], user=4242, group=4243, extra_groups=[], check=True)
    for name in ("dir", "dir/file", "link", "fifo"):
        found = (mnt.path / name).lstat()
        assert (found.st_uid, found.st_gid) == (4242, 4243)
    (mnt.path / "private").write_bytes(b"x")
    (mnt.path / "private").chmod(0o600)
    read = [python, "-I", "-c", "import sys; open(sys.argv[1])", mnt.path / "private"]
    assert b"PermissionError" in subprocess.run(read, user=4242, group=4243, capture_output=True).stderr
    mnt.flush()
    assert (mnt.archive / "dir" / "file").stat().st_uid == 4242


def test_an_open_file_shows_its_size_and_blocks_at_once(mnt: TestMount) -> None:
    path = mnt.path / "file"
    with path.open("wb", buffering=0) as file:
        for size in range(MB, 5 * MB, MB):
            file.write(b"x" * MB)
            assert os.fstat(file.fileno()).st_size == path.stat().st_size == size
    assert path.stat().st_blocks * 512 >= 4 * MB
    with (mnt.path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 30)
    assert (mnt.path / "sparse").stat().st_blocks * 512 < MB


def test_only_user_attributes_are_kept(mnt: TestMount) -> None:
    path = mnt.path / "file"
    path.touch()
    for name in ("trusted.x", "security.x"):
        with pytest.raises(OSError, match="not supported"):
            os.setxattr(path, name, b"1")
    with pytest.raises(OSError, match="not supported"):
        os.setxattr(path, "system.posix_acl_access", b"\2\0\0\0")
    with pytest.raises(OSError, match=r"too long|too large|No space"):
        os.setxattr(path, "user.large", bytes(1 << 17))


def test_virtual_attributes_say_where_a_file_is(mnt: TestMount) -> None:
    path = mnt.path / "model.pt"
    with paused(mnt):
        path.write_bytes(b"1" * MB)
        assert os.getxattr(path, "user.tierfs.tier") == b"memory"
        assert os.getxattr(path, "user.tierfs.durable") == b"none"
        assert os.getxattr(path, "user.tierfs.version") == b"1"
    mnt.flush()
    assert os.getxattr(path, "user.tierfs.durable") == b"archive"
    for tier in ("memory", "nvme"):
        mnt.evict(path, tier=tier)
    assert os.getxattr(path, "user.tierfs.tier") == b"archive"
    with path.open("r+b") as file:
        file.write(b"2")
    assert os.getxattr(path, "user.tierfs.version") == b"2"
    for name in ("tier", "durable", "version", "other"):
        with pytest.raises(PermissionError):
            os.setxattr(path, f"user.tierfs.{name}", b"x")
    assert not [name for name in os.listxattr(path) if name.startswith("user.tierfs.")]
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(mnt.path, "user.tierfs.tier")


def test_setting_the_flush_attribute_returns_once_on_the_archive(mnt: TestMount) -> None:
    path = mnt.path / "model.pt"
    path.write_bytes(b"m" * 5 * MB)
    os.setxattr(path, "user.tierfs.flush", b"")
    assert (mnt.archive / "model.pt").read_bytes() == b"m" * 5 * MB
    assert os.getxattr(path, "user.tierfs.durable") == b"archive"


def test_reading_leaves_the_access_time_alone(mnt: TestMount) -> None:
    path = mnt.path / "file"
    path.write_bytes(b"x")
    os.utime(path, ns=(1_000_000_007, 2_000_000_009))
    path.read_bytes()
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (1_000_000_007, 2_000_000_009)


def test_times_and_attributes_outlive_eviction_and_remount(mnt: TestMount) -> None:
    path = mnt.path / "file"
    path.write_bytes(b"x" * MB)
    path.chmod(0o640)
    os.setxattr(path, "user.note", b"kept")
    os.utime(path, ns=(1_000_000_007, 2_000_000_009))
    mnt.flush()
    for tier in ("memory", "nvme"):
        mnt.evict(path, tier=tier)
    mnt.umount()
    mnt.mount()
    assert path.read_bytes() == b"x" * MB
    found = path.stat()
    assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (2_000_000_009, 0o640)
    assert os.getxattr(path, "user.note") == b"kept"
    assert os.getxattr(mnt.archive / "file", "user.note") == b"kept"


# the command line


def test_fsck_leaves_nothing_behind(mnt: TestMount) -> None:
    (mnt.path / "model.pt").write_bytes(b"m" * MB)
    mnt.umount("--no-drain")
    kept = is_mounted(mnt.memory)
    assert mnt.cli("fsck", mnt.config).out == "no problems found\n"
    assert is_mounted(mnt.memory) == kept
    mnt.mount()
    assert (mnt.path / "model.pt").read_bytes() == b"m" * MB
    mnt.umount()
    assert not is_mounted(mnt.memory)
    mnt.cli("fsck", mnt.config)
    assert not is_mounted(mnt.memory)


def test_flush_says_what_is_not_durable_in_time(mnt: TestMount) -> None:
    with paused(mnt):
        (mnt.path / "model.pt").write_bytes(b"m" * MB)
        late = mnt.cli("flush", mnt.path / "model.pt", "--timeout", "500ms", check=False)
        assert (late.code, late.out) == (3, "")
        assert "model.pt" in late.err
        assert late.err.count("\n") == 1
    done = mnt.cli("flush", mnt.path / "model.pt", "--timeout", "60s", "--json").json()
    assert done == {"files": 1, "bytes": MB, "tier": "archive"}


def test_a_busy_mount_stays_and_says_who_uses_it(mnt: TestMount) -> None:
    with (mnt.path / "file").open("wb"):
        busy = mnt.cli("umount", mnt.path, check=False)
        assert busy.code == 1
        assert f"({os.getpid()})" in busy.err
        (mnt.path / "other").write_bytes(b"goes on")
    mnt.flush()
    assert (mnt.archive / "other").read_bytes() == b"goes on"
