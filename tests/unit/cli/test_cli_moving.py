"""flush, warmup, evict, pause, resume and restart."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.unit.cli.talking import Capture, FakeDaemon, run
from tierfs.errors import NotDurableInTime


def test_paths_are_sent_relative(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    assert run("info", mnt / "a.pt") == 0
    assert run("flush", mnt / "d", "--to", "nvme", "--timeout", "5m") == 0
    assert run("flush", mnt, "--json") == 0
    assert run("warmup", mnt / "a", mnt / "b") == 0
    assert run("evict", mnt / "a", "--from", "memory") == 0
    assert daemon.calls == [
        ("info", {"path": "a.pt"}),
        ("flush", {"path": "d", "to": "nvme", "timeout": 300.0}),
        ("flush", {"path": ""}),
        ("warmup", {"paths": ["a", "b"]}),
        ("evict", {"paths": ["a"], "from": "memory"}),
    ]
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "1 copies evicted (10B), 1 kept" in captured.out


def test_flush_of_every_mount_has_to_be_asked_for(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    for arguments in ([], ["--json"], ["--timeout", "5s"]):
        assert run("flush", *arguments) == 2
        err = capsys.readouterr().err
        assert "PATH" in err
        assert "MOUNTPOINT" in err
        assert "--all" in err
    assert daemon.calls == []
    assert run("flush", "--all", mnt) == 2
    assert daemon.calls == []
    capsys.readouterr()
    assert run("flush", "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [daemon.answers["flush"]]
    assert daemon.calls == [("flush", {"path": "", "emergency": True})]


def test_flush_in_vain_exits_3_with_the_list(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    daemon.answers["flush"] = NotDurableInTime("not durable on archive after 1 s: a.pt, b.pt")
    assert run("flush", mnt, "--timeout", "1s", "--json") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "tierfs: not durable on archive after 1 s: a.pt, b.pt\n"


def test_pause_resume_restart(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    assert run("pause", mnt) == run("resume", mnt) == run("restart", mnt) == 0
    assert [op for op, _ in daemon.calls] == ["pause", "resume", "status", "restart", "status"]
    assert "daemon 7 was replaced by 8" in capsys.readouterr().out


def test_restart_by_config(daemon: FakeDaemon, config: Path) -> None:
    assert run("restart", config) == 0
    assert "restart" in [op for op, _ in daemon.calls]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_commands_show_a_bar_on_a_terminal(
    daemon: FakeDaemon, mnt: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """flush, umount, warmup, evict, fsck and mount all use the same one."""
    for command in ("flush", "warmup", "evict"):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        assert run(command, mnt / "a.pt") == 0
        assert "half [odd]\\x1b" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run("flush", mnt / "a.pt") == 0
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
