from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tierfs.control.protocol import (
    MAX_LINE,
    Failure,
    MountRecord,
    Ok,
    Progress,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    list_mounts,
    mount_directory,
    mount_table,
    pid_alive,
    runtime_directory,
)
from tierfs.errors import UsageError

DEAD = 2**22 + 1  # above the kernel's largest pid


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIERFS_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def record(mountpoint: str = "/mnt/a b", **changes: object) -> MountRecord:
    values: dict[str, object] = {
        "mountpoint": mountpoint,
        "config": "/etc/c.yaml",
        "state": "/s",
        "keeper_pid": None,
        "daemon_pid": os.getpid(),
        "mode": "userspace",
    }
    return MountRecord(**(values | changes))  # type: ignore[arg-type]


def test_request_round_trip_keeps_any_file_name() -> None:
    name = os.fsdecode(b"a\xff\n/b")
    line = encode_request("info", {"path": name})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_request(line) == Request("info", {"path": name})


@pytest.mark.parametrize("reply", [Progress(1, 3, "draining"), Ok({"files": 2}), Failure("no", 3)])
def test_reply_round_trip(reply: Reply) -> None:
    assert decode_reply(encode_reply(reply)) == reply


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b"{}\n", b'{"op": 1}\n', b'{"op": ""}\n', b"\xff\n", b'{"op": "x", "n": NaN}\n', b"[" * 100_000],
)
def test_a_nonsense_request_is_refused(line: bytes) -> None:
    with pytest.raises(UsageError):
        decode_request(line)


@pytest.mark.parametrize("line", [b"{}\n", b'{"ok": 1}\n', b'{"error": {}}\n', b'{"progress": {"done": 1}}\n'])
def test_a_nonsense_reply_is_refused(line: bytes) -> None:
    with pytest.raises(UsageError):
        decode_reply(line)


def test_long_lines_are_refused_both_ways() -> None:
    with pytest.raises(UsageError):
        encode_request("warmup", {"paths": ["x" * MAX_LINE]})
    with pytest.raises(UsageError):
        decode_request(b'{"op": "' + b"x" * MAX_LINE)


def test_a_mount_directory_is_the_quoted_mountpoint(runtime: Path) -> None:
    assert mount_directory("/mnt/a b") == runtime / "%2Fmnt%2Fa%20b"
    assert mount_directory(os.fsdecode(b"/\xff")) == runtime / "%2F%FF"
    assert len(mount_directory("/" + "é" * 100).name) <= 255
    assert mount_directory("/" + "é" * 100) != mount_directory("/" + "é" * 101)


def test_runtime_directory_of_root_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERFS_RUNTIME_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert runtime_directory() == Path("/run/tierfs")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/x")
    assert runtime_directory() == Path("/run/user/x/tierfs")


def test_record_round_trip_in_a_private_directory(runtime: Path) -> None:
    record().write()
    assert MountRecord.read(mount_directory("/mnt/a b")) == record()
    assert stat.S_IMODE((runtime / "%2Fmnt%2Fa%20b").stat().st_mode) == 0o700
    assert [p.name for p in (runtime / "%2Fmnt%2Fa%20b").iterdir()] == ["mount.json"]


def test_list_mounts_drops_only_dead_and_unmounted() -> None:
    assert list_mounts() == []
    alive = record("/alive")
    keeper = record("/keeper", daemon_pid=DEAD, keeper_pid=os.getpid())
    mounted = record("/proc", daemon_pid=DEAD)
    for entry in (mounted, keeper, alive, record("/gone", daemon_pid=DEAD, keeper_pid=DEAD)):
        entry.write()
    assert list_mounts() == [alive, keeper, mounted]


def test_list_mounts_skips_damaged_records(runtime: Path) -> None:
    record().write()
    (mount_directory("/mnt/a b") / "mount.json").write_text("{")
    (runtime / "file").write_text("")
    assert list_mounts() == []


def test_remove_leaves_the_record_of_a_newer_mount() -> None:
    old, new = record(daemon_pid=DEAD), record()
    new.write()
    old.remove()
    assert list_mounts() == [new]
    new.remove()
    assert not new.directory.exists()


def test_a_zombie_is_not_alive() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not pid_alive(pid)
    os.waitpid(pid, 0)
    assert not pid_alive(pid)
    assert pid_alive(os.getpid())
    assert mount_table()["/proc"] == "proc"
